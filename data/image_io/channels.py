"""Images of other than three channels, or of more than 8 bits: gray, RGBA, multispectral TIFF, and .npy files.

- TIFF is read by the package tifffile: OpenCV would silently drop channels. A file of several pages has a channel in
  each.
- A .npy file is (H, W) or (H, W, channels), uint8 or uint16.
"""

from __future__ import annotations

import io
import logging
import os

import cv2
import numpy as np

from utils.errors import UserError, first_line
from utils.machine.packages import require_package
from utils.pixels import RGB8, PixelFormat, as_16_bits
from utils.strings import counted

NPY_MAGIC = b"\x93NUMPY"
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# From found channels to those of the format; the conversions of BGR, and of RGB.
_FROM_BGR = {
    (1, 3): cv2.COLOR_GRAY2RGB, (3, 3): cv2.COLOR_BGR2RGB, (4, 3): cv2.COLOR_BGRA2RGB,
    (3, 1): cv2.COLOR_BGR2GRAY, (4, 1): cv2.COLOR_BGRA2GRAY, (4, 4): cv2.COLOR_BGRA2RGBA,
}  # fmt: skip
_FROM_RGB = {
    (1, 3): cv2.COLOR_GRAY2RGB, (4, 3): cv2.COLOR_RGBA2RGB,
    (3, 1): cv2.COLOR_RGB2GRAY, (4, 1): cv2.COLOR_RGBA2GRAY,
}  # fmt: skip


def to_format(
    image: np.ndarray, path: str | os.PathLike, pixels: PixelFormat = RGB8, *, is_rgb: bool = False
) -> np.ndarray:
    """Pixels (H, W) or (H, W, c), uint8 or uint16, BGR unless ``is_rgb``, to (H, W, C) of the format, C-contiguous.

    For 8 bits, 16-bit values are divided by 257 and rounded. For three channels or one, gray, RGB and RGBA images are
    converted; else the image must have the channels of the format. Raises UserError.
    """
    if image.dtype not in (np.uint8, np.uint16):
        raise UserError(f"{path}: {image.dtype} pixels are not supported; convert the image to 8 or 16 bits")
    found = 1 if image.ndim == 2 else image.shape[2]
    conversion = (_FROM_RGB if is_rgb else _FROM_BGR).get((found, pixels.channels))
    if conversion is None and found != pixels.channels:
        usual = "; expected 1 (gray), 3 (color), 4 (color and alpha), or the number of 'channels' in the YAML"
        usual = usual if pixels == RGB8 else ""
        of_file = f", but the data set or model has {pixels.channels}; correct 'channels' in the YAML, or the image"
        raise UserError(f"{path}: {counted(found, 'channel')}{usual or of_file}")
    if pixels.bits == 8:
        image = cv2.convertScaleAbs(image, alpha=1 / 257) if image.dtype == np.uint16 else image
    else:
        if image.dtype == np.uint16 and (most := int(image.max(initial=0))) >> pixels.bits:
            raise UserError(f"{path}: has the value {most}, above {pixels.bits} bits; correct 'bits' in the YAML")
        image = as_16_bits(image, pixels.bits)
    image = np.ascontiguousarray(image if conversion is None else cv2.cvtColor(image, conversion))
    return with_channels(image)


def with_channels(image: np.ndarray) -> np.ndarray:
    """(H, W, C) from (H, W, C) or, as OpenCV returns an image of one channel, (H, W)."""
    return image if image.ndim == 3 else image[..., None]


def resize_area(image: np.ndarray, size_wh: tuple[int, int], target: np.ndarray | None = None) -> np.ndarray:
    """Shrinks (h, w, C), each pixel the mean of its area. ``target`` receives the result."""
    if image.shape[2] <= 4:
        return with_channels(cv2.resize(image, size_wh, dst=target, interpolation=cv2.INTER_AREA))
    # OpenCV does at most four channels at once.
    groups = (np.ascontiguousarray(image[..., first : first + 4]) for first in range(0, image.shape[2], 4))
    parts = [with_channels(cv2.resize(group, size_wh, interpolation=cv2.INTER_AREA)) for group in groups]
    return np.concatenate(parts, 2, out=target)


def check_jpeg_channels(path: str | os.PathLike, pixels: PixelFormat) -> None:
    """Raises UserError for a format that no JPEG has."""
    if pixels.channels not in (1, 3):
        raise UserError(f"{path}: a JPEG has 3 channels at most, but the data set or model has {pixels.channels}")


def read_npy(data: bytes, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
    """The array of a .npy file in memory: (H, W) or (H, W, c). Raises UserError for any other array."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception:  # of many kinds
        raise UserError(f"{path}: damaged .npy file, or not an array of numbers") from None
    if array.ndim not in (2, 3) or array.size == 0:
        raise UserError(f"{path}: has shape {array.shape}; expected (H, W) or (H, W, channels)")
    if array.ndim == 3 and array.shape[0] == pixels.channels != array.shape[2]:
        raise UserError(f"{path}: has shape {array.shape}, channels first; save it as (H, W, channels)")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def read_tiff(data: bytes, path: str | os.PathLike) -> tuple[np.ndarray, int]:
    """All channels of a TIFF, (H, W) or (H, W, c): those of its page, or one of each page; and its orientation, as in
    EXIF. Raises UserError."""
    require_package("tifffile", f"{path}: reading a TIFF that is not 8-bit RGB", "save it as PNG or .npy")
    import tifffile

    logging.getLogger("tifffile").addHandler(logging.NullHandler())  # else it prints what is damaged
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            pages, first = [page.asarray() for page in file.pages], file.pages[0]
            axes, orientation = first.axes, first.tags.valueof("Orientation", 1)
    except Exception as error:  # of any kind: its codecs raise their own
        raise UserError(f"{path}: cannot be decoded ({first_line(error)})") from None
    if len(pages) == 1:
        return np.moveaxis(pages[0], 0, -1) if axes == "SYX" else pages[0], orientation
    if len({(page.shape, page.dtype) for page in pages}) != 1 or pages[0].ndim != 2:
        raise UserError(
            f"{path}: its {len(pages)} pages are not gray images of one size and type; save one page per channel"
        )
    return np.stack(pages, -1), orientation
