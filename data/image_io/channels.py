"""Converts decoded images to a `PixelFormat`."""

from __future__ import annotations

import os

import cv2
import numpy as np

from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat, as_16_bits
from utils.strings import counted

# OpenCV's conversion code, by the channel counts of the image and of the format.
_FROM_BGR = {
    (1, 3): cv2.COLOR_GRAY2RGB,
    (3, 3): cv2.COLOR_BGR2RGB,
    (4, 3): cv2.COLOR_BGRA2RGB,
    (3, 1): cv2.COLOR_BGR2GRAY,
    (4, 1): cv2.COLOR_BGRA2GRAY,
    (4, 4): cv2.COLOR_BGRA2RGBA,
}
_FROM_RGB = {
    (1, 3): cv2.COLOR_GRAY2RGB,
    (4, 3): cv2.COLOR_RGBA2RGB,
    (3, 1): cv2.COLOR_RGB2GRAY,
    (4, 1): cv2.COLOR_RGBA2GRAY,
}


def to_format(
    image: np.ndarray, path: str | os.PathLike, pixels: PixelFormat = RGB8, *, is_rgb: bool = False
) -> np.ndarray:
    """Converts decoded pixels to (H, W, C) of the format, C-contiguous.

    ``image`` is (H, W) or (H, W, c), uint8 or uint16, BGR unless ``is_rgb``. An 8-bit format gets 16-bit values divided
    by 257 and rounded. A format with one or three channels gets gray, RGB and RGBA images converted; any other format
    requires an image with the same number of channels. Raises UserError.
    """
    if image.dtype not in (np.uint8, np.uint16):
        raise UserError(f"{path}: {image.dtype} pixels are not supported; convert the image to 8 or 16 bits")
    channels = 1 if image.ndim == 2 else image.shape[2]
    conversion = (_FROM_RGB if is_rgb else _FROM_BGR).get((channels, pixels.channels))
    if conversion is None and channels != pixels.channels:
        raise channel_error(channels, path, pixels)
    image = _with_bits(image, path, pixels.bits)
    if conversion is not None:
        image = cv2.cvtColor(image, conversion)
    return with_channels(np.ascontiguousarray(image))


def channel_error(channels: int, path: str | os.PathLike, pixels: PixelFormat) -> UserError:
    """Returns the error about an image whose number of ``channels`` cannot be converted to the format."""
    if pixels == RGB8:
        reason = "; expected 1 (gray), 3 (color), 4 (color and alpha), or the number of 'channels' in the YAML"
    else:
        reason = f", but the data set or model has {pixels.channels}; correct 'channels' in the YAML, or the image"
    return UserError(f"{path}: {counted(channels, 'channel')}{reason}")


def _with_bits(image: np.ndarray, path: str | os.PathLike, bits: int) -> np.ndarray:
    """Converts uint8 or uint16 values to a format with ``bits`` bits. Raises UserError if a value exceeds its range."""
    if bits == 8:
        return cv2.convertScaleAbs(image, alpha=1 / 257) if image.dtype == np.uint16 else image
    if image.dtype == np.uint16:
        largest = int(image.max(initial=0))
        if largest >> bits:
            raise UserError(f"{path}: has the value {largest}, above {bits} bits; correct 'bits' in the YAML")
    return as_16_bits(image, bits)


def with_channels(image: np.ndarray) -> np.ndarray:
    """Returns (H, W, C), adding the last axis to (H, W), in which OpenCV returns an image with one channel."""
    return image if image.ndim == 3 else image[..., None]


def check_jpeg_channels(path: str | os.PathLike, pixels: PixelFormat) -> None:
    """Raises UserError for a format whose number of channels no JPEG has."""
    if pixels.channels not in (1, 3):
        raise UserError(f"{path}: a JPEG has 3 channels at most, but the data set or model has {pixels.channels}")
