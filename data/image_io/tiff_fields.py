"""Reads the fields of a TIFF's first page that say how its pixels are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from data.image_io.header import ORIENTATION_TAG, read_tiff_fields


class Field(IntEnum):
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
    TileLength = 323
    ExtraSamples = 338
    SampleFormat = 339


class Compression(IntEnum):
    """The compression schemes that OpenCV decodes. Of some others it returns black pixels."""

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


class Photometric(IntEnum):
    """The meaning of samples."""

    WHITE_IS_ZERO = 0
    BLACK_IS_ZERO = 1
    RGB = 2
    PALETTE = 3
    CMYK = 5
    YCBCR = 6


# Compression schemes of bilevel images.
CCITT = {Compression.CCITT_RLE, Compression.CCITT_T4, Compression.CCITT_T6, Compression.CCITT_RLE_WORDS}
# Compression schemes for which libtiff ignores the field Predictor. tifffile would take values for differences. It also
# writes differences with PackBits, for which libtiff ignores the field, too: see tiff_damage.py.
WITHOUT_PREDICTOR = {Compression.NONE, *CCITT, Compression.OLD_JPEG, Compression.JPEG}
NO_PREDICTOR = 1  # value of Predictor
UNSIGNED = 1  # value of SampleFormat
_CHUNKY = 1  # value of PlanarConfiguration: the channels of a pixel are stored together
# Values of fields that a page lacks (TIFF 6.0). There are none for the other fields.
_DEFAULTS: dict[Field, tuple[int, ...]] = {
    Field.BitsPerSample: (1,),
    Field.Compression: (Compression.NONE,),
    Field.SamplesPerPixel: (1,),
    Field.RowsPerStrip: ((1 << 32) - 1,),  # all rows are in one strip
    Field.PlanarConfiguration: (_CHUNKY,),
    Field.SampleFormat: (UNSIGNED,),
}


@dataclass(frozen=True, slots=True)
class PixelFields:
    """The fields of a TIFF's first page that say how its pixels are stored."""

    # The values of each field that the page has, in the order of the file; None if they are unreadable.
    stored: dict[Field, tuple[int, ...] | None]

    @classmethod
    def read(cls, tiff: bytes) -> PixelFields:
        """Reads the fields from the content of a file."""
        return cls({Field(tag): field.values for tag, field in read_tiff_fields(tiff, frozenset(Field)).items()})

    def values(self, field: Field) -> tuple[int, ...]:
        """Returns the values of a field, or its default; () if they are unreadable, or there is no default."""
        return self.stored.get(field, _DEFAULTS.get(field, ())) or ()

    def value(self, field: Field) -> int:
        """Returns the value of a field, or its default; -1 unless it is exactly one."""
        values = self.values(field)
        return values[0] if len(values) == 1 else -1

    @property
    def compression(self) -> int:
        return self.value(Field.Compression)

    @property
    def channels(self) -> int:
        return self.value(Field.SamplesPerPixel)

    @property
    def has_planes(self) -> bool:
        """Whether each of several channels has a plane of its own."""
        return self.channels > 1 and self.value(Field.PlanarConfiguration) != _CHUNKY

    @property
    def num_strips(self) -> int:
        """The number of strips that the image's rows take."""
        strips = math.ceil(self.value(Field.ImageLength) / max(1, self.value(Field.RowsPerStrip)))
        return strips * (self.channels if self.has_planes else 1)

    def first_strip_bytes(self, bits: int | None = None) -> int:
        """Returns the number of bytes of the first strip's pixels without compression, with ``bits`` per sample (None:
        BitsPerSample)."""
        return min(self.value(Field.RowsPerStrip), self.value(Field.ImageLength)) * self.row_bytes(bits)

    def tile_bytes(self) -> int:
        """Returns the number of bytes of a tile without compression, of one channel if channels have planes."""
        row_samples = self.value(Field.TileWidth) * (1 if self.has_planes else self.channels)
        return math.ceil(row_samples * self.values(Field.BitsPerSample)[0] / 8) * self.value(Field.TileLength)

    def row_bytes(self, bits: int | None = None) -> int:
        """Returns the number of bytes of a row without compression, of one channel if channels have planes. ``bits``:
        see `first_strip_bytes`."""
        row_samples = self.value(Field.ImageWidth) * (1 if self.has_planes else self.channels)
        return math.ceil(row_samples * (bits or self.values(Field.BitsPerSample)[0]) / 8)
