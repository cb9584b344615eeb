"""Reads the headers of image files without decoding them: kind, size and EXIF orientation.

Pillow would take several times as long, and every image is read in every epoch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

from utils.errors import UserError

_NPY_MAGIC = b"\x93NUMPY"
_TIFF_MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
# JPEG markers: the byte after 0xFF (ITU-T T.81, table B.1).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15, without DHT, JPG and DAC
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)  # SOF0, SOF1
_MARKERS_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})  # TEM, RST0..RST7
_END = 0xD9  # EOI
_SCAN = 0xDA  # SOS
_APP1 = 0xE1
_EXIF_PREFIX = b"Exif\0\0"  # starts the EXIF block of a JPEG; some programs write it twice, or to a WebP
ORIENTATION_TAG = 0x0112  # in EXIF and TIFF
_INTEGERS = {1: "B", 3: "H", 4: "I"}  # types of a TIFF's fields: unsigned integers of 8, 16 and 32 bits


class Header(NamedTuple):
    """The header of an image file. Only a JPEG has the fields after ``kind``."""

    kind: str  # "jpeg", "tiff", "npy" or "other"
    orientation: int = 1  # EXIF, 1 to 8
    stored_hw: tuple[int, int] = (0, 0)  # height and width before orientation
    coded_at: int = 0  # byte at which the coded data of a sequential JPEG with one scan begins; 0 for other JPEGs

    @property
    def upright_hw(self) -> tuple[int, int]:
        """Height and width of a JPEG after orientation."""
        height, width = self.stored_hw
        return (width, height) if self.orientation >= 5 else (height, width)


def read_header(data: bytes, path: str | os.PathLike) -> Header:
    """Reads the header in the content of an image file. Raises UserError if it is empty, or a truncated JPEG."""
    if not data:
        raise UserError(f"{path}: damaged image (the file is empty)")
    if data[:2] == b"\xff\xd8":
        try:
            return _read_jpeg(data)
        except ValueError as error:
            raise UserError(f"{path}: damaged image ({error})") from None
    if data[:6] == _NPY_MAGIC:
        return Header("npy")
    if data[:4] in _TIFF_MAGICS:
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


def exif_orientation(block: bytes) -> int:
    """Returns the orientation, 1 to 8, in an EXIF block, 1 without one.

    A block is a TIFF header and its first directory, after any number of `_EXIF_PREFIX`, as in Pillow.
    """
    while block.startswith(_EXIF_PREFIX):
        block = block.removeprefix(_EXIF_PREFIX)
    values = tiff_fields(block, {ORIENTATION_TAG}).get(ORIENTATION_TAG)
    orientation = values[0] if values else 1
    return orientation if 1 <= orientation <= 8 else 1


def tiff_fields(tiff: bytes, tags: Container[int]) -> dict[int, tuple[int, ...]]:
    """Returns the values of those of the fields ``tags`` that the first directory of a TIFF has and that are unsigned
    integers, by tag; none for a BigTIFF."""
    fields: dict[int, tuple[int, ...]] = {}
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return fields
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
            tag, field_type, count, offset = struct.unpack_from(f"{order}HHII", tiff, entry)
            code = _INTEGERS.get(field_type)
            if tag in tags and tag not in fields and code is not None:
                is_inline = count * struct.calcsize(code) <= 4
                fields[tag] = struct.unpack_from(f"{order}{count}{code}", tiff, entry + 8 if is_inline else offset)
    except struct.error:  # the block ends early
        pass
    return fields
