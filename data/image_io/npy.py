"""Reads images in .npy files: (H, W) or (H, W, channels), uint8 or uint16."""

from __future__ import annotations

import io
import os

import numpy as np

from utils.errors import UserError
from utils.pixels import PixelFormat

NPY_MAGIC = b"\x93NUMPY"


def read_npy(data: bytes, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
    """Returns the array in the content of a .npy file: (H, W) or (H, W, c). Raises UserError for any other array."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception:  # numpy raises many kinds for damaged content
        raise UserError(f"{path}: damaged .npy file, or not an array of numbers") from None
    if array.ndim not in (2, 3) or array.size == 0:
        raise UserError(f"{path}: has shape {array.shape}; expected (H, W) or (H, W, channels)")
    if array.ndim == 3 and array.shape[0] == pixels.channels != array.shape[2]:
        raise UserError(f"{path}: has shape {array.shape}, channels first; save it as (H, W, channels)")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
