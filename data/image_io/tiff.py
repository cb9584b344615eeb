"""Checks the fields of TIFF files, decides which files OpenCV reads correctly, and reads the others by tifffile.

OpenCV mixes up the channels of some kinds, and drops or does not convert those of others, without an error. Decoders
also return wrong pixels in silence if fields are damaged or contradict one another, so such files are refused.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from data.image_io.header import ORIENTATION_TAG, TiffField, tiff_fields
from utils.errors import UserError, first_line
from utils.machine.packages import require_package
from utils.pixels import RGB8, PixelFormat, as_16_bits
from utils.strings import counted

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage


class _Field(IntEnum):
    """The tags of the fields that are read, by their names in TIFF 6.0."""

    ImageWidth = 256
    ImageLength = 257
    BitsPerSample = 258
    Compression = 259
    PhotometricInterpretation = 262
    StripOffsets = 273
    Orientation = ORIENTATION_TAG
    SamplesPerPixel = 277
    RowsPerStrip = 278
    StripByteCounts = 279
    PlanarConfiguration = 284
    Predictor = 317
    TileWidth = 322
    ExtraSamples = 338
    SampleFormat = 339


class _Compression(IntEnum):
    """The ways of compression that OpenCV decodes. Of some others it returns black pixels."""

    NONE = 1
    CCITT_RLE = 2
    CCITT_T4 = 3
    CCITT_T6 = 4
    LZW = 5
    OLD_JPEG = 6  # its strips follow other rules
    JPEG = 7
    ADOBE_DEFLATE = 8
    CCITT_RLE_WORDS = 32771
    PACK_BITS = 32773
    DEFLATE = 32946


class _Photometric(IntEnum):
    """The meaning of samples."""

    WHITE_IS_ZERO = 0
    BLACK_IS_ZERO = 1
    RGB = 2
    PALETTE = 3
    CMYK = 5
    YCBCR = 6


# Fields that decide how pixels are read. Decoders ignore them if they are damaged, and read other pixels.
_CHECKED_FIELDS = (
    _Field.BitsPerSample,
    _Field.Compression,
    _Field.PhotometricInterpretation,
    _Field.SamplesPerPixel,
    _Field.PlanarConfiguration,
    _Field.Predictor,
    _Field.TileWidth,
    _Field.ExtraSamples,
    _Field.SampleFormat,
)
# Those of them that have a value per channel.
_FIELDS_PER_CHANNEL = {_Field.BitsPerSample, _Field.ExtraSamples, _Field.SampleFormat}
# All values that are defined; any other is damage.
_DEFINED_VALUES: dict[_Field, set[int]] = {
    _Field.PhotometricInterpretation: {*range(7), 8, 9, 10, 32803, 32844, 32845, 34892, 51177, 52527},
    _Field.PlanarConfiguration: {1, 2},
    _Field.Predictor: {1, 2, 3, 34892, 34893, 34894},
    _Field.SampleFormat: set(range(1, 7)),
}
# Compression schemes of bilevel images.
_CCITT = {_Compression.CCITT_RLE, _Compression.CCITT_T4, _Compression.CCITT_T6, _Compression.CCITT_RLE_WORDS}
# Images of one bit, which may lack the field BitsPerSample, are compressed in one of these ways.
_BILEVEL_COMPRESSIONS = {_Compression.NONE, *_CCITT, _Compression.PACK_BITS}
# libtiff ignores the field Predictor of images that are compressed in one of these ways.
_WITHOUT_PREDICTOR = {_Compression.NONE, *_CCITT, _Compression.OLD_JPEG, _Compression.JPEG}
_NO_PREDICTOR = 1  # values of Predictor
_FLOATING_POINT_PREDICTOR = 3
_UNSIGNED = 1  # value of SampleFormat
_FLOATING_POINT = 3  # value of SampleFormat
_CHUNKY = 1  # value of PlanarConfiguration: the channels of a pixel are stored together
# Values of fields that a page lacks (TIFF 6.0). There are none for the other fields.
_DEFAULTS = {
    _Field.BitsPerSample: (1,),
    _Field.Compression: (_Compression.NONE,),
    _Field.SamplesPerPixel: (1,),
    _Field.RowsPerStrip: ((1 << 32) - 1,),  # all rows are in one strip
    _Field.PlanarConfiguration: (_CHUNKY,),
    _Field.SampleFormat: (_UNSIGNED,),
}
_UNASSOCIATED_ALPHA = 2  # value of ExtraSamples
_ALPHA = {1, _UNASSOCIATED_ALPHA}
_MAX_PIXELS_OF_OPENCV = 1 << 30  # in any kind of file
_MIN_CHANNELS: dict[int, int] = {_Photometric.RGB: 3, _Photometric.CMYK: 4, _Photometric.YCBCR: 3}
_DECOMPRESSED_BY_OPENCV = frozenset(_Compression)
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


@dataclass(frozen=True, slots=True)
class PixelFields:
    """The fields of a TIFF's first page that say how its pixels are stored."""

    found: tuple[_Field, ...]  # the fields that the page has, in the order of the file
    values: dict[_Field, tuple[int, ...]]  # with the defaults; empty for a missing field that has none

    @classmethod
    def read(cls, tiff: bytes, path: str | os.PathLike) -> PixelFields:
        """Reads the fields. Raises UserError if one that decides how pixels are read is damaged, missing or contradicts
        others."""
        stored_fields = tiff_fields(tiff, frozenset(_Field))
        values: dict[_Field, tuple[int, ...]] = {field: _DEFAULTS.get(field, ()) for field in _Field}
        for tag, stored in stored_fields.items():
            values[_Field(tag)] = stored.values or ()
        fields = cls(tuple(map(_Field, stored_fields)), values)
        problem = fields._damage(stored_fields)
        if not problem and {_Field.ImageWidth, _Field.ImageLength}.issubset(fields.found):  # or decoders report it
            problem = fields._contradiction()
            if not problem and _Field.TileWidth not in fields.found:  # some programs list tiles as strips
                problem = fields._strip_problem()
        if problem:
            raise UserError(f"{path}: cannot be decoded ({problem})")
        return fields

    def _damage(self, stored_fields: dict[int, TiffField]) -> str:
        """Names a field whose values are unreadable, too many, or not defined; "" if there is none."""
        for field in _CHECKED_FIELDS:
            is_ignored = field is _Field.Predictor and self.compression in _WITHOUT_PREDICTOR
            if field in stored_fields and not is_ignored and _is_damaged(field, stored_fields[field].values):
                return f"its field {field.name} is damaged"
        return ""

    def _contradiction(self) -> str:
        """Says which field is missing or contradicts others; "" if none does."""
        if _Field.PhotometricInterpretation not in self.found:
            return "it has no field PhotometricInterpretation"
        if _Field.Compression not in self.found and not self._is_first_strip_uncompressed():
            return "it has no field Compression, but is compressed"
        if _Field.BitsPerSample not in self.found and not self._may_be_bilevel():
            return "it has no field BitsPerSample, but is not bilevel"
        if self.compression in _CCITT and set(self.values[_Field.BitsPerSample]) != {1}:
            return f"its field Compression is {self.compression}, which is for bilevel images"
        is_of_floats = set(self.values[_Field.SampleFormat]) == {_FLOATING_POINT}
        predictor = self._only_value(_Field.Predictor)
        if predictor == _FLOATING_POINT_PREDICTOR and not is_of_floats and self.compression not in _WITHOUT_PREDICTOR:
            return f"its field Predictor is {predictor}, which is for floating point"
        has_predictor = _Field.Predictor in self.found and predictor != _NO_PREDICTOR
        if has_predictor and self.compression == _Compression.PACK_BITS:
            # libtiff ignores the field, but tifffile writes differences.
            return f"its field Predictor is {predictor}, which programs interpret differently for PackBits"
        return ""

    def _strip_problem(self) -> str:
        """Says how the strips contradict the size of the image; "" if they do not, or are unknown."""
        byte_counts = self.values[_Field.StripByteCounts]  # empty if missing, or of very many strips
        if not byte_counts or self._is_in_one_piece():
            return ""
        is_subsampled = self._only_value(_Field.PhotometricInterpretation) == _Photometric.YCBCR
        needed_bytes = self._first_strip_bytes()
        # The strips of a sparse file have 0 bytes.
        if self.compression == _Compression.NONE and not is_subsampled and 0 < byte_counts[0] < needed_bytes:
            return f"its first strip needs {needed_bytes:,} bytes, the file lists {byte_counts[0]:,}"
        num_strips = self._num_strips()
        has_surplus = any(byte_counts[num_strips:])  # strips without bytes are no part of a larger image
        if (len(byte_counts) < num_strips or has_surplus) and self.compression != _Compression.OLD_JPEG:
            return _wrong_number_of_chunks(num_strips, len(byte_counts))
        return ""

    def _only_value(self, field: _Field) -> int:
        """Returns the value of a field; -1 if it does not have exactly one."""
        values = self.values[field]
        return values[0] if len(values) == 1 else -1

    @property
    def compression(self) -> int:
        return self._only_value(_Field.Compression)

    @property
    def _channels(self) -> int:
        return self._only_value(_Field.SamplesPerPixel)

    @property
    def _has_planes(self) -> bool:
        """Whether each of several channels has a plane of its own."""
        return self._channels > 1 and self._only_value(_Field.PlanarConfiguration) != _CHUNKY

    def _is_in_one_piece(self) -> bool:
        """Returns whether the strips, of unknown numbers of rows, are the uncompressed image in one piece, as which
        decoders read them then. The last strip may be padded; strips without bytes are ignored."""
        if self.compression != _Compression.NONE or _Field.RowsPerStrip in self.found:
            return False
        if list(self.found) != sorted(self.found):  # RowsPerStrip with a wrong bit may be an Orientation
            return False
        listed = zip(self.values[_Field.StripOffsets], self.values[_Field.StripByteCounts])
        strips = [(offset, num_bytes) for offset, num_bytes in listed if num_bytes > 0]
        total_bytes = sum(num_bytes for _, num_bytes in strips)
        last_bytes = strips[-1][1] if strips else 0
        is_contiguous = all(start + size == next_start for (start, size), (next_start, _) in itertools.pairwise(strips))
        # A last strip that the size does not need may be a part of a larger image.
        return is_contiguous and total_bytes - last_bytes < self._first_strip_bytes() <= total_bytes

    def _is_first_strip_uncompressed(self) -> bool:
        """Returns whether the first strip has as many bytes as its pixels without compression. Older versions of ImageJ
        write no field Compression."""
        return self.values[_Field.StripByteCounts][:1] == (self._first_strip_bytes(),)

    def _first_strip_bytes(self, bits: int | None = None) -> int:
        """Returns the number of bytes of the first strip's pixels without compression, with ``bits`` per sample (None:
        BitsPerSample)."""
        rows = min(self._only_value(_Field.RowsPerStrip), self._only_value(_Field.ImageLength))
        row_samples = self._only_value(_Field.ImageWidth) * (1 if self._has_planes else self._channels)
        row_bytes = math.ceil(row_samples * (bits or self.values[_Field.BitsPerSample][0]) / 8)
        return rows * row_bytes

    def _may_be_bilevel(self) -> bool:
        """Returns whether one bit per pixel is consistent with the other fields. Strips may be padded, by less than two
        bits per pixel would take."""
        if self._channels != 1 or self.compression not in _BILEVEL_COMPRESSIONS:
            return False
        if self.compression != _Compression.NONE or self._is_first_strip_uncompressed():
            return True
        first_bytes = max(self.values[_Field.StripByteCounts][:1], default=0)
        return self._first_strip_bytes(bits=1) < first_bytes < self._first_strip_bytes(bits=2)

    def _num_strips(self) -> int:
        """Returns how many strips the image's rows take."""
        strips = math.ceil(self._only_value(_Field.ImageLength) / max(1, self._only_value(_Field.RowsPerStrip)))
        return strips * (self._channels if self._has_planes else 1)

    def opencv_reads_page(self) -> bool:
        """Returns whether OpenCV reads the page correctly, after `prepare_for_opencv`."""
        bits = set(self.values[_Field.BitsPerSample])
        is_unsigned = set(self.values[_Field.SampleFormat]) == {_UNSIGNED}
        if self.compression not in _DECOMPRESSED_BY_OPENCV or len(bits) != 1 or not is_unsigned:
            return False
        kind = (self._only_value(_Field.PhotometricInterpretation), *bits, self._channels)
        if kind in _READ_IN_ANY_LAYOUT:
            return True
        if self._has_planes:
            return False
        is_tiled = bool(self.values[_Field.TileWidth])
        return kind in _READ_WITHOUT_PLANES or (kind in _READ_IN_STRIPS and not is_tiled)


def _is_damaged(field: _Field, values: tuple[int, ...] | None) -> bool:
    """Returns whether the values of a field are unreadable (None), too many, or not defined."""
    if not values:
        return values is None or field is not _Field.ExtraSamples  # some programs write one without values
    if field not in _FIELDS_PER_CHANNEL and len(values) != 1:
        return True
    return field in _DEFINED_VALUES and not _DEFINED_VALUES[field].issuperset(values)


def _wrong_number_of_chunks(needed: int, listed: int) -> str:
    return f"its size needs {needed:,} strips or tiles, the file lists {listed:,}"


def prepare_for_opencv(tiff: bytes) -> bytes:
    """Returns the same TIFF with pixels that OpenCV neither turns nor blends.

    libtiff turns each tile on its own. It multiplies 8-bit colors by unassociated alpha, so transparent areas would
    become black; it leaves them alone if the meaning of the extra channel is unspecified (0).
    """
    fields = tiff_fields(tiff, {_Field.Orientation, _Field.ExtraSamples})
    orientation = fields.get(_Field.Orientation)
    if orientation is not None and orientation.values:
        tiff = _with_first_value(tiff, orientation, 1)
    extra = fields.get(_Field.ExtraSamples)
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
    """Raises ValueError for a page without pixels, for contradictory channels, and for fewer strips or tiles than the
    page's size takes: tifffile would fill the others with zeros, gigabytes of them if the size is damaged. Strips or
    tiles of 0 bytes are zeros, as GDAL's sparse files mean."""
    if page.ndim not in (2, 3) or page.size == 0:
        raise ValueError(f"its pixels have the shape {page.shape}")
    num_chunks = math.prod(page.chunked)
    num_listed = min(len(page.dataoffsets), len(page.databytecounts))
    if num_listed < num_chunks:
        raise ValueError(_wrong_number_of_chunks(num_chunks, num_listed))
    bits = page.tags.get(_Field.BitsPerSample)
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
    if page.compression in _WITHOUT_PREDICTOR:
        page.predictor = _NO_PREDICTOR  # otherwise tifffile takes values for differences
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
