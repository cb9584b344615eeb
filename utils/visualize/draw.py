"""Boxes with labels on pictures, and pictures side by side. Images are uint8 (H, W, 3) RGB.

Labels are written in any script, with fonts that are already on the machine; nothing is downloaded.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np

from utils.errors import UserError
from utils.files.safe_io import write_whole


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


GOLDEN_RATIO = 0.618034
GAP_COLOUR = 255


def class_colours(classes: np.ndarray) -> np.ndarray:
    """RGB uint8 (n, 3) of classes (n,): the same class has the same colour in every picture and run."""
    classes = np.asarray(classes, np.int64).reshape(-1)
    return np.array([_class_colour(int(c)) for c in classes], np.uint8).reshape(-1, 3)


@lru_cache(maxsize=4096)
def _class_colour(index: int) -> tuple[int, int, int]:
    """Hues a golden-ratio turn apart, so neighbours differ; three shades in turn."""
    saturation, value = ((0.85, 0.95), (0.60, 1.0), (0.95, 0.70))[index // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb((0.98 + index * GOLDEN_RATIO) % 1.0, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def line_width(height: int, width: int) -> int:
    """A line that is seen but hides little, pixels."""
    return max(1, round((height + width) / 2 * 0.003))


def draw_boxes(
    image: np.ndarray,
    boxes_xyxy: np.ndarray,
    labels: Sequence[str] | None = None,
    colours: np.ndarray | None = None,
    *,
    thickness: int = 0,
    text_size: int = 0,
) -> np.ndarray:
    """A copy of ``image`` with boxes drawn on it; earlier boxes lie on top of later ones.

    Args:
        image: uint8 (H, W, 3) RGB.
        boxes_xyxy: (n, 4) pixels; parts off the image are not seen.
        labels: n texts in any script; empty ones, or None, draw no label.
        colours: uint8 (n, 3) RGB, e.g. of `class_colours`; None: one colour for all.
        thickness: line width, pixels; 0: by image size.
        text_size: font size, pixels; 0: by image size.
    """
    canvas = np.ascontiguousarray(image).copy()
    height, width = canvas.shape[:2]
    boxes = np.asarray(boxes_xyxy, np.float64).reshape(-1, 4)
    boxes = np.round(np.clip(np.nan_to_num(boxes), -1e4, 1e5)).astype(int)
    if colours is None:
        colours = class_colours(np.zeros(len(boxes), int))
    thickness = thickness or line_width(height, width)
    text_size = text_size or max(10, round((height + width) / 2 * 0.022))
    order = range(len(boxes) - 1, -1, -1)
    for i in order:
        x0, y0, x1, y1 = boxes[i].tolist()
        cv2.rectangle(canvas, (x0, y0), (x1 - 1, y1 - 1), colours[i].tolist(), thickness, cv2.LINE_8)
    if labels is not None:
        for i in order:
            if labels[i]:
                _draw_label(canvas, boxes[i], labels[i], colours[i], text_size)
    return canvas


def _draw_label(canvas: np.ndarray, box: np.ndarray, text: str, colour: np.ndarray, size: int) -> None:
    """Above the box if there is room, else inside its top; never off the picture."""
    mask = text_mask(text, size)
    x = min(int(box[0]), canvas.shape[1] - mask.shape[1])
    y = int(box[1]) - mask.shape[0] if box[1] >= mask.shape[0] else int(box[1])
    write_text(canvas, text, (x, y), size, colour)


def write_text(canvas: np.ndarray, text: str, xy: tuple[int, int], size: int, ground: np.ndarray) -> None:
    """Writes black or white text, whichever reads better, on a patch of colour ``ground``, into ``canvas``.

    Args:
        xy: where the patch's top-left corner goes; moved onto the canvas, and cut where it is too wide for it.
    """
    mask = text_mask(text, size)
    height, width = canvas.shape[:2]
    x = int(np.clip(xy[0], 0, max(0, width - mask.shape[1])))
    y = int(np.clip(xy[1], 0, max(0, height - mask.shape[0])))
    mask = mask[: height - y, : width - x]
    ground = np.asarray(ground, np.float32)
    ink = 0.0 if ground @ np.array([0.299, 0.587, 0.114], np.float32) > 140 else 255.0
    cover = mask[..., None].astype(np.float32) / 255
    canvas[y : y + mask.shape[0], x : x + mask.shape[1]] = np.round(ground * (1 - cover) + ink * cover)


def tile_images(images: Sequence[np.ndarray], columns: int, *, gap: int = 2) -> np.ndarray:
    """Pictures of one size in rows of ``columns``, white between them and where the last row ends early."""
    if not images:
        raise ValueError("no pictures to tile")
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap, 3)
    sheet = np.full(shape, GAP_COLOUR, np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * (height + gap), i % columns * (width + gap)
        sheet[y : y + height, x : x + width] = image
    return sheet


def write_image(path: str | Path, image: np.ndarray) -> None:
    """Writes a picture, RGB, in the format of the name's suffix; any characters may be in the path.

    Raises UserError for more pixels than the format holds: a JPEG has at most 65,500 a side.
    """
    ok, encoded = cv2.imencode(Path(path).suffix, np.ascontiguousarray(image[..., ::-1]))
    if not ok:
        raise UserError(f"{path}: {image.shape[1]}x{image.shape[0]} pixels cannot be written in this format")
    write_whole(path, encoded.tobytes())
