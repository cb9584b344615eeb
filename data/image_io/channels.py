"""Images of other than three channels, or of more than 8 bits: gray, RGBA, multispectral TIFF, and .npy files.

- A TIFF of several pages has a channel in each. OpenCV reads these, and files of at most four channels that say what
  their channels are. For other files the package tifffile is needed: OpenCV would drop channels without a word.
- A .npy file is (H, W) or (H, W, channels), uint8 or uint16.
"""

from __future__ import annotations

import ast
import io
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import cv2
import numpy as np

from utils.config.pixels import RGB8, PixelFormat, as_16_bits
from utils.errors import UserError, first_line
from utils.machine.limits import require_package
from utils.strings import counted

NPY_MAGIC = b"\x93NUMPY"
_TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_BIG_TIFF = (b"II+\0", b"MM\0+")
_MOST_PAGES = 1 << 12
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

    For 8 bits, 16-bit samples are divided by 257 and rounded. For three channels or one, gray, RGB and RGBA images are
    converted; else the image must have the channels of the format. An image that has the format is returned itself.
    Raises UserError that begins with ``path``.
    """
    if image.dtype not in (np.uint8, np.uint16):
        raise UserError(f"{path}: {image.dtype} samples are not supported; convert it to 8 or 16 bits")
    found = 1 if image.ndim == 2 else image.shape[2]
    conversion = (_FROM_RGB if is_rgb else _FROM_BGR).get((found, pixels.channels))
    if conversion is None and found != pixels.channels:
        usual = "; supported are 1 (gray), 3 (color) and 4 (with alpha), or those that 'channels:' of the YAML names"
        usual = usual if pixels == RGB8 else ""
        of_file = f"; the data set or the model has {pixels.channels}: correct 'channels:' in the YAML, or this image"
        raise UserError(f"{path}: {counted(found, 'channel')}{usual or of_file}")
    if pixels.bits == 8:
        image = cv2.convertScaleAbs(image, alpha=1 / 257) if image.dtype == np.uint16 else image
    else:
        if image.dtype == np.uint16 and (most := int(image.max(initial=0))) >> pixels.bits:
            raise UserError(f"{path}: has the value {most}, more than {pixels.bits} bits hold; correct 'bits:' or it")
        image = as_16_bits(image, pixels.bits)
    image = np.ascontiguousarray(image if conversion is None else cv2.cvtColor(image, conversion))
    return with_channels(image)


def with_channels(image: np.ndarray) -> np.ndarray:
    """(H, W, C) from (H, W, C) or, as OpenCV returns an image of one channel, (H, W)."""
    return image if image.ndim == 3 else image[..., None]


def resize_area(image: np.ndarray, size_wh: tuple[int, int], target: np.ndarray | None = None) -> np.ndarray:
    """Shrinks (h, w, C), each pixel the mean of its area; OpenCV does at most four channels at once.

    ``target``: receives the result.
    """
    if image.shape[2] <= 4:
        return with_channels(cv2.resize(image, size_wh, dst=target, interpolation=cv2.INTER_AREA))
    groups = (np.ascontiguousarray(image[..., first : first + 4]) for first in range(0, image.shape[2], 4))
    parts = [with_channels(cv2.resize(group, size_wh, interpolation=cv2.INTER_AREA)) for group in groups]
    return np.concatenate(parts, 2, out=target)


def check_jpeg_channels(path: str | os.PathLike, pixels: PixelFormat) -> None:
    """Raises UserError for a format that no JPEG has."""
    if pixels.channels not in (1, 3):
        raise UserError(f"{path}: a JPEG has 3 channels at most, the data set or the model {pixels.channels}")


def read_npy(data: bytes, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
    """The array of a .npy file in memory, a view: (H, W) or (H, W, c). Raises UserError for any other array."""
    shape, dtype, in_columns, start = _npy_header(data, len(data), path, pixels)
    array = np.frombuffer(data, dtype, shape[0] * shape[1] * (shape[2] if len(shape) == 3 else 1), start)
    array = array.reshape(shape, order="F" if in_columns else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def npy_size(data: bytes, nbytes: int, path: str | os.PathLike, pixels: PixelFormat) -> tuple[int, int]:
    """Height and width in a .npy file of ``nbytes`` bytes, which begins with ``data``. Raises UserError as `read_npy`
    does, and for other channels than those of the format."""
    shape, dtype, _, _ = _npy_header(data, nbytes, path, pixels)
    to_format(np.zeros((1, 1, *shape[2:]), dtype.newbyteorder("=")), path, pixels, is_rgb=True)
    return shape[:2]


def _npy_header(
    data: bytes, nbytes: int, path: str | os.PathLike, pixels: PixelFormat
) -> tuple[tuple[int, ...], np.dtype, bool, int]:
    """Shape, type, whether columns are contiguous, and where the samples begin. Pickled objects are never loaded."""
    try:
        wide = data[6] > 1
        (length,) = struct.unpack_from("<I" if wide else "<H", data, 8)
        start = (12 if wide else 10) + length
        header = ast.literal_eval(data[12 if wide else 10 : start].decode("latin-1"))
        shape, dtype, in_columns = tuple(header["shape"]), np.dtype(header["descr"]), bool(header["fortran_order"])
    except (ValueError, SyntaxError, KeyError, TypeError, IndexError, struct.error, MemoryError, RecursionError):
        raise UserError(f"{path}: damaged .npy file (its header cannot be read)") from None
    if len(shape) not in (2, 3) or not all(type(side) is int and 0 < side < 1 << 24 for side in shape):
        raise UserError(f"{path}: an array of shape {shape}; (H, W) or (H, W, channels) is expected")
    if len(shape) == 3 and shape[0] == pixels.channels != shape[2]:
        raise UserError(f"{path}: an array of shape {shape}, channels first; save it as (H, W, channels)")
    if dtype.newbyteorder("=") not in (np.uint8, np.uint16):
        raise UserError(f"{path}: {dtype} samples are not supported; convert it to uint8 or uint16")
    if nbytes - start < np.prod(shape, dtype=object) * dtype.itemsize:
        raise UserError(f"{path}: damaged .npy file (truncated)")
    return shape, dtype, in_columns, start


class _Tiff(NamedTuple):
    """The directories of a TIFF."""

    pages: int
    samples: int  # per pixel of the first page
    is_planar: bool
    bits: int  # of a sample


def read_tiff(data: bytes, path: str | os.PathLike, decode: Callable[..., Any]) -> np.ndarray:
    """All channels of a TIFF in its order, (H, W) or (H, W, c).

    ``decode``: decodes ``data`` with OpenCV's ``decoder``, by default the one of the first page. Raises UserError.
    """
    layout = _tiff_layout(data)
    if layout is not None and layout.pages > 1:
        _, pages = decode(decoder=cv2.imdecodemulti)
        shapes = {(page.shape, page.dtype) for page in pages}
        if len(pages) != layout.pages or len(shapes) != 1 or pages[0].ndim != 2:
            raise UserError(
                f"{path}: its {layout.pages} pages are not gray images of one size and type; save one page per channel"
            )
        return np.stack(pages, -1)
    if layout is not None and layout.samples <= 4 and not (layout.is_planar and layout.bits == 16):
        image = decode()
        if layout.samples == (1 if image.ndim == 2 else image.shape[2]) and image.itemsize * 8 >= layout.bits:
            return image if image.ndim == 2 else image[..., [2, 1, 0, 3][: image.shape[2]]]  # OpenCV's order is BGR
    return _by_tifffile(data, path)


def _by_tifffile(data: bytes, path: str | os.PathLike) -> np.ndarray:
    require_package("tifffile", f"{path}: a TIFF with these channels", "save one page per channel, or .npy")
    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            image, axes = file.pages[0].asarray(), file.pages[0].axes
    except Exception as error:  # of any kind: its codecs raise their own
        raise UserError(f"{path}: cannot be decoded ({first_line(error)})") from None
    return np.moveaxis(image, 0, -1) if axes == "SYX" else image


def _tiff_layout(data: bytes) -> _Tiff | None:
    """None for a BigTIFF, and for directories that cannot be read."""
    order = _TIFF_ORDERS.get(data[:4], "<")
    pages, tags, seen = 0, {}, set()
    try:
        (at,) = struct.unpack_from(order + "I", data, 4)
        while at and at not in seen and pages < _MOST_PAGES and data[:4] not in _BIG_TIFF:
            seen.add(at)
            (count,) = struct.unpack_from(order + "H", data, at)
            if not pages:
                for entry in range(at + 2, at + 2 + 12 * count, 12):
                    tag, _, values, value = struct.unpack_from(order + "HHIH", data, entry)
                    if tag == 258 and values > 2:  # BitsPerSample
                        (elsewhere,) = struct.unpack_from(order + "I", data, entry + 8)
                        (value,) = struct.unpack_from(order + "H", data, elsewhere)
                    tags[tag] = value
            pages += 1
            (at,) = struct.unpack_from(order + "I", data, at + 2 + 12 * count)
    except struct.error:
        return None
    return _Tiff(pages, tags.get(277, 1), tags.get(284, 1) == 2, tags.get(258, 1)) if pages else None


def is_tiff(data: bytes) -> bool:
    return data[:4] in (*_TIFF_ORDERS, *_BIG_TIFF)
