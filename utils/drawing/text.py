"""Writes text in any script on images, uint8 (H, W, 3) RGB, with the fonts of this machine."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.machine.packages import import_quietly

if TYPE_CHECKING:
    from PIL import ImageFont


def write_text(canvas: np.ndarray, text: str, xy: tuple[int, int], size: int, background: np.ndarray) -> None:
    """Writes black or white text, whichever contrasts better, on a patch of color ``background`` into ``canvas``.
    ``xy`` is the patch's top-left corner. The patch is moved into the canvas, and cropped if it is larger."""
    mask = text_mask(text, size)
    height, width = canvas.shape[:2]
    x = int(np.clip(xy[0], 0, max(0, width - mask.shape[1])))
    y = int(np.clip(xy[1], 0, max(0, height - mask.shape[0])))
    mask = mask[: height - y, : width - x]
    background = np.asarray(background, np.float32)
    ink = 0.0 if background @ np.array([0.299, 0.587, 0.114], np.float32) > 140 else 255.0
    cover = mask[..., None].astype(np.float32) / 255
    canvas[y : y + mask.shape[0], x : x + mask.shape[1]] = np.round(background * (1 - cover) + ink * cover)


@lru_cache(maxsize=1024)
def text_mask(text: str, size: int) -> np.ndarray:
    """Renders one line of text as coverage, uint8 (h, w). The height depends only on the font.

    The font is matplotlib's DejaVu Sans (Latin, Greek, Cyrillic, Arabic, ...), or else a system font that has all
    letters of the text. Characters without a glyph are written as ``<code point>``.
    """
    from PIL import Image, ImageDraw

    path = font_with(text)
    font = _load(path, size)
    ascent, descent = font.getmetrics()
    shown = with_code_points(text, path)
    canvas = Image.new("L", (max(1, round(font.getlength(shown)) + 1), ascent + descent))
    ImageDraw.Draw(canvas).text((0, 0), shown, fill=255, font=font)
    mask = np.asarray(canvas)
    mask.setflags(write=False)  # cached, so shared by all callers
    return mask


def font_with(text: str) -> str:
    """Returns the path of a font that has all letters of ``text``, DejaVu Sans or a system font, or of DejaVu Sans if
    there is none. Returns "" for Pillow's built-in font if DejaVu Sans is missing."""
    default = _default_font()
    if not default or _has_all(default, text):
        return default
    return next((path for path in _system_fonts() if _has_all(path, text)), default)


def _has_all(path: str, text: str) -> bool:
    return _charmap(path).issuperset(map(ord, text))


def with_code_points(text: str, path: str) -> str:
    """Replaces characters without a glyph in a font by their code points. ``path``: "" for Pillow's built-in font."""
    if not path:
        return text
    letters = _charmap(path)
    return "".join(letter if ord(letter) in letters else f"<{ord(letter):X}>" for letter in text)


@lru_cache(maxsize=64)
def _load(path: str, size: int) -> ImageFont.FreeTypeFont:
    """Loads a font; "" is Pillow's built-in font."""
    from PIL import ImageFont

    if path:
        return ImageFont.truetype(path, size)
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "a size was given"
    return font


@lru_cache(maxsize=1)
def _default_font() -> str:
    """Returns the path of DejaVu Sans, or "" without matplotlib, for Pillow's built-in font."""
    try:
        matplotlib = import_quietly("matplotlib")
    except (ImportError, ValueError):  # ValueError: MPLBACKEND names a backend that this Python lacks
        return ""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return str(path) if path.is_file() else ""


@lru_cache(maxsize=1)
def _system_fonts() -> tuple[str, ...]:
    font_manager = import_quietly("matplotlib.font_manager")
    return tuple(sorted(font_manager.findSystemFonts()))


@lru_cache(maxsize=256)
def _charmap(path: str) -> frozenset[int]:
    """Returns the code points of the letters that a font has."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (RuntimeError, OSError):  # a font file that FreeType cannot read
        return frozenset()
