"""Reads TIFF files by tifffile, and decides which of them OpenCV reads instead.

OpenCV mixes up the channels of some kinds (opencv/opencv#28717), and drops or does not convert those of others, without
an error.
"""

from __future__ import annotations

import io
import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from data.images.header import ORIENTATION_TAG, tiff_fields
from utils.errors import UserError, first_line
from utils.machine.packages import require_package
from utils.pixels import RGB8, PixelFormat, as_16_bits

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

# Tags, by their names in TIFF 6.0, with the values that a page lacks if they have a default.
_BITS_PER_SAMPLE = 258
_COMPRESSION = 259
_PHOTOMETRIC = 262
_SAMPLES_PER_PIXEL = 277
_PLANAR_CONFIGURATION = 284
_EXTRA_SAMPLES = 338
_SAMPLE_FORMAT = 339
_DEFAULTS: dict[int, tuple[int, ...]] = {
    _BITS_PER_SAMPLE: (1,),
    _COMPRESSION: (1,),
    _PHOTOMETRIC: (),
    ORIENTATION_TAG: (1,),
    _SAMPLES_PER_PIXEL: (1,),
    _PLANAR_CONFIGURATION: (1,),
    _EXTRA_SAMPLES: (),
    _SAMPLE_FORMAT: (1,),
}
# None, LZW, JPEG, Deflate (two numbers) and PackBits. OpenCV returns black pixels for some others.
_DECOMPRESSED_BY_OPENCV = {1, 5, 7, 8, 32773, 32946}
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6  # meanings of samples
# Meaning, bits per sample, samples per pixel.
_READ_BY_OPENCV = {
    (_WHITE_IS_ZERO, 8, 1),
    (_BLACK_IS_ZERO, 8, 1),
    (_BLACK_IS_ZERO, 16, 1),
    (_RGB, 8, 3),
    (_RGB, 16, 3),
    (_RGB, 8, 4),
    (_RGB, 16, 4),
    (_PALETTE, 8, 1),
    (_CMYK, 8, 4),
    (_YCBCR, 8, 3),
}
_UNASSOCIATED_ALPHA = 2
_ALPHA = {1, _UNASSOCIATED_ALPHA}


def opencv_reads(tiff: bytes) -> bool:
    """Returns whether OpenCV reads a TIFF correctly: 8 or 16 bits, the channels of a pixel together, upright."""
    fields = _DEFAULTS | tiff_fields(tiff, _DEFAULTS)
    bits = set(fields[_BITS_PER_SAMPLE])
    samples = fields[_SAMPLES_PER_PIXEL]
    if (*fields[_PHOTOMETRIC], *bits, *samples) not in _READ_BY_OPENCV:
        return False
    is_chunky = samples == (1,) or fields[_PLANAR_CONFIGURATION] == (1,)
    # libtiff turns each tile on its own, and multiplies 8-bit colors by unassociated alpha.
    is_plain = fields[ORIENTATION_TAG] == (1,) and _UNASSOCIATED_ALPHA not in fields[_EXTRA_SAMPLES]
    is_unsigned = set(fields[_SAMPLE_FORMAT]) == {1}
    return is_chunky and is_plain and is_unsigned and _DECOMPRESSED_BY_OPENCV.issuperset(fields[_COMPRESSION])


def read_tiff(data: bytes, path: str | os.PathLike, pixels: PixelFormat) -> tuple[np.ndarray, int]:
    """Returns the channels of a TIFF, (H, W) or (H, W, c), not upright, RGB or gray first, and the orientation, 1 to 8.

    For 8-bit RGB only the first page is read; otherwise see `_channel_pages`. Raises UserError, or MemoryError, which
    says nothing about the file.
    """
    require_package("tifffile", f"{path}: reading this kind of TIFF", "save it as PNG or .npy")
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # otherwise it prints its warnings
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            pages = [file.pages.first.aspage()] if pixels == RGB8 else _channel_pages(file)
            images = [_read_page(page, pixels) for page in pages]
            orientation = pages[0].tags.valueof(ORIENTATION_TAG, 1)
    except MemoryError:  # the image may be fine
        raise
    except Exception as error:  # the codecs raise errors of their own
        raise UserError(f"{path}: cannot be decoded ({first_line(error)})") from None
    orientation = int(orientation) if orientation in range(1, 9) else 1
    if len(images) == 1:
        return images[0], orientation
    if len({(image.shape, image.dtype) for image in images}) != 1 or images[0].ndim != 2:
        raise UserError(
            f"{path}: its {len(images)} pages are not gray images of one size and type; save one page per channel"
        )
    return np.stack(images, -1), orientation


def _channel_pages(file: TiffFile) -> list[TiffPage]:
    """Returns the first page, and the other pages that may be channels of its image.

    Overviews and masks, as GDAL writes them, are no channels; nor are the other pages if all of them have another size.
    """
    first, *others = (page.aspage() for page in file.pages)
    channels = [page for page in others if not page.is_reduced and not page.is_mask]
    first_hw = (first.imagelength, first.imagewidth)
    if all((page.imagelength, page.imagewidth) != first_hw for page in channels):
        return [first]
    return [first, *channels]


def _read_page(page: TiffPage, pixels: PixelFormat) -> np.ndarray:
    """Returns the channels of a page, (H, W) or (H, W, c). Raises ValueError, and the errors of tifffile."""
    values = page.asarray()
    if values.ndim not in (2, 3) or values.size == 0:
        raise ValueError(f"its pixels have the shape {values.shape}")
    if page.axes == "SYX":
        values = np.moveaxis(values, 0, -1)
    bits = page.bitspersample
    if values.dtype.kind not in "bu" or bits > 16:  # refused by `to_format`
        return values
    if page.samplesperpixel == 2 and pixels.channels in (1, 3) and set(page.extrasamples) & _ALPHA:
        values = values[..., 0]
    if page.photometric == _WHITE_IS_ZERO and values.ndim == 2:
        values = ((1 << bits) - 1) - values
    elif page.photometric not in (_BLACK_IS_ZERO, _RGB):
        meaning = getattr(page.photometric, "name", page.photometric)
        raise ValueError(f"{meaning} with {page.samplesperpixel} samples is not supported; save it as RGB")
    if bits < 8:
        return np.rint(values * (255 / ((1 << bits) - 1))).astype(np.uint8)
    return as_16_bits(values, bits) if 8 < bits < 16 and bits != pixels.bits else values
