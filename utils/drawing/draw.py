"""Draws boxes with labels on images, uint8 (H, W, 3) RGB, arranges images on sheets, and encodes them as files."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np

from utils.drawing.text import text_mask, write_text
from utils.errors import UserError
from utils.files.safe_io import write_whole

GOLDEN_RATIO = 0.618034
SHEET_GAP = 2  # white pixels between images


def class_colors(classes: np.ndarray) -> np.ndarray:
    """Returns the RGB colors, uint8 (n, 3), of classes (n,). A class has the same color in all images and runs."""
    classes = np.asarray(classes, np.int64).reshape(-1)
    return np.array([_class_color(int(c)) for c in classes], np.uint8).reshape(-1, 3)


@lru_cache(maxsize=4096)
def _class_color(index: int) -> tuple[int, int, int]:
    """Returns the color of a class. Hues of successive classes are a golden-ratio turn apart; the shade changes every
    eight classes."""
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
        labels: n strings in any script; empty ones are not drawn.
        colors: uint8 (n, 3) RGB, such as from `class_colors`; None: one color for all.
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


def tile_images(images: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Arranges one or more images in rows of ``columns`` on a white sheet, `SHEET_GAP` apart."""
    columns = min(columns, len(images))
    height, width = np.max([image.shape[:2] for image in images], axis=0)
    rows = -(-len(images) // columns)
    shape = (rows * (height + SHEET_GAP) - SHEET_GAP, columns * (width + SHEET_GAP) - SHEET_GAP, 3)
    sheet = np.full(shape, 255, np.uint8)
    for i, image in enumerate(images):
        y = i // columns * (height + SHEET_GAP)
        x = i % columns * (width + SHEET_GAP)
        sheet[y : y + image.shape[0], x : x + image.shape[1]] = image
    return sheet


def write_image(path: str | Path, image: np.ndarray) -> None:
    """Writes an RGB image in the format of the path's suffix, which OpenCV must know. Raises UserError if the image is
    too large for the format (a JPEG has at most 65,500 pixels per side)."""
    write_whole(path, encode_image(image, Path(path).suffix, path))


def encode_image(image: np.ndarray, suffix: str, path: str | Path, *, quality: int = 95) -> bytes:
    """Encodes an RGB image in the format of ``suffix``, a JPEG with this ``quality``. Raises UserError about ``path``,
    as `write_image` does."""
    bgr = np.ascontiguousarray(image[..., ::-1])
    ok, encoded = cv2.imencode(suffix, bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not ok:
        raise UserError(f"{path}: {image.shape[1]}x{image.shape[0]} pixels cannot be written in the format {suffix}")
    return encoded.tobytes()
