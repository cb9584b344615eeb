"""Reads the headers of image files: JPEG markers, PNG chunks, the fields of a TIFF and the EXIF orientation."""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

from data.image_io.npy import NPY_MAGIC
from utils.errors import UserError

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_ANIMATION_CHUNKS = (b"acTL", b"fcTL", b"fdAT")
# JPEG markers: the byte after 0xFF (ITU-T T.81, table B.1).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15, without DHT, JPG and DAC
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)  # SOF0, SOF1
_MARKERS_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})  # TEM, RST0..RST7
_END = 0xD9  # EOI
_SCAN = 0xDA  # SOS
_APP1 = 0xE1
_EXIF_PREFIX = b"Exif\0\0"  # starts the EXIF block of a JPEG; some programs write it twice, or to a WebP
MAX_PIXELS_OF_OPENCV = 1 << 30  # in any kind of file
ORIENTATION_TAG = 0x0112  # in EXIF and TIFF
_INTEGERS = {1: "B", 3: "H", 4: "I", 16: "Q"}  # types of a TIFF's fields: unsigned integers of 8 to 64 bits
_MAX_VALUES = 1 << 16  # per field, which may have a value for each channel or strip


class _TiffLayout(NamedTuple):
    """The numbers of a TIFF through which a tag is found."""

    byte_order: str  # < or >
    offset: struct.Struct  # offset of the first directory, at byte 4, in a BigTIFF at byte 8
    num_entries: struct.Struct  # number of entries, at the start of a directory
    entry: struct.Struct  # tag, type, number of values, and the values, or their offset if they are longer

    @classmethod
    def of(cls, byte_order: str, *, is_big: bool) -> _TiffLayout:
        """Returns the layout of a BigTIFF (``is_big``) or another TIFF, with ``byte_order`` < or >."""
        formats = ("Q", "Q", "HHQQ") if is_big else ("I", "H", "HHII")
        return cls(byte_order, *(struct.Struct(byte_order + numbers) for numbers in formats))


_TIFF_LAYOUTS = {
    b"II*\0": _TiffLayout.of("<", is_big=False),
    b"MM\0*": _TiffLayout.of(">", is_big=False),
    b"II+\0": _TiffLayout.of("<", is_big=True),
    b"MM\0+": _TiffLayout.of(">", is_big=True),
}


class Header(NamedTuple):
    """The header of an image file. Only a JPEG has the fields after ``kind``."""

    kind: str  # "jpeg", "tiff", "npy", "apng" (a PNG with an animation) or "other"
    orientation: int = 1  # EXIF, 1 to 8
    stored_hw: tuple[int, int] = (0, 0)  # height and width before orientation
    coded_at: int = 0  # byte at which the coded data of a sequential JPEG with one scan begins; 0 for other JPEGs

    @property
    def upright_hw(self) -> tuple[int, int]:
        """Height and width of a JPEG after orientation."""
        height, width = self.stored_hw
        return (width, height) if self.orientation >= 5 else (height, width)


def read_header(data: bytes, path: str | os.PathLike) -> Header:
    """Reads the header in the content of an image file. Raises UserError if it is empty, or a truncated JPEG or PNG.

    Pillow would take several times as long, and every image is read in every epoch.
    """
    try:
        if not data:
            raise ValueError("the file is empty")
        if data[:2] == b"\xff\xd8":
            return _read_jpeg(data)
        is_animated = False
        for kind, _, end in png_chunks(data):
            if end + 4 > len(data):  # OpenCV would allocate the stated length
                raise ValueError(f"truncated in chunk {kind.decode('latin-1')!r}")
            is_animated |= kind in _ANIMATION_CHUNKS
    except ValueError as error:
        raise UserError(f"{path}: damaged image ({error})") from None
    if is_animated:
        return Header("apng")
    if data[:6] == NPY_MAGIC:
        return Header("npy")
    if data[:4] in _TIFF_LAYOUTS:
        return Header("tiff")
    return Header("other")


def _read_jpeg(data: bytes) -> Header:
    """Reads the header of a JPEG up to its first scan. Raises ValueError if it is damaged."""
    stored_hw = (0, 0)
    orientation = 1
    num_components = b""  # in a sequential frame, one byte
    for marker, start, end in _jpeg_segments(data):
        if marker in _FRAMES and start + 5 <= len(data):
            height, width = struct.unpack(">HH", data[start + 1 : start + 5])
            stored_hw = (height, width)
            num_components = data[start + 5 : start + 6] if marker in _SEQUENTIAL_FRAMES else b""
        elif marker == _APP1 and data.startswith(_EXIF_PREFIX, start):
            orientation = exif_orientation(data[start:end])
        elif marker == _SCAN:
            # In coded data 0xFF is followed by 0 or RSTn, so this finds the end marker, even before trailing bytes.
            if not data.endswith(b"\xff\xd9") and data.find(b"\xff\xd9", end - 2) < 0:
                raise ValueError("truncated: no end marker")
            if not all(stored_hw):
                raise ValueError("no size in the header")
            num_scan_components = data[start : start + 1]
            has_one_scan = num_scan_components != b"" and num_scan_components == num_components
            return Header("jpeg", orientation, stored_hw, coded_at=end if has_one_scan else 0)
    raise ValueError("truncated in the header")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the marker of each segment in a JPEG header, and the start and end of its content, which may be cut off.
    The caller stops at the first scan. Raises ValueError if the header is damaged."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise ValueError(f"no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _MARKERS_WITHOUT_LENGTH:
            at += 2
        elif marker == _END:
            raise ValueError("it ends before the image data")
        else:
            length = int.from_bytes(data[at + 2 : at + 4], "big")
            if length < 2:
                raise ValueError(f"bad segment length at byte {at}")
            yield marker, at + 4, at + 2 + length
            at += 2 + length


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, start and end of each chunk's content in a PNG, which may be cut off; nothing for other files."""
    if not data.startswith(_PNG_MAGIC):
        return
    at = len(_PNG_MAGIC)
    kind = b""
    while at + 8 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, at + 8 + length
        at += length + 12


def without_animation(data: bytes) -> bytes:
    """Returns a PNG without the chunks of its animation, so that it shows its default image, as other programs do. That
    need not be a frame of the animation, of which OpenCV returns the first one."""
    kept = [data[start - 8 : end + 4] for kind, start, end in png_chunks(data) if kind not in _ANIMATION_CHUNKS]
    return b"".join([_PNG_MAGIC, *kept])


def exif_orientation(block: bytes) -> int:
    """Returns the orientation, 1 to 8, in an EXIF block or a TIFF file; 1 without one.

    A block is a TIFF header and its first directory, after any number of `_EXIF_PREFIX`, as in Pillow.
    """
    tiff = block
    while tiff.startswith(_EXIF_PREFIX):
        tiff = tiff.removeprefix(_EXIF_PREFIX)
    field = read_tiff_fields(tiff, {ORIENTATION_TAG}).get(ORIENTATION_TAG)
    orientation = field.values[0] if field is not None and field.values else 1
    return orientation if 1 <= orientation <= 8 else 1


class TiffField(NamedTuple):
    """A field of a TIFF."""

    values: tuple[int, ...] | None  # None if they are not unsigned integers, too many, or outside of the file
    offset: int  # byte of the TIFF at which the first value begins
    encoding: str  # of a value, for struct


def read_tiff_fields(tiff: bytes, tags: Container[int]) -> dict[int, TiffField]:
    """Returns those of the fields ``tags``, by tag, that the first directory of a TIFF has."""
    fields: dict[int, TiffField] = {}
    layout = _TIFF_LAYOUTS.get(tiff[:4])
    if layout is None:
        return fields
    try:
        (directory,) = layout.offset.unpack_from(tiff, layout.offset.size)
        (num_entries,) = layout.num_entries.unpack_from(tiff, directory)
        first = directory + layout.num_entries.size
        for start in range(first, first + num_entries * layout.entry.size, layout.entry.size):
            tag, field_type, count, offset = layout.entry.unpack_from(tiff, start)
            if tag in tags and tag not in fields:
                inline = start + layout.entry.size - layout.offset.size
                fields[tag] = _read_field(tiff, layout, field_type, count=count, inline=inline, offset=offset)
    except (struct.error, OverflowError):  # the block ends early, or an offset of 64 bits leads out of it
        pass
    return fields


def _read_field(
    tiff: bytes, layout: _TiffLayout, field_type: int, *, count: int, inline: int, offset: int
) -> TiffField:
    """Reads ``count`` values, at byte ``inline`` if they fit into an entry, or else at byte ``offset``."""
    code = _INTEGERS.get(field_type, "")
    num_bytes = count * struct.calcsize(f"<{code}")
    begin = inline if num_bytes <= layout.offset.size else offset
    values = None
    if code and count <= _MAX_VALUES and begin + num_bytes <= len(tiff):
        values = struct.unpack_from(f"{layout.byte_order}{count}{code}", tiff, begin)
    return TiffField(values, begin, layout.byte_order + code)
