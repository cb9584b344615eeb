"""Text as pixels in any script, from fonts that are already on the machine (nothing is downloaded)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np


@lru_cache(maxsize=1024)
def text_mask(text: str, size: int) -> np.ndarray:
    """One line of text: uint8 (h, w) coverage, as high as the font's line whatever the letters.

    The font is matplotlib's own DejaVu Sans (Latin, Greek, Cyrillic, Arabic, ...). Text that it lacks letters for is
    set in a font of the system that has them, and failing that, such letters show as ``<code point>``.
    """
    from PIL import Image, ImageDraw

    path, text = _font_for(text)
    font = _load(path, size)
    ascent, descent = font.getmetrics()
    picture = Image.new("L", (max(1, round(font.getlength(text)) + 1), ascent + descent))
    ImageDraw.Draw(picture).text((0, 0), text, fill=255, font=font)
    mask = np.asarray(picture)
    mask.setflags(write=False)  # shared by all who ask for the same text
    return mask


def _font_for(text: str) -> tuple[str, str]:
    """A font file and the text to set in it."""
    default = _default_font()
    if not default:
        return default, text
    missing = {letter for letter in text if not _has(default, letter)}
    if not missing:
        return default, text
    for path in _system_fonts():
        if all(_has(path, letter) for letter in text):
            return path, text
    return default, "".join(f"<{ord(letter):X}>" if letter in missing else letter for letter in text)


@lru_cache(maxsize=64)
def _load(path: str, size: int):
    from PIL import ImageFont

    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


@lru_cache(maxsize=1)
def _default_font() -> str:
    """Empty without matplotlib: Pillow's built-in font is taken then."""
    try:
        import matplotlib
    except ImportError:
        return ""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return str(path) if path.is_file() else ""


@lru_cache(maxsize=1)
def _system_fonts() -> tuple[str, ...]:
    from matplotlib import font_manager

    return tuple(sorted(font_manager.findSystemFonts()))


@lru_cache(maxsize=4096)
def _has(path: str, letter: str) -> bool:
    charmap = _charmap(path)
    return ord(letter) in charmap


@lru_cache(maxsize=256)
def _charmap(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (RuntimeError, OSError):  # a font file that FreeType cannot read
        return frozenset()
