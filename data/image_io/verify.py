"""Verifies image files for a scan, mostly without decoding them.

Decoders refuse a JPEG because of its header: an unsupported process, malformed or missing tables. Here libjpeg gets the
header alone; if it accepts that, and the end marker is there, it accepts the file. Other files are decoded.

Decoders repair errors in the coded data or leave that part gray, so the data is checked too, 64 bytes of every 2048.
Valid data looks random. `coded_data_defect` finds parts that are zero or repeat a few bytes (sparse files, incomplete
transfers), text, and invalid markers, of which other compressed or encrypted data has one every few hundred bytes. Only
decoding finds single wrong bits (half of them) and parts of another JPEG.

Source: ITU-T T.81, annex B (markers) and F.1.2.3 (a 0 after each 0xFF of coded data).
"""

from __future__ import annotations

import math
import os
import re
import zlib

import cv2
import numpy as np
from PIL import Image

from data.image_io.channels import check_jpeg_channels
from data.image_io.decode import Header, decode_image, imdecode, png_chunks, read_bytes, read_header
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat

_MAX_PIXELS = 1 << 30  # the limit of OpenCV
_STRIDE, _SAMPLE = 2048, 64  # bytes: the first 64 of every 2048 are checked
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # except for restarts
_HIGH_BITS = np.uint64(0x8080808080808080)
_CHECK = cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_IGNORE_ORIENTATION


class HiddenDamageError(UserError):
    """Damage that only decoding shows."""


def check_image(
    path: str | os.PathLike, *, decode: bool = False, pixels: PixelFormat = RGB8, largest: list[int] | None = None
) -> tuple[int, int]:
    """Checks that `read_image` can read a file without a warning, and returns its upright height and width.

    A JPEG of one scan is not decoded if its header, its end and parts of its coded data are plausible, unless
    ``decode`` is set. Any other JPEG is decoded at an eighth of its size, which is faster. Other kinds of files are
    decoded completely, and the checksums of a PNG, which decoders ignore, are verified; ``largest`` receives the
    largest value of a 16-bit image.

    Raises UserError as `read_image` does, and `HiddenDamageError` for damage that only ``decode`` has shown.
    """
    data = read_bytes(path)
    header = read_header(data, path)
    warnings: list[str] = []

    def on_warning(_: str, text: str) -> None:
        warnings.append(text)

    if header.kind != "jpeg":
        size = decode_image(data, header, path, on_warning=on_warning, pixels=pixels, largest=largest).shape[:2]
        for chunk, begin, end in png_chunks(data):
            if zlib.crc32(memoryview(data)[begin - 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
                warnings.append(f"wrong checksum of chunk {chunk.decode('latin-1')!r}")
        if warnings:
            raise UserError(f"{path}: damaged image ({warnings[0]})")
        return size
    check_jpeg_channels(path, pixels)
    start = header.coded_at
    is_ordinary = start > 0 and math.prod(header.size) <= _MAX_PIXELS
    looks_right = is_ordinary and not coded_data_defect(data, start) and _is_header_accepted(data, header)
    if looks_right and not decode:
        return header.upright_hw
    kind = HiddenDamageError if looks_right else UserError
    try:
        imdecode(data, _CHECK, path, on_warning)
    except UserError as error:
        raise kind(str(error)) from None
    # Decoders continue with zeros after such a marker, without a warning if only the last few blocks are lost.
    marker = _MARKER.search(data, start) if start else None
    if marker is not None and marker[0] != b"\xff\xd9":
        warnings.append(f"marker 0x{marker[0].hex()} among the coded data, at byte {marker.start()}")
    if warnings:
        raise kind(f"{path}: damaged image ({warnings[0]})")
    return header.upright_hw


def coded_data_defect(data: bytes, start: int) -> str:
    """Why the coded data of a JPEG, from byte ``start`` to its end, is suspicious; "" if it is not. Suspicious data
    need not be damaged: a uniform area may be coded as a few repeated bytes."""
    start = -(-start // 8) * 8
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
    return "markers" if ((stray < 0xD0) | (stray > 0xD7)).any() else ""  # except for restarts


def _is_header_accepted(data: bytes, header: Header) -> bool:
    """Whether libjpeg accepts the part of a JPEG before its coded data, and only complains that there is no more."""
    eighth = tuple(-(-side // 8) for side in reversed(header.size))
    try:
        Image.frombytes("L", eighth, data[: header.coded_at], "jpeg", "L", "", 8, 0)
    except ValueError as error:
        return str(error) == "not enough image data"
    return False
