"""Verifies image files for a scan, mostly without decoding them.

Decoders refuse a JPEG because of its header: an unsupported process or sampling, malformed or missing tables. If the
header passes the checks of this module and the end marker is there, they accept the file. Other files are decoded.

Decoders repair errors in the coded data or leave that part gray, so the data is checked too, 64 bytes of every 2048.
Valid data looks random. `coded_data_defect` finds parts that are zero or repeat a few bytes (sparse files, incomplete
transfers), text, and invalid markers, of which other compressed or encrypted data has one every few hundred bytes. Only
decoding finds single wrong bits (half of them) and parts of another JPEG.

Source: ITU-T T.81, annex B (markers), F.1.2.3 (a 0 after each 0xFF of coded data) and annex C (valid code lengths of a
Huffman code).
"""

from __future__ import annotations

import os
import re
import zlib
from typing import NamedTuple

import cv2
import numpy as np

from data.image_io.channels import NPY_MAGIC, check_jpeg_channels, npy_size
from data.image_io.decode import (
    ARRAY_SUFFIX,
    Header,
    decode_image,
    exif_orientation,
    imdecode,
    png_chunks,
    read_bytes,
    read_header,
)
from utils.config.pixels import RGB8, PixelFormat
from utils.errors import UserError
from utils.files.safe_io import open_regular

_SEQUENTIAL = (0xC0, 0xC1)  # SOF0, SOF1: there is one scan, so all tables are in the header
_IGNORED = frozenset({*range(0xE0, 0xF0), 0xFE})  # application data, comments
_MAX_PIXELS = 1 << 28  # below the limits of decoders
_SAMPLINGS = ((0x11,), *((first, 0x11, 0x11) for first in (0x11, 0x12, 0x21, 0x22, 0x41)))
_STRIDE, _SAMPLE = 2048, 64  # bytes: the first 64 of every 2048 are checked
_NPY_START = 4096  # bytes, more than any header of an image
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # except for restarts
_HIGH_BITS = np.uint64(0x8080808080808080)
_CHECK = cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_IGNORE_ORIENTATION


class HiddenDamageError(UserError):
    """Damage that only decoding shows."""


def check_image(
    path: str | os.PathLike, *, decode: bool = False, pixels: PixelFormat = RGB8, largest: list[int] | None = None
) -> tuple[int, int]:
    """Checks that `read_image` can read a file without a warning, and returns its upright height and width.

    An ordinary JPEG is not decoded if its header, its end and parts of its coded data are plausible, unless ``decode``
    is set. Any other JPEG must have its end marker (decoders silently fill a missing part with gray) and is decoded at
    an eighth of its size, which is faster. Of a .npy file the header is read, or all with ``decode``. Other kinds of
    files are decoded completely, and the checksums of a PNG, which decoders ignore, are verified; ``largest`` receives
    the largest value of a 16-bit image.

    Raises UserError as `read_image` does, and `HiddenDamageError` for damage that only ``decode`` has shown.
    """
    if os.fspath(path).lower().endswith(ARRAY_SUFFIX) and not decode:
        return _check_npy(path, pixels)
    data = read_bytes(path)
    plain = plain_jpeg(data)
    if data[:2] == b"\xff\xd8":
        check_jpeg_channels(path, pixels)
    looks_right = plain is not None and not coded_data_defect(data, plain)
    if looks_right and not decode:
        return plain.header.upright_hw
    header = read_header(data, path)
    warnings: list[str] = []

    def on_warning(_: str, text: str) -> None:
        warnings.append(text)

    if header.kind != "jpeg":
        for kind, begin, end in png_chunks(data) if header.kind == "png" else ():
            if zlib.crc32(memoryview(data)[begin - 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
                warnings.append(f"wrong checksum of chunk {kind.decode('latin-1')!r}")
        size = decode_image(data, header, path, on_warning=on_warning, pixels=pixels, largest=largest).shape[:2]
        if warnings:
            raise UserError(f"{path}: damaged image ({warnings[0]})")
        return size
    try:
        imdecode(data, _CHECK, path, on_warning)
    except UserError as error:
        raise HiddenDamageError(str(error)) if looks_right else error from None
    if plain is not None and not warnings:
        # Decoders continue with zeros after such a marker, without a warning if only the last few blocks are lost.
        marker = _MARKER.search(data, plain.coded_at)
        if marker is not None and marker[0] != b"\xff\xd9":
            warnings.append(f"marker 0x{marker[0].hex()} among the coded data, at byte {marker.start()}")
    if warnings:
        kind = HiddenDamageError if looks_right else UserError
        raise kind(f"{path}: damaged image ({warnings[0]})")
    return header.upright_hw


def _check_npy(path: str | os.PathLike, pixels: PixelFormat) -> tuple[int, int]:
    try:
        with open_regular(path) as file:
            start = file.read(_NPY_START)
            nbytes = os.fstat(file.fileno()).st_size
    except OSError:
        start = read_bytes(path)  # raises its error
        nbytes = len(start)
    if start[:6] != NPY_MAGIC:
        raise UserError(f"{path}: damaged .npy file (wrong signature)")
    return npy_size(start, nbytes, path, pixels)


class PlainJpeg(NamedTuple):
    """The header of an ordinary JPEG, see `plain_jpeg`."""

    header: Header
    coded_at: int  # position of the coded data in the file, bytes
    has_restarts: bool


def coded_data_defect(data: bytes, jpeg: PlainJpeg) -> str:
    """Why the coded data of ``data``, a complete file, is suspicious; "" if it is not. Suspicious data need not be
    damaged: a uniform area may be coded as a few repeated bytes."""
    start = -(-jpeg.coded_at // 8) * 8
    count = max(len(data) - 2 - start, 0) // _STRIDE
    if count == 0:
        return ""
    samples = np.frombuffer(data, np.uint8, count * _STRIDE, start).reshape(count, _STRIDE)[:, :_SAMPLE].copy()
    words = samples.view(np.uint64)
    if (words[:, 1:] == words[:, :1]).all(1).any():
        return "a few bytes that repeat"
    if not (np.bitwise_or.reduce(words, 1) & _HIGH_BITS).all():
        return "text"
    stray = samples[:, 1:][(samples[:, :-1] == 0xFF) & (samples[:, 1:] != 0)]
    if jpeg.has_restarts:
        stray = stray[(stray < 0xD0) | (stray > 0xD7)]
    return "markers" if len(stray) else ""


def plain_jpeg(data: bytes) -> PlainJpeg | None:
    """The header of an ordinary JPEG: sequential, 8-bit, gray or three colors, with common sampling factors. None for
    any other file, which need not be damaged."""
    if data[:2] != b"\xff\xd8" or data[-2:] != b"\xff\xd9":
        return None
    frame, orientation, at = b"", 1, 2
    quantizers: set[int] = set()
    codes: set[int] = set()  # class (0 DC, 1 AC) and destination of Huffman tables
    has_restarts = False
    while at + 4 <= len(data):
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at] != 0xFF or end > len(data) or end < at + 4:
            return None
        body = data[at + 4 : end]
        if marker == 0xDA:
            header = _checked_scan(frame, body, orientation, quantizers, codes)
            return header and PlainJpeg(header, end, has_restarts)
        if marker in _SEQUENTIAL:
            if frame:
                return None
            frame = body
        elif marker == 0xDB:  # quantization tables of 8 bits
            if len(body) % 65 or any(destination > 3 for destination in body[::65]):
                return None
            quantizers.update(body[::65])
        elif marker == 0xC4:
            if not _add_codes(body, codes):
                return None
        elif marker == 0xE1 and body[:6] == b"Exif\0\0":
            orientation = exif_orientation(body[6:])
        elif marker == 0xDD and len(body) == 2:  # the restart interval
            has_restarts = body != b"\0\0"
        elif marker not in _IGNORED:
            return None
        at = end
    return None


def _checked_scan(frame: bytes, scan: bytes, orientation: int, quantizers: set[int], codes: set[int]) -> Header | None:
    """The header if frame and scan match and all their tables are defined, else None."""
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
    if tuple(frame[7::3]) not in _SAMPLINGS or not quantizers.issuperset(frame[8::3]):
        return None
    if scan[1:-3:2] != frame[6::3] or len(set(frame[6::3])) != count or scan[-3:] != b"\0\x3f\0":
        return None
    used = {table for pair in scan[2:-3:2] for table in (pair >> 4, 0x10 | pair & 15)}
    return Header("jpeg", orientation, size) if codes >= used else None


def _add_codes(body: bytes, known: set[int]) -> bool:
    """Adds the Huffman tables of a segment to ``known``; False if one is malformed."""
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
