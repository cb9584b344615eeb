"""Verifies image files for a scan, mostly without decoding them.

Decoders reject a JPEG only because of its header: an unsupported process, malformed or missing tables. Here libjpeg
gets the header alone; if libjpeg accepts the header and the end marker is present, it accepts the file. Other kinds of
files are decoded.

Decoders repair errors in the coded data or leave the affected area gray, so 64 of every 2048 bytes of that data are
also checked. Valid data looks random. `coded_data_defect` finds zeros or a few repeated bytes (sparse files, incomplete
transfers), text, and invalid markers, which other compressed or encrypted data contains every few hundred bytes. Only
decoding finds single wrong bits (half of them) and pieces of another JPEG.

Source: ITU-T T.81, annex B (markers) and F.1.2.3 (a 0 after each 0xFF of coded data).
"""

from __future__ import annotations

import math
import os
import re
import zlib
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from data.image_io.channels import check_jpeg_channels
from data.image_io.decode import EncodedImage, OnWarning, decode_stored, imdecode
from data.image_io.header import MAX_PIXELS_OF_OPENCV, Header, png_chunks
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat

# The first 64 of every 2048 bytes are checked.
_STRIDE_BYTES = 2048
_SAMPLE_BYTES = 64
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # except for restarts
_HIGH_BITS = np.uint64(0x8080808080808080)
_CHECK_FLAGS = cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_IGNORE_ORIENTATION


class HiddenDamageError(UserError):
    """Damage that only decoding reveals."""


class CheckedImage(NamedTuple):
    """The result of a check: facts about an image that can be read."""

    size_hw: tuple[int, int]  # upright
    max_value: int = 0  # largest value of a 16-bit image; 0 for other images
    orientation: int = 1  # EXIF, 1 to 8; `size_hw` is the size after applying it


def check_image(path: str | os.PathLike, *, decode: bool = False, pixels: PixelFormat = RGB8) -> CheckedImage:
    """Checks that `read_image` can read a file without a warning.

    A JPEG with one scan is not decoded, unless ``decode`` is set, if its header, its end and samples of its coded data
    are plausible. Any other JPEG is decoded at an eighth of its size, which is faster. Other kinds of files are decoded
    completely, and the checksums of a PNG, which decoders ignore, are verified.

    Raises UserError as `read_image` does, and `HiddenDamageError` for damage that only ``decode`` reveals.
    """
    image = EncodedImage.read(path)
    header = image.header
    if header.kind == "jpeg":
        check_jpeg_channels(path, pixels)
        _check_jpeg(image, decode=decode)
        return CheckedImage(header.upright_hw, orientation=header.orientation)
    warnings: list[str] = []
    stored = decode_stored(image, on_warning=_append_to(warnings), pixels=pixels)
    height, width = stored.to_format(path, pixels).shape[:2]
    for chunk, begin, end in png_chunks(image.data):
        if zlib.crc32(memoryview(image.data)[begin - 4 : end]) != int.from_bytes(image.data[end : end + 4], "big"):
            warnings.append(f"wrong checksum of chunk {chunk.decode('latin-1')!r}")
    if warnings:
        raise UserError(f"{path}: damaged image ({warnings[0]})")
    is_16_bit = stored.values.dtype == np.uint16
    max_value = int(stored.values.max(initial=0)) if is_16_bit else 0
    return CheckedImage((height, width), max_value, stored.orientation)


def _check_jpeg(image: EncodedImage, *, decode: bool) -> None:
    """Implements `check_image` for a JPEG."""
    path, data, header = image
    start = header.coded_at
    has_one_scan = start > 0 and math.prod(header.upright_hw) <= MAX_PIXELS_OF_OPENCV
    is_plausible = has_one_scan and not coded_data_defect(data, start) and _is_header_accepted(data, header)
    if is_plausible and not decode:
        return
    error_type = HiddenDamageError if is_plausible else UserError
    warnings: list[str] = []
    try:
        imdecode(data, _CHECK_FLAGS, path, _append_to(warnings))
    except UserError as error:
        raise error_type(str(error)) from None
    # After a stray marker decoders continue with zeros, without a warning if only the last few blocks are lost.
    marker = _MARKER.search(data, start) if start else None
    if marker is not None and marker[0] != b"\xff\xd9":
        warnings.append(f"marker 0x{marker[0].hex()} among the coded data, at byte {marker.start()}")
    if warnings:
        raise error_type(f"{path}: damaged image ({warnings[0]})")


def _append_to(warnings: list[str]) -> OnWarning:
    """Returns an `OnWarning` that appends the decoder's warnings to a list."""
    return lambda _, warning: warnings.append(warning)


def coded_data_defect(data: bytes, start: int) -> str:
    """Returns why the coded data of a JPEG, from byte ``start`` to its end, looks suspicious; "" if it does not.

    Suspicious data need not be damaged: a uniform area may be coded as a few repeated bytes.
    """
    start = -(-start // 8) * 8
    count = max(len(data) - 2 - start, 0) // _STRIDE_BYTES
    if count == 0:
        return ""
    coded = np.frombuffer(data, np.uint8, count * _STRIDE_BYTES, start)
    samples = coded.reshape(count, _STRIDE_BYTES)[:, :_SAMPLE_BYTES].copy()
    words = samples.view(np.uint64)
    if (words[:, 1:] == words[:, :1]).all(1).any():
        return "a few bytes that repeat"
    if not (np.bitwise_or.reduce(words, 1) & _HIGH_BITS).all():
        return "text"
    markers = samples[:, 1:][(samples[:, :-1] == 0xFF) & (samples[:, 1:] != 0)]
    is_restart = (markers >= 0xD0) & (markers <= 0xD7)
    return "" if is_restart.all() else "markers"


def _is_header_accepted(data: bytes, header: Header) -> bool:
    """Returns whether libjpeg accepts the part of a JPEG before its coded data, and only complains about missing
    data."""
    height, width = header.stored_hw
    try:
        Image.frombytes("L", (-(-width // 8), -(-height // 8)), data[: header.coded_at], "jpeg", "L", "", 8, 0)
    except ValueError as error:
        return str(error) == "not enough image data"
    return False
