"""Pictures for the tests of image files."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def gradient(height: int = 24, width: int = 40) -> np.ndarray:
    """Returns a picture that is smooth, so that JPEG preserves it, and different on every side."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], 2).astype(np.uint8)


def noise(channels: int = 3, bits: int = 8, height: int = 20, width: int = 30, seed: int = 0) -> np.ndarray:
    """Returns random samples (H, W, channels)."""
    dtype = np.uint8 if bits <= 8 else np.uint16
    return np.random.default_rng(seed).integers(0, 1 << bits, (height, width, channels), dtype)


def encoded(image: np.ndarray, kind: str, mode: str = "", **options: object) -> bytes:
    """Returns an image file, written by Pillow in ``kind``, converted to ``mode`` before."""
    file = io.BytesIO()
    picture = Image.fromarray(image)
    (picture.convert(mode) if mode else picture).save(file, kind, **options)
    return file.getvalue()
