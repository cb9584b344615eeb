"""Refuses TIFF files whose fields are damaged, missing, or contradict one another.

Decoders return wrong pixels of such files in silence.
"""

from __future__ import annotations

import itertools
import os

from data.image_io.tiff_fields import (
    CCITT,
    NO_PREDICTOR,
    WITHOUT_PREDICTOR,
    Compression,
    Field,
    Photometric,
    PixelFields,
)
from utils.errors import UserError

# Fields that decide how pixels are read. Decoders ignore them if they are damaged, and read other pixels.
_CHECKED_FIELDS = (
    Field.BitsPerSample,
    Field.Compression,
    Field.PhotometricInterpretation,
    Field.SamplesPerPixel,
    Field.PlanarConfiguration,
    Field.Predictor,
    Field.TileWidth,
    Field.ExtraSamples,
    Field.SampleFormat,
)
# Those of them that have a value per channel.
_FIELDS_PER_CHANNEL = {Field.BitsPerSample, Field.ExtraSamples, Field.SampleFormat}
# All values that are defined; any other is damage.
_DEFINED_VALUES: dict[Field, set[int]] = {
    Field.PhotometricInterpretation: {*range(7), 8, 9, 10, 32803, 32844, 32845, 34892, 51177, 52527},
    Field.PlanarConfiguration: {1, 2},
    Field.Predictor: {1, 2, 3, 34892, 34893, 34894},
    Field.SampleFormat: set(range(1, 7)),
}
# Compression schemes of images of one bit, which may lack the field BitsPerSample.
_BILEVEL_COMPRESSIONS = {Compression.NONE, *CCITT, Compression.PACK_BITS}
_FLOATING_POINT_PREDICTOR = 3  # value of Predictor
_FLOATING_POINT = 3  # value of SampleFormat


def check_fields(fields: PixelFields, path: str | os.PathLike) -> None:
    """Raises UserError if a field that decides how pixels are read is damaged, missing or contradicts others."""
    problem = _damaged_field(fields)
    if not problem and {Field.ImageWidth, Field.ImageLength}.issubset(fields.stored):  # or decoders report it
        problem = _contradiction(fields)
        if not problem and Field.TileWidth not in fields.stored:  # some programs list tiles as strips
            problem = _strip_problem(fields)
    if problem:
        raise UserError(f"{path}: cannot be decoded ({problem})")


def _damaged_field(fields: PixelFields) -> str:
    """Names a field whose values are unreadable, too many, or not defined; "" if there is none."""
    for field in _CHECKED_FIELDS:
        is_ignored = field is Field.Predictor and fields.compression in WITHOUT_PREDICTOR
        if field in fields.stored and not is_ignored and _is_damaged(field, fields.stored[field]):
            return f"its field {field.name} is damaged"
    return ""


def _is_damaged(field: Field, values: tuple[int, ...] | None) -> bool:
    """Returns whether the values of a field are unreadable (None), too many, or not defined."""
    if not values:
        return values is None or field is not Field.ExtraSamples  # some programs write one without values
    if field not in _FIELDS_PER_CHANNEL and len(values) != 1:
        return True
    return field in _DEFINED_VALUES and not _DEFINED_VALUES[field].issuperset(values)


def _contradiction(fields: PixelFields) -> str:
    """Says which field is missing or contradicts others; "" if none does."""
    if Field.PhotometricInterpretation not in fields.stored:
        return "it has no field PhotometricInterpretation"
    if Field.Compression not in fields.stored and not _is_first_strip_uncompressed(fields):
        return "it has no field Compression, but is compressed"
    if Field.BitsPerSample not in fields.stored and not _may_be_bilevel(fields):
        return "it has no field BitsPerSample, but is not bilevel"
    if fields.compression in CCITT and set(fields.values(Field.BitsPerSample)) != {1}:
        return f"its field Compression is {fields.compression}, which is for bilevel images"
    return _predictor_problem(fields)


def _predictor_problem(fields: PixelFields) -> str:
    """Says how the field Predictor contradicts others; "" if it does not, or decoders ignore it."""
    if Field.Predictor not in fields.stored or fields.compression in WITHOUT_PREDICTOR:
        return ""
    predictor = fields.value(Field.Predictor)
    is_floating_point = set(fields.values(Field.SampleFormat)) == {_FLOATING_POINT}
    if predictor == _FLOATING_POINT_PREDICTOR and not is_floating_point:
        return f"its field Predictor is {predictor}, which is for floating point"
    if predictor != NO_PREDICTOR and fields.compression == Compression.PACK_BITS:
        # libtiff ignores the field, but tifffile writes differences.
        return f"its field Predictor is {predictor}, which programs interpret differently for PackBits"
    return ""


def _strip_problem(fields: PixelFields) -> str:
    """Says how the strips contradict the size of the image; "" if they do not, or are unknown."""
    byte_counts = fields.values(Field.StripByteCounts)  # empty if missing, unreadable, or very many
    if not byte_counts or _is_in_one_piece(fields):
        return ""
    is_subsampled = fields.value(Field.PhotometricInterpretation) == Photometric.YCBCR
    needed_bytes = fields.first_strip_bytes()
    # The strips of a sparse file have 0 bytes.
    if fields.compression == Compression.NONE and not is_subsampled and 0 < byte_counts[0] < needed_bytes:
        return f"its first strip needs {needed_bytes:,} bytes, the file lists {byte_counts[0]:,}"
    num_strips = fields.num_strips
    has_surplus = any(byte_counts[num_strips:])  # strips without bytes are no part of a larger image
    if (len(byte_counts) < num_strips or has_surplus) and fields.compression != Compression.OLD_JPEG:
        return wrong_number_of_chunks(num_strips, len(byte_counts))
    return ""


def _is_in_one_piece(fields: PixelFields) -> bool:
    """Returns whether an image has no field RowsPerStrip and needs none.

    Decoders then read all strips as one. That is right if the image is uncompressed, and its strips are contiguous and
    together have the bytes of the image. The last strip may be padded by less than a row.
    """
    if fields.compression != Compression.NONE or Field.RowsPerStrip in fields.stored:
        return False
    if fields.has_planes:  # decoders read one strip of each plane
        return False
    if list(fields.stored) != sorted(fields.stored):  # RowsPerStrip with a wrong bit may be an Orientation
        return False
    listed = zip(fields.values(Field.StripOffsets), fields.values(Field.StripByteCounts))
    strips = [(offset, num_bytes) for offset, num_bytes in listed if num_bytes > 0]  # those of a sparse file have none
    total_bytes = sum(num_bytes for _, num_bytes in strips)
    last_bytes = strips[-1][1] if strips else 0
    is_contiguous = all(start + size == next_start for (start, size), (next_start, _) in itertools.pairwise(strips))
    needed_bytes = fields.first_strip_bytes()
    # A last strip that the size does not need, or a row more than it needs, may be a part of a larger image.
    has_needed_strips = total_bytes - last_bytes < needed_bytes <= total_bytes < needed_bytes + fields.row_bytes()
    return is_contiguous and has_needed_strips


def _is_first_strip_uncompressed(fields: PixelFields) -> bool:
    """Returns whether the first strip has as many bytes as its pixels without compression. Older versions of ImageJ
    write no field Compression."""
    return fields.values(Field.StripByteCounts)[:1] == (fields.first_strip_bytes(),)


def _may_be_bilevel(fields: PixelFields) -> bool:
    """Returns whether one bit per pixel is consistent with the other fields. Strips may be padded, by less than two
    bits per pixel would take."""
    if fields.channels != 1 or fields.compression not in _BILEVEL_COMPRESSIONS:
        return False
    if fields.compression != Compression.NONE or _is_first_strip_uncompressed(fields):
        return True
    first_bytes = max(fields.values(Field.StripByteCounts)[:1], default=0)
    return fields.first_strip_bytes(bits=1) < first_bytes < fields.first_strip_bytes(bits=2)


def wrong_number_of_chunks(needed: int, listed: int) -> str:
    """Returns the problem of a page that needs other numbers of strips or tiles than its file lists."""
    return f"its size needs {needed:,} strips or tiles, the file lists {listed:,}"
