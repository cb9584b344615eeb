"""Decides which TIFF files OpenCV reads correctly, and reads the others by tifffile.

OpenCV mixes up the channels of some kinds, and drops or does not convert those of others, without an error.
"""

from __future__ import annotations

import io
import logging
import math
import os
import struct
from typing import TYPE_CHECKING

import numpy as np

from data.image_io.header import MAX_PIXELS_OF_OPENCV, TiffField, read_tiff_fields
from data.image_io.tiff_damage import wrong_number_of_chunks
from data.image_io.tiff_fields import (
    NO_PREDICTOR,
    UNSIGNED,
    WITHOUT_PREDICTOR,
    Compression,
    Field,
    Photometric,
    PixelFields,
)
from utils.errors import UserError, first_line
from utils.machine.packages import require_package
from utils.pixels import RGB8, PixelFormat, as_16_bits
from utils.strings import counted

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

_UNASSOCIATED_ALPHA = 2  # value of ExtraSamples
_ALPHA = {1, _UNASSOCIATED_ALPHA}
_MIN_CHANNELS: dict[int, int] = {Photometric.RGB: 3, Photometric.CMYK: 4, Photometric.YCBCR: 3}
_DECOMPRESSED_BY_OPENCV = frozenset(Compression)
# Names of compression schemes that tifffile reads, with imagecodecs. OpenCV returns black pixels for some of them.
_OTHER_COMPRESSIONS = {34712: "JPEG 2000", 34887: "LERC", 34925: "LZMA", 50000: "ZSTD", 50001: "WebP", 50002: "JPEG XL"}
# The kinds (meaning, bits per sample, channels) that OpenCV reads correctly, in three sets: first, those in strips,
# tiles and planes.
_READ_IN_ANY_LAYOUT = {
    (Photometric.WHITE_IS_ZERO, 8, 1),
    (Photometric.BLACK_IS_ZERO, 8, 1),
    (Photometric.BLACK_IS_ZERO, 16, 1),
    (Photometric.RGB, 8, 3),
    (Photometric.RGB, 8, 4),
    (Photometric.PALETTE, 8, 1),
    (Photometric.CMYK, 8, 4),
}
# Not if each channel has a plane of its own, as GDAL writes them (INTERLEAVE=BAND): in planes of 16 bits, OpenCV takes
# neighbors for the channels of a pixel.
_READ_WITHOUT_PLANES = {(Photometric.RGB, 16, 3), (Photometric.RGB, 16, 4), (Photometric.YCBCR, 8, 3)}
# Only in strips, without planes: OpenCV fails on tiles of 1 bit or of gray and alpha, and multiplies gray by alpha if
# they have planes.
_READ_IN_STRIPS = {
    (Photometric.WHITE_IS_ZERO, 1, 1),
    (Photometric.BLACK_IS_ZERO, 1, 1),
    (Photometric.BLACK_IS_ZERO, 8, 2),  # gray and alpha
    (Photometric.BLACK_IS_ZERO, 16, 2),
    *((Photometric.BLACK_IS_ZERO, bits, 1) for bits in (10, 12, 14)),
    *((Photometric.RGB, bits, 3) for bits in (10, 12, 14)),
}
# OpenCV fails on uncompressed tiles whose number of bytes is not a multiple of this.
_TILE_BYTES_UNIT = 1024


def opencv_reads(fields: PixelFields) -> bool:
    """Returns whether OpenCV reads the page correctly, after `prepare_for_opencv`."""
    bits = set(fields.values(Field.BitsPerSample))
    is_unsigned = set(fields.values(Field.SampleFormat)) == {UNSIGNED}
    if fields.compression not in _DECOMPRESSED_BY_OPENCV or len(bits) != 1 or not is_unsigned:
        return False
    is_tiled = bool(fields.values(Field.TileWidth))
    if is_tiled and fields.compression == Compression.NONE and fields.tile_bytes() % _TILE_BYTES_UNIT:
        return False
    kind = (fields.value(Field.PhotometricInterpretation), *bits, fields.channels)
    if kind in _READ_IN_ANY_LAYOUT:
        return True
    if fields.has_planes:
        return False
    return kind in _READ_WITHOUT_PLANES or (kind in _READ_IN_STRIPS and not is_tiled)


def prepare_for_opencv(tiff: bytes) -> bytes:
    """Returns the same TIFF with pixels that OpenCV neither turns nor blends.

    libtiff turns each tile on its own. It multiplies 8-bit colors by unassociated alpha, so transparent areas would
    become black; it leaves them alone if the meaning of the extra channel is unspecified (0).
    """
    fields = read_tiff_fields(tiff, {Field.Orientation, Field.ExtraSamples})
    orientation = fields.get(Field.Orientation)
    if orientation is not None and orientation.values:
        tiff = _with_first_value(tiff, orientation, 1)
    extra = fields.get(Field.ExtraSamples)
    if extra is not None and extra.values == (_UNASSOCIATED_ALPHA,):
        tiff = _with_first_value(tiff, extra, 0)
    return tiff


def _with_first_value(tiff: bytes, field: TiffField, value: int) -> bytes:
    """Returns the same TIFF with another first value of a field."""
    encoded = struct.pack(field.encoding, value)
    if tiff.startswith(encoded, field.offset):
        return tiff
    return tiff[: field.offset] + encoded + tiff[field.offset + len(encoded) :]


def read_tiff(data: bytes, path: str | os.PathLike, pixels: PixelFormat, compression: int) -> np.ndarray:
    """Returns the channels of a TIFF, uint8 or uint16, (H, W) or (H, W, c), not upright; a palette is expanded.

    For 8-bit RGB only the first page is read; otherwise see `_channel_pages`. Raises UserError, or MemoryError, which
    says nothing about the file.
    """
    _require_packages(compression, path)
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


def _require_packages(compression: int, path: str | os.PathLike) -> None:
    """Raises UserError, which names an uncommon ``compression``, if a package that the TIFF needs is not installed."""
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
    """Raises ValueError for a page without pixels, for a field that tifffile misreads, for contradictory channels, and
    for fewer strips or tiles than the page's size takes: tifffile would fill the others with zeros, gigabytes of them
    if the size is damaged. Strips or tiles of 0 bytes are zeros, as GDAL's sparse files mean."""
    if page.ndim not in (2, 3) or page.size == 0:
        raise ValueError(f"its pixels have the shape {page.shape}")
    channels = page.samplesperpixel
    planar = page.tags.get(Field.PlanarConfiguration)
    # tifffile takes any value of 8 bits for planes, and looks for the strips or tiles of one plane only.
    if planar is not None and isinstance(planar.value, bytes) and channels > 1:
        raise ValueError("its field PlanarConfiguration has 8 bits instead of 16")
    if page.is_tiled and page.compression == Compression.NONE:
        _check_tile_bytes(page)
    num_chunks = math.prod(page.chunked)
    num_listed = min(len(page.dataoffsets), len(page.databytecounts))
    if num_listed < num_chunks:
        raise ValueError(wrong_number_of_chunks(num_chunks, num_listed))
    bits = page.tags.get(Field.BitsPerSample)
    if bits is not None and bits.count not in (1, channels):
        raise ValueError(f"it gives the bits of {bits.count} channels, but has {counted(channels, 'channel')}")
    if channels < _MIN_CHANNELS.get(int(page.photometric), 1):
        meaning = Photometric(page.photometric).name
        raise ValueError(f"it has {counted(channels, 'channel')}, too few for {meaning}")


def _check_tile_bytes(page: TiffPage) -> None:
    """Raises ValueError for uncompressed tiles of another size than the fields say: one of these is damaged, and
    tifffile would take other bytes for the rows of a tile."""
    from tifffile import PLANARCONFIG

    row_samples = page.tilewidth * (1 if page.planarconfig == PLANARCONFIG.SEPARATE else page.samplesperpixel)
    tile_bytes = math.ceil(row_samples * page.bitspersample / 8) * page.tilelength * page.tiledepth
    other_sizes = {*page.databytecounts} - {0, tile_bytes}
    if other_sizes:
        raise ValueError(f"its tiles need {tile_bytes:,} bytes, the file lists {min(other_sizes):,}")


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
    if photometric == Photometric.PALETTE and values.ndim == 2 and page.colormap is not None:
        return _expand_palette(values, page.colormap)
    is_inverted = photometric == Photometric.WHITE_IS_ZERO and values.ndim == 2
    is_decoded_to_rgb = photometric == Photometric.YCBCR and page.compression == COMPRESSION.JPEG
    if photometric not in (Photometric.BLACK_IS_ZERO, Photometric.RGB) and not is_inverted and not is_decoded_to_rgb:
        raise _UnsupportedMeaning(f"{PHOTOMETRIC(photometric).name} with {counted(page.samplesperpixel, 'channel')}")
    if is_inverted:
        values = ((1 << bits) - 1) - values
    return _fill_bits(values, bits, pixels)


def _decoded(page: TiffPage) -> np.ndarray:
    """Returns the samples of a page. Raises ValueError if they need more memory than there is and are so many that the
    size is probably damaged, MemoryError if they are fewer, and the errors of tifffile."""
    if page.compression in WITHOUT_PREDICTOR:
        page.predictor = NO_PREDICTOR  # otherwise tifffile takes values for differences
    try:
        return page.asarray()
    except MemoryError:
        if page.imagelength * page.imagewidth < MAX_PIXELS_OF_OPENCV:
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
