"""Draws boxes, and labels in any script, on images, uint8 (H, W, 3) RGB, with fonts that are on the machine."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from utils.decoder_warnings import watched
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.machine.packages import import_quietly

if TYPE_CHECKING:
    from PIL import ImageFont


@lru_cache(maxsize=1024)
def text_mask(text: str, size: int) -> np.ndarray:
    """Renders one line of text as coverage, uint8 (h, w); the height depends on the font only.

    The font is matplotlib's DejaVu Sans (Latin, Greek, Cyrillic, Arabic, ...), or a system font that has all letters of
    the text; letters that no font has are written as ``<code point>``.
    """
    from PIL import Image, ImageDraw

    path, text = _font_for(text)
    font = _load(path, size)
    ascent, descent = font.getmetrics()
    canvas = Image.new("L", (max(1, round(font.getlength(text)) + 1), ascent + descent))
    ImageDraw.Draw(canvas).text((0, 0), text, fill=255, font=font)
    mask = np.asarray(canvas)
    mask.setflags(write=False)  # cached, so shared by all callers
    return mask


def _font_for(text: str) -> tuple[str, str]:
    default = _default_font()
    if not default:
        return default, text
    missing = {letter for letter in text if ord(letter) not in _charmap(default)}
    if not missing:
        return default, text
    for path in _system_fonts():
        if all(ord(letter) in _charmap(path) for letter in text):
            return path, text
    return default, "".join(f"<{ord(letter):X}>" if letter in missing else letter for letter in text)


@lru_cache(maxsize=64)
def _load(path: str, size: int) -> ImageFont.FreeTypeFont:
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
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (RuntimeError, OSError):  # a font file that FreeType cannot read
        return frozenset()


GOLDEN_RATIO = 0.618034


def class_colors(classes: np.ndarray) -> np.ndarray:
    """Returns the RGB colors, uint8 (n, 3), of classes (n,). A class has the same color in all images and runs."""
    classes = np.asarray(classes, np.int64).reshape(-1)
    return np.array([_class_color(int(c)) for c in classes], np.uint8).reshape(-1, 3)


@lru_cache(maxsize=4096)
def _class_color(index: int) -> tuple[int, int, int]:
    """Returns the color of a class. Hues of successive classes are a golden-ratio turn apart; three shades alternate
    every eight classes."""
    saturation, value = ((0.85, 0.95), (0.60, 1.0), (0.95, 0.70))[index // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb((0.98 + index * GOLDEN_RATIO) % 1.0, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(
    image: np.ndarray,
    boxes_xyxy: np.ndarray,
    labels: Sequence[str] | None = None,
    colors: np.ndarray | None = None,
    *,
    thickness: int = 0,
    text_size: int = 0,
) -> np.ndarray:
    """Draws boxes (n, 4), pixels, on a copy of ``image``, uint8 (H, W, 3) RGB. Earlier boxes are on top of later ones.

    Args:
        labels: n texts in any script; an empty one is not drawn.
        colors: uint8 (n, 3) RGB, such as `class_colors`; None: one color for all.
        thickness, text_size: pixels; 0: depends on the image size.
    """
    canvas = np.ascontiguousarray(image).copy()
    height, width = canvas.shape[:2]
    boxes = np.asarray(boxes_xyxy, np.float64).reshape(-1, 4)
    boxes = np.round(np.clip(np.nan_to_num(boxes), -1e4, 1e5)).astype(int)
    if colors is None:
        colors = class_colors(np.zeros(len(boxes), int))
    thickness = thickness or max(1, round((height + width) / 2 * 0.003))
    text_size = text_size or max(10, round((height + width) / 2 * 0.022))
    order = range(len(boxes) - 1, -1, -1)
    for i in order:
        x0, y0, x1, y1 = boxes[i].tolist()
        cv2.rectangle(canvas, (x0, y0), (x1 - 1, y1 - 1), colors[i].tolist(), thickness, cv2.LINE_8)
    if labels is None:
        return canvas
    for i in order:
        if labels[i]:  # above the box if there is space, else inside its top edge
            x, y = boxes[i, :2].tolist()
            above = y - text_mask(labels[i], text_size).shape[0]
            write_text(canvas, labels[i], (x, above if above >= 0 else y), text_size, colors[i])
    return canvas


def write_text(canvas: np.ndarray, text: str, xy: tuple[int, int], size: int, background: np.ndarray) -> None:
    """Writes black or white text, whichever contrasts better, on a patch of color ``background`` into ``canvas``.
    ``xy``: the patch's top-left corner; the patch is moved into the canvas, and cut off if it is larger."""
    mask = text_mask(text, size)
    height, width = canvas.shape[:2]
    x = int(np.clip(xy[0], 0, max(0, width - mask.shape[1])))
    y = int(np.clip(xy[1], 0, max(0, height - mask.shape[0])))
    mask = mask[: height - y, : width - x]
    background = np.asarray(background, np.float32)
    ink = 0.0 if background @ np.array([0.299, 0.587, 0.114], np.float32) > 140 else 255.0
    cover = mask[..., None].astype(np.float32) / 255
    canvas[y : y + mask.shape[0], x : x + mask.shape[1]] = np.round(background * (1 - cover) + ink * cover)


def write_image(path: str | Path, image: np.ndarray) -> None:
    """Writes an RGB image in the format of the path's suffix. Raises UserError if it is too large for the format: a
    side of a JPEG has at most 65,500 pixels."""
    write_whole(path, encode_image(image, Path(path).suffix, path))


def encode_image(image: np.ndarray, suffix: str, path: str | Path) -> bytes:
    """Encodes an RGB image in the format of ``suffix``. Raises UserError about ``path``, as `write_image` does."""
    bgr = np.ascontiguousarray(image[..., ::-1])
    (ok, encoded), _ = watched(lambda: cv2.imencode(suffix, bgr))  # its warnings must not be taken for a decoder's
    if not ok:
        raise UserError(f"{path}: {image.shape[1]}x{image.shape[0]} pixels cannot be written in the format {suffix}")
    return encoded.tobytes()
