"""Checks the structure of image files, so that a scan need not decode every JPEG.

A decoder refuses a JPEG because of its header: an unsupported process or sampling, malformed or missing tables. If the
header passes the checks of this module and the end marker is there, decoders accept the file. Other files are decoded.

Decoders repair errors in the coded data or leave that part grey, so the data is checked too, 64 bytes of each 2048.
Valid data looks random. `coded_data_defect` finds parts that are zero or repeat a few bytes (sparse files, incomplete
transfers), text, and invalid markers, of which other compressed or encrypted data has one every few hundred bytes. It
does not find single wrong bits or parts of another JPEG. Decoding finds those, except for half of the single bits.

Source: ITU-T T.81, annex B (markers), F.1.2.3 (a 0 after each 0xFF of coded data) and annex C (valid code lengths of a
Huffman code).
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import NamedTuple

import numpy as np

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15 but DHT, JPG and DAC
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length: TEM, RST0..RST7
_ORIENTATION_TAG = 0x0112


class Header(NamedTuple):
    """The structure of a file; ``size`` is None for kinds whose size only the decoder knows."""

    kind: str  # "jpeg", "png", "webp" or "other"
    size: tuple[int, int] | None  # height and width as stored, before orientation
    orientation: int  # 1..8
    defect: str  # "" for an intact file


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
        if marker == 0xFF or marker in _JPEG_BARE:  # fill byte, or a marker without a length
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
            # In coded data 0xFF is followed by 0 or RSTn, so this is the end marker, even with trailing bytes.
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
    """The first chunk of a complete PNG with a wrong checksum, in words; "" if there is none."""
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
    """Orientation in an EXIF block (a TIFF header and its first directory); 1 if it is missing or malformed."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (at,) = struct.unpack(order + "I", tiff[4:8])
    if at + 2 > len(tiff):
        return 1
    (count,) = struct.unpack(order + "H", tiff[at : at + 2])
    for entry in range(at + 2, min(at + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind = struct.unpack(order + "HH", tiff[entry : entry + 4])
        if tag == _ORIENTATION_TAG and kind == 3:  # an unsigned short, as EXIF requires
            (value,) = struct.unpack(order + "H", tiff[entry + 8 : entry + 10])
            return value if 1 <= value <= 8 else 1
    return 1


_SEQUENTIAL = (0xC0, 0xC1)  # SOF0, SOF1: there is one scan, so all tables are in the header
_IGNORED = frozenset({*range(0xE0, 0xF0), 0xFE})  # application data, comments
_MAX_PIXELS = 1 << 28  # below the limits of decoders
_SAMPLINGS = ((0x11,), *((first, 0x11, 0x11) for first in (0x11, 0x12, 0x21, 0x22, 0x41)))


_STRIDE, _SAMPLE = 2048, 64  # bytes: the first 64 of each 2048 are checked
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # except for restarts
_HIGH_BITS = np.uint64(0x8080808080808080)


class PlainJpeg(NamedTuple):
    """The header of an ordinary JPEG, see `plain_jpeg`."""

    header: Header
    coded_at: int  # where the coded data begin
    has_restarts: bool


def coded_data_defect(data: bytes, jpeg: PlainJpeg) -> str:
    """Why the coded data of ``data``, a complete file, is suspicious; "" if it is not.

    This need not be damage: a plain area may be coded as a few repeated bytes.
    """
    start = -(-jpeg.coded_at // 8) * 8
    count = max(len(data) - 2 - start, 0) // _STRIDE
    if count == 0:
        return ""
    samples = np.frombuffer(data, np.uint8, count * _STRIDE, start).reshape(count, _STRIDE)[:, :_SAMPLE].copy()
    words = samples.view(np.uint64)
    if (words[:, 1:] == words[:, :1]).all(1).any():
        return "a few bytes again and again"
    if not (np.bitwise_or.reduce(words, 1) & _HIGH_BITS).all():
        return "text"
    stray = samples[:, 1:][(samples[:, :-1] == 0xFF) & (samples[:, 1:] != 0)]
    if jpeg.has_restarts:
        stray = stray[(stray < 0xD0) | (stray > 0xD7)]
    return "markers" if len(stray) else ""


def early_end(data: bytes, jpeg: PlainJpeg) -> str:
    """Describes a marker that ends the coded data of ``data`` before the end marker; "" if there is none. Decoders
    continue with zeros, without a warning if only the last few blocks are lost."""
    found = _MARKER.search(data, jpeg.coded_at)
    if found is None or found[0] == b"\xff\xd9":
        return ""
    return f"marker 0x{found[0].hex()} among the coded data, at byte {found.start()}"


def plain_jpeg(head: bytes, tail: bytes) -> PlainJpeg | None:
    """The header of an ordinary JPEG: sequential, 8-bit, grey or three colours, with common sampling factors.

    Args:
        head: the beginning of the file, or all of it.
        tail: its last two bytes.

    Returns None for any other file, which need not be damaged.
    """
    if head[:2] != b"\xff\xd8" or tail[-2:] != b"\xff\xd9":
        return None
    frame, orientation, at = b"", 1, 2
    quantisers: set[int] = set()
    codes: set[int] = set()  # class (0 DC, 1 AC) and destination of Huffman tables
    has_restarts = False
    while at + 4 <= len(head):
        marker, end = head[at + 1], at + 2 + int.from_bytes(head[at + 2 : at + 4], "big")
        if head[at] != 0xFF or end > len(head) or end < at + 4:
            return None
        body = head[at + 4 : end]
        if marker == 0xDA:
            header = _of_scan(frame, body, orientation, quantisers, codes)
            return header and PlainJpeg(header, end, has_restarts)
        if marker in _SEQUENTIAL:
            if frame:
                return None
            frame = body
        elif marker in (0xDB, 0xC4):
            is_valid = _add_quantisers(body, quantisers) if marker == 0xDB else _add_codes(body, codes)
            if not is_valid:
                return None
        elif marker == 0xE1 and body[:6] == b"Exif\0\0":
            orientation = exif_orientation(body[6:])
        elif marker == 0xDD and len(body) == 2:  # the restart interval
            has_restarts = body != b"\0\0"
        elif marker not in _IGNORED:
            return None
        at = end
    return None


def _of_scan(frame: bytes, scan: bytes, orientation: int, quantisers: set[int], codes: set[int]) -> Header | None:
    """The header if frame and scan match and all their tables are defined."""
    if len(frame) < 6 or frame[0] != 8:
        return None
    size = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    count = frame[5]
    if (
        not 0 < size[0] * size[1] <= _MAX_PIXELS
        or len(frame) != 6 + 3 * count
        or len(scan) != 4 + 2 * count
        or scan[0] != count
    ):
        return None
    if tuple(frame[7::3]) not in _SAMPLINGS or not quantisers.issuperset(frame[8::3]):
        return None
    if scan[1:-3:2] != frame[6::3] or len(set(frame[6::3])) != count or scan[-3:] != b"\0\x3f\0":
        return None
    wanted = {table for pair in scan[2:-3:2] for table in (pair >> 4, 0x10 | pair & 15)}
    return Header("jpeg", size, orientation, "") if codes >= wanted else None


def _add_quantisers(body: bytes, known: set[int]) -> bool:
    """Adds the tables of a DQT segment to ``known``; False unless all have 8 bits and valid destinations."""
    known.update(body[::65])
    return len(body) % 65 == 0 and all(destination < 4 for destination in body[::65])


def _add_codes(body: bytes, known: set[int]) -> bool:
    """Adds the tables of a DHT segment to ``known``; False if one is malformed."""
    at = 0
    while at + 17 <= len(body):
        table, lengths = body[at], body[at + 1 : at + 17]
        symbols = body[at + 17 : at + 17 + sum(lengths)]
        taken = sum(count << 15 - bits for bits, count in enumerate(lengths))  # of 2**16 codes; all ones is not a code
        if table & 0xEF > 3 or taken >= 1 << 16 or len(symbols) != sum(lengths) or len(symbols) > 256:
            return False
        if table < 0x10 and symbols and max(symbols) > 15:
            return False
        known.add(table)
        at += 17 + len(symbols)
    return at == len(body)
