"""Converts decoded images to a `PixelFormat`, resizes images of any number of channels, and reads .npy files.

A .npy file is (H, W) or (H, W, channels), uint8 or uint16.
"""

from __future__ import annotations

import io
import os

import cv2
import numpy as np

from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat, as_16_bits
from utils.strings import counted

NPY_MAGIC = b"\x93NUMPY"
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


def resize_area(image: np.ndarray, size_wh: tuple[int, int], target: np.ndarray | None = None) -> np.ndarray:
    """Shrinks ``image`` (h, w, C), so that each pixel is the mean of the area it covers, into ``target`` if given."""
    if image.shape[2] <= 4:
        return with_channels(cv2.resize(image, size_wh, dst=target, interpolation=cv2.INTER_AREA))
    # OpenCV resizes at most four channels at once.
    groups = (np.ascontiguousarray(image[..., first : first + 4]) for first in range(0, image.shape[2], 4))
    resized = [with_channels(cv2.resize(group, size_wh, interpolation=cv2.INTER_AREA)) for group in groups]
    return np.concatenate(resized, 2, out=target)


def resize(image: np.ndarray, width: int, height: int, target: np.ndarray | None = None) -> np.ndarray:
    """Resizes ``image`` (h, w, C) bilinearly, or by area if both sides shrink to half or less.

    Bilinear interpolation would cause aliasing then. ``target``: (height, width, C) to write into and return; without a
    target, the result may be ``image`` itself.
    """
    if image.shape[:2] == (height, width):
        if target is None:
            return image
        target[:] = image
        return target
    if image.shape[0] >= 2 * height and image.shape[1] >= 2 * width:
        return resize_area(image, (width, height), target)
    return with_channels(cv2.resize(image, (width, height), dst=target, interpolation=cv2.INTER_LINEAR))


def check_jpeg_channels(path: str | os.PathLike, pixels: PixelFormat) -> None:
    """Raises UserError for a format whose number of channels no JPEG has."""
    if pixels.channels not in (1, 3):
        raise UserError(f"{path}: a JPEG has 3 channels at most, but the data set or model has {pixels.channels}")


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
