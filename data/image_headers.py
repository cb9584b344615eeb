"""What an image file tells without being decoded: kind, size, EXIF orientation, and whether it is whole.

Sources: ITU-T T.81 (JPEG markers), the PNG specification (chunks, eXIf), the WebP container specification (RIFF),
EXIF 2.32 / TIFF 6.0 (tag 0x0112). Orientations are 1 to 8; 5 to 8 swap width and height.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15 but DHT, JPG and DAC
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length: TEM, RST0..RST7
_ORIENTATION_TAG = 0x0112


class Header(NamedTuple):
    """What a file's structure says; ``size`` is None for kinds whose size only the decoder tells."""

    kind: str  # "jpeg", "png", "webp" or "other"
    size: tuple[int, int] | None  # height and width as stored, before orientation
    orientation: int  # 1..8
    defect: str  # "" for a whole file, else what is wrong with it


def read_header(data: bytes) -> Header:
    """Reads the structure of an image file held in memory; never raises."""
    if data[:2] == b"\xff\xd8":
        return _read_jpeg(data)
    if data[:8] == _PNG_MAGIC:
        return _read_png(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _read_webp(data)
    return Header("other", None, 1, "" if data else "the file is empty")


def _read_jpeg(data: bytes) -> Header:
    size, orientation, at = None, 1, 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return Header("jpeg", size, orientation, f"no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF or marker in _JPEG_BARE:  # fill byte, or a marker that stands alone
            at += 1 if marker == 0xFF else 2
            continue
        if marker == 0xD9:
            return Header("jpeg", size, orientation, "it ends before the picture begins")
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2:
            return Header("jpeg", size, orientation, f"bad segment length at byte {at}")
        if marker in _JPEG_FRAMES and at + 9 <= len(data):
            size = struct.unpack(">HH", data[at + 5 : at + 9])
        elif marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = exif_orientation(data[at + 10 : at + 2 + length])
        elif marker == 0xDA:
            # In entropy-coded data 0xFF is always followed by 0 or RSTn, so this finds the true end, whatever follows.
            whole = data.endswith(b"\xff\xd9") or data.find(b"\xff\xd9", at + length) >= 0
            defect = "truncated: no end marker" if not whole else "" if size and all(size) else "no size in the header"
            return Header("jpeg", size, orientation, defect)
        at += 2 + length
    return Header("jpeg", size, orientation, "truncated in the header")


def _read_png(data: bytes) -> Header:
    size, orientation, at = None, 1, 8
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = at + 8
        if body + length + 4 > len(data):
            return Header("png", size, orientation, f"truncated in chunk {kind.decode('latin-1')!r}")
        if kind == b"IHDR" and length >= 8:
            width, height = struct.unpack(">II", data[body : body + 8])
            size = (height, width)
        elif kind == b"eXIf":
            orientation = exif_orientation(data[body : body + length])
        elif kind == b"IEND":
            return Header("png", size, orientation, "" if size else "no header chunk")
        at = body + length + 4
    return Header("png", size, orientation, "truncated: no end chunk")


def png_defect(data: bytes) -> str:
    """What a chunk's checksum says of a whole PNG; "" if all are right."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        end = at + 8 + length
        kind = data[at + 4 : at + 8]
        if zlib.crc32(memoryview(data)[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            return f"wrong checksum of chunk {kind.decode('latin-1')!r}"
        if kind == b"IEND":
            break
        at = end + 4
    return ""


def _read_webp(data: bytes) -> Header:
    orientation, at = 1, 12
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        return Header("webp", None, 1, f"truncated: {len(data)} of {end} bytes")
    while at + 8 <= end:
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"EXIF":
            block = data[at + 8 : at + 8 + length]
            orientation = exif_orientation(block.removeprefix(b"Exif\0\0"))
        at += 8 + length + (length & 1)
    return Header("webp", None, orientation, "")


def exif_orientation(tiff: bytes) -> int:
    """Orientation in an EXIF block (a TIFF header and its first directory); 1 where it is absent or malformed."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (at,) = struct.unpack(order + "I", tiff[4:8])
    if at + 2 > len(tiff):
        return 1
    (count,) = struct.unpack(order + "H", tiff[at : at + 2])
    for entry in range(at + 2, min(at + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind = struct.unpack(order + "HH", tiff[entry : entry + 4])
        if tag == _ORIENTATION_TAG and kind == 3:  # an unsigned short, as EXIF wants
            (value,) = struct.unpack(order + "H", tiff[entry + 8 : entry + 10])
            return value if 1 <= value <= 8 else 1
    return 1
