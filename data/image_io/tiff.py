"""Reads TIFF files: which kinds OpenCV reads correctly, and the others by the package tifffile.

OpenCV mixes up the channels of some kinds, and drops or does not convert those of others, without an error.
"""

from __future__ import annotations

import io
import logging
import math
import os
import struct
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from data.image_io.header import ORIENTATION_TAG, TiffField, tiff_field
from utils.errors import UserError, first_line
from utils.machine.packages import require_package
from utils.pixels import RGB8, PixelFormat, as_16_bits
from utils.strings import counted

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

# Tags (TIFF 6.0).
_IMAGE_WIDTH = 256
_IMAGE_LENGTH = 257
_BITS_PER_SAMPLE = 258
_COMPRESSION = 259
_PHOTOMETRIC = 262
_SAMPLES_PER_PIXEL = 277
_ROWS_PER_STRIP = 278
_STRIP_BYTE_COUNTS = 279
_PLANAR_CONFIGURATION = 284
_PREDICTOR = 317
_TILE_WIDTH = 322
_EXTRA_SAMPLES = 338
_SAMPLE_FORMAT = 339
# Fields that decide how pixels are read. Decoders ignore them if they are damaged, and read other pixels.
_CHECKED_FIELDS = {
    _BITS_PER_SAMPLE: "BitsPerSample",
    _COMPRESSION: "Compression",
    _PHOTOMETRIC: "PhotometricInterpretation",
    _SAMPLES_PER_PIXEL: "SamplesPerPixel",
    _PLANAR_CONFIGURATION: "PlanarConfiguration",
    _PREDICTOR: "Predictor",
    _EXTRA_SAMPLES: "ExtraSamples",
    _SAMPLE_FORMAT: "SampleFormat",
}
_UNCOMPRESSED = 1  # value of Compression
_UNSIGNED = 1  # value of SampleFormat
_CHUNKY = 1  # value of PlanarConfiguration: the channels of a pixel are stored together
_UNASSOCIATED_ALPHA = 2  # value of ExtraSamples
_ALPHA = {1, _UNASSOCIATED_ALPHA}
_MAX_PIXELS_OF_OPENCV = 1 << 30  # in any kind of file


class _Photometric(IntEnum):
    """The meaning of samples."""

    WHITE_IS_ZERO = 0
    BLACK_IS_ZERO = 1
    RGB = 2
    PALETTE = 3
    CMYK = 5
    YCBCR = 6


_MIN_CHANNELS: dict[int, int] = {_Photometric.RGB: 3, _Photometric.CMYK: 4, _Photometric.YCBCR: 3}
# Values of Compression. OpenCV decodes these: none, CCITT, LZW, JPEG, Deflate and PackBits. Of some others it returns
# black pixels.
_DECOMPRESSED_BY_OPENCV = {_UNCOMPRESSED, 2, 3, 4, 5, 6, 7, 8, 32771, 32773, 32946}
_OTHER_COMPRESSIONS = {34712: "JPEG 2000", 34887: "LERC", 34925: "LZMA", 50000: "ZSTD", 50001: "WebP", 50002: "JPEG XL"}
# The kinds (meaning, bits per sample, channels) that OpenCV reads correctly, in three sets.
_READ_IN_ANY_LAYOUT = {
    (_Photometric.WHITE_IS_ZERO, 8, 1),
    (_Photometric.BLACK_IS_ZERO, 8, 1),
    (_Photometric.BLACK_IS_ZERO, 16, 1),
    (_Photometric.RGB, 8, 3),
    (_Photometric.RGB, 8, 4),
    (_Photometric.PALETTE, 8, 1),
    (_Photometric.CMYK, 8, 4),
}
# Not if each channel has a plane of its own.
_READ_WITHOUT_PLANES = {(_Photometric.RGB, 16, 3), (_Photometric.RGB, 16, 4), (_Photometric.YCBCR, 8, 3)}
# Only in strips, not in tiles, and without planes.
_READ_IN_STRIPS = {
    (_Photometric.WHITE_IS_ZERO, 1, 1),
    (_Photometric.BLACK_IS_ZERO, 1, 1),
    (_Photometric.BLACK_IS_ZERO, 8, 2),  # gray and alpha
    (_Photometric.BLACK_IS_ZERO, 16, 2),
    *((_Photometric.BLACK_IS_ZERO, bits, 1) for bits in (10, 12, 14)),
    *((_Photometric.RGB, bits, 3) for bits in (10, 12, 14)),
}


def check_fields(tiff: bytes, path: str | os.PathLike) -> None:
    """Raises UserError if a field of the first page that decides how pixels are read is damaged or missing."""
    for tag, name in _CHECKED_FIELDS.items():
        field = tiff_field(tiff, tag)
        if field is not None and not field.values:
            raise UserError(f"{path}: cannot be decoded (its field {name} is damaged)")
    if tiff_field(tiff, _IMAGE_WIDTH) is None:
        return
    if tiff_field(tiff, _PHOTOMETRIC) is None:
        raise UserError(f"{path}: cannot be decoded (it has no field PhotometricInterpretation)")
    if tiff_field(tiff, _COMPRESSION) is None and not _fits_uncompressed(tiff):
        raise UserError(f"{path}: cannot be decoded (it has no field Compression, but is compressed)")


def _fits_uncompressed(tiff: bytes) -> bool:
    """Returns whether the first strip has as many bytes as its pixels without compression. Older versions of ImageJ
    write no field Compression."""
    height = _value(tiff, _IMAGE_LENGTH, default=-1)
    rows = min(_value(tiff, _ROWS_PER_STRIP, default=height), height)
    bits = _values(tiff, _BITS_PER_SAMPLE, default=1)
    has_planes = _value(tiff, _PLANAR_CONFIGURATION, default=_CHUNKY) != _CHUNKY
    channels = 1 if has_planes else _value(tiff, _SAMPLES_PER_PIXEL, default=1)
    row_bytes = math.ceil(_value(tiff, _IMAGE_WIDTH, default=-1) * bits[0] * channels / 8)
    return _values(tiff, _STRIP_BYTE_COUNTS, default=-1)[:1] == (rows * row_bytes,)


def is_read_by_opencv(tiff: bytes) -> bool:
    """Returns whether OpenCV reads the first page of a TIFF correctly, after `prepare_for_opencv`."""
    if _compression(tiff) not in _DECOMPRESSED_BY_OPENCV:
        return False
    channels = _value(tiff, _SAMPLES_PER_PIXEL, default=1)
    bits = _values(tiff, _BITS_PER_SAMPLE, default=1)
    if len(set(bits)) != 1 or set(_values(tiff, _SAMPLE_FORMAT, default=_UNSIGNED)) != {_UNSIGNED}:
        return False
    kind = (_value(tiff, _PHOTOMETRIC, default=-1), bits[0], channels)
    has_planes = channels > 1 and _value(tiff, _PLANAR_CONFIGURATION, default=_CHUNKY) != _CHUNKY
    if kind in _READ_IN_ANY_LAYOUT:
        return True
    if kind in _READ_WITHOUT_PLANES:
        return not has_planes
    return kind in _READ_IN_STRIPS and not has_planes and tiff_field(tiff, _TILE_WIDTH) is None


def _values(tiff: bytes, tag: int, *, default: int) -> tuple[int, ...]:
    field = tiff_field(tiff, tag)
    return (default,) if field is None else field.values


def _value(tiff: bytes, tag: int, *, default: int) -> int:
    """Returns the only value of a field; -1 if it has not exactly one."""
    values = _values(tiff, tag, default=default)
    return values[0] if len(values) == 1 else -1


def _compression(tiff: bytes) -> int:
    return _value(tiff, _COMPRESSION, default=_UNCOMPRESSED)


def prepare_for_opencv(tiff: bytes) -> bytes:
    """Returns the same TIFF with pixels that OpenCV neither turns nor blends.

    libtiff turns each tile on its own. It multiplies 8-bit colors by unassociated alpha, so transparent areas would
    become black; it leaves them alone if the meaning of the extra channel is unspecified (0).
    """
    orientation = tiff_field(tiff, ORIENTATION_TAG)
    if orientation is not None and orientation.values:
        tiff = _with_first_value(tiff, orientation, 1)
    extra = tiff_field(tiff, _EXTRA_SAMPLES)
    if extra is not None and extra.values == (_UNASSOCIATED_ALPHA,):
        tiff = _with_first_value(tiff, extra, 0)
    return tiff


def _with_first_value(tiff: bytes, field: TiffField, value: int) -> bytes:
    """Returns the same TIFF with another first value of a field."""
    if field.values[0] == value:
        return tiff
    encoded = struct.pack(field.encoding, value)
    return tiff[: field.offset] + encoded + tiff[field.offset + len(encoded) :]


def read_tiff(data: bytes, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
    """Returns the channels of a TIFF, uint8 or uint16, (H, W) or (H, W, c), not upright; a palette is expanded.

    For 8-bit RGB only the first page is read; otherwise see `_channel_pages`. Raises UserError, or MemoryError, which
    says nothing about the file.
    """
    _require_packages(data, path)
    import tifffile

    logging.getLogger("tifffile").addHandler(logging.NullHandler())  # otherwise it prints its warnings
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            if len(file.pages) == 0:
                raise ValueError("it has no pages")
            pages = [file.pages.first.aspage()] if pixels == RGB8 else _channel_pages(file)
            images = [_read_page(page, pixels) for page in pages]
    except _UnsupportedMeaning as error:
        raise UserError(f"{path}: TIFF of kind {error} is not supported; save it as RGB or PNG") from None
    except struct.error:
        raise UserError(f"{path}: cannot be decoded (the header is truncated)") from None
    except MemoryError:  # the image may be fine
        raise
    except Exception as error:  # the codecs raise errors of their own
        raise UserError(f"{path}: cannot be decoded ({first_line(error)})") from None
    if len(images) == 1:
        return images[0]
    if len({(image.shape, image.dtype) for image in images}) != 1 or images[0].ndim != 2:
        raise UserError(
            f"{path}: its {len(images)} pages are not gray images of one size and type; save one page per channel"
        )
    return np.stack(images, -1)


def _require_packages(tiff: bytes, path: str | os.PathLike) -> None:
    """Raises UserError, which names an uncommon compression, if a package that the TIFF needs is not installed."""
    compression = _compression(tiff)
    kind = "this kind of TIFF"
    if compression not in _DECOMPRESSED_BY_OPENCV:
        kind = f"a TIFF with {_OTHER_COMPRESSIONS.get(compression, f'compression {compression}')}"
    purpose = f"{path}: reading {kind}"
    alternative = "save it as PNG or .npy"
    require_package("tifffile", purpose, alternative)
    from tifffile import TIFF

    if compression not in TIFF.DECOMPRESSORS:
        require_package("imagecodecs", purpose, alternative)


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


def _check_page(page: TiffPage) -> None:
    """Raises ValueError for a page without pixels, for contradictory channels, and for fewer strips or tiles than the
    page's size takes: tifffile would fill the others with zeros, gigabytes of them if the size is damaged. Strips or
    tiles of 0 bytes are zeros, as GDAL's sparse files mean."""
    if page.ndim not in (2, 3) or page.size == 0:
        raise ValueError(f"its pixels have the shape {page.shape}")
    num_chunks = math.prod(page.chunked)
    if len(page.dataoffsets) < num_chunks:
        raise ValueError(f"its size needs {num_chunks:,} strips or tiles, the file lists {len(page.dataoffsets):,}")
    bits = page.tags.get(_BITS_PER_SAMPLE)
    channels = page.samplesperpixel
    if bits is not None and bits.count not in (1, channels):
        raise ValueError(f"it gives the bits of {bits.count} channels, but has {counted(channels, 'channel')}")
    if channels < _MIN_CHANNELS.get(int(page.photometric), 1):
        meaning = _Photometric(page.photometric).name
        raise ValueError(f"it has {counted(channels, 'channel')}, too few for {meaning}")


class _UnsupportedMeaning(Exception):
    """Samples whose meaning is not supported. The message names it."""


def _read_page(page: TiffPage, pixels: PixelFormat) -> np.ndarray:
    """Returns the channels of a page, (H, W) or (H, W, c). Raises ValueError for a damaged page, `_UnsupportedMeaning`,
    and the errors of tifffile."""
    from tifffile import COMPRESSION, PHOTOMETRIC

    _check_page(page)
    values = _decoded(page)
    if page.axes == "SYX":
        values = np.moveaxis(values, 0, -1)
    if page.samplesperpixel == 2 and pixels.channels in (1, 3) and set(page.extrasamples) & _ALPHA:
        values = values[..., 0]
    photometric = int(page.photometric)
    bits = page.bitspersample
    if values.dtype.kind not in "bu" or bits > 16:  # refused by `to_format`
        return values
    if photometric == _Photometric.PALETTE and values.ndim == 2 and page.colormap is not None:
        return _expand_palette(values, page.colormap)
    is_inverted = photometric == _Photometric.WHITE_IS_ZERO and values.ndim == 2
    is_decoded_to_rgb = photometric == _Photometric.YCBCR and page.compression == COMPRESSION.JPEG
    if photometric not in (_Photometric.BLACK_IS_ZERO, _Photometric.RGB) and not is_inverted and not is_decoded_to_rgb:
        raise _UnsupportedMeaning(f"{PHOTOMETRIC(photometric).name} with {counted(page.samplesperpixel, 'channel')}")
    if is_inverted:
        values = ((1 << bits) - 1) - values
    return _fill_bits(values, bits, pixels)


def _decoded(page: TiffPage) -> np.ndarray:
    """Returns the samples of a page. Raises ValueError if they need more memory than there is and are so many that the
    size is probably damaged, MemoryError if they are fewer, and the errors of tifffile."""
    try:
        return page.asarray()
    except MemoryError:
        if page.imagelength * page.imagewidth < _MAX_PIXELS_OF_OPENCV:
            raise
        size = f"{page.imagewidth:,}x{page.imagelength:,}"
        raise ValueError(f"not enough memory for its {size} pixels, if that is its size") from None


def _expand_palette(indices: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Returns the colors uint8 (H, W, 3) of ``indices`` (H, W) into a palette (3, N), of 16 bits or, by mistake, 8."""
    colors = palette if palette.max() <= 255 else palette // np.uint16(257)
    return np.moveaxis(colors.astype(np.uint8)[:, indices.astype(np.uint16)], 0, -1)


def _fill_bits(values: np.ndarray, bits: int, pixels: PixelFormat) -> np.ndarray:
    """Scales samples of ``bits`` bits to 8 or 16; those of 9 to 15 are left alone if the format has as many."""
    if bits < 8:
        return np.rint(values * (255 / ((1 << bits) - 1))).astype(np.uint8)
    if 8 < bits < 16 and bits != pixels.bits:
        return as_16_bits(values, bits)
    return values
