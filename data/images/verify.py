"""Verifies image files for a scan, mostly without decoding them.

Decoders reject a JPEG only because of its header: an unsupported process, malformed or missing tables. Here libjpeg
gets the header alone; if libjpeg accepts the header and the end marker is present, it accepts the file. Other kinds of
files are decoded.

Decoders repair errors in the coded data or leave the affected area gray, and do not tell. So 64 of every 2048 bytes of
that data are checked. Valid data looks random. `coded_data_defect` finds zeros or a few repeated bytes (sparse files,
incomplete transfers), text, and invalid markers, which other compressed or encrypted data contains every few hundred
bytes. A suspicious file is decoded, and is damaged if its image takes less or more coded data than there is. Only this
finds pieces of another JPEG and single wrong bits (some of them).

Source: ITU-T T.81, annex B (markers) and F.1.2.3 (a 0 after each 0xFF of coded data).
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from data.images.decode import EncodedImage, check_jpeg_channels, decode_stored, imdecode
from data.images.header import Header
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat

_MAX_PIXELS_OF_OPENCV = 1 << 30
# The first 64 of every 2048 bytes are checked.
_STRIDE_BYTES = 2048
_SAMPLE_BYTES = 64
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # except for restarts
_END_MARKER = b"\xff\xd9"
_HIGH_BITS = np.uint64(0x8080808080808080)
_CHECK_FLAGS = cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_IGNORE_ORIENTATION
_UNUSED_BYTES = 64  # that may follow the coded data of an image
_MISSING_BYTES = 16  # of coded data that an image may lack
_DECODER_ARGUMENTS = ("L", "", 8, 0)  # of Pillow's decoder: gray, an eighth of the size
_MIN_WIDTH = 32  # pixels; a row of noise in a narrower image may be equal to a decoded one


class HiddenDamageError(UserError):
    """Damage that only decoding reveals."""


class CheckedImage(NamedTuple):
    """The result of a check: facts about an image that can be read."""

    size_hw: tuple[int, int]  # upright
    max_value: int = 0  # largest value of a 16-bit image; 0 for other images
    orientation: int = 1  # EXIF, 1 to 8; `size_hw` is the size after applying it


def check_image(path: str | os.PathLike, *, decode: bool = False, pixels: PixelFormat = RGB8) -> CheckedImage:
    """Checks that `read_image` can read a file, and that the coded data of a JPEG is plausible.

    A JPEG with one scan is not decoded, unless ``decode`` is set, if its header, its end and samples of its coded data
    are plausible. Any other JPEG is decoded at an eighth of its size, which is faster; its coded data is not checked if
    it has several scans. Other kinds of files are decoded completely.

    Raises UserError as `read_image` does, and `HiddenDamageError` for damage that only ``decode`` reveals.
    """
    image = EncodedImage.read(path)
    if image.header.kind == "jpeg":
        check_jpeg_channels(path, pixels)
        _check_jpeg(image, decode=decode)
        return CheckedImage(image.header.upright_hw, orientation=image.header.orientation)
    stored = decode_stored(image, pixels=pixels)
    height, width = stored.to_format(path, pixels).shape[:2]
    max_value = int(stored.values.max(initial=0)) if stored.values.dtype == np.uint16 else 0
    return CheckedImage((height, width), max_value, stored.orientation)


def _check_jpeg(image: EncodedImage, *, decode: bool) -> None:
    """Implements `check_image` for a JPEG."""
    path, data, header = image
    height, width = header.stored_hw
    is_usual = (
        header.coded_at > 0
        and width >= _MIN_WIDTH
        and height * width <= _MAX_PIXELS_OF_OPENCV
        and _is_header_accepted(data[: header.coded_at], header)
    )
    if not is_usual:
        imdecode(data, _CHECK_FLAGS, path)
        return
    is_suspicious = bool(coded_data_defect(data, header.coded_at))
    if decode or is_suspicious:
        defect = _decoding_defect(data, header)
        if defect:
            error_type = UserError if is_suspicious else HiddenDamageError
            raise error_type(f"{path}: damaged image ({defect})")


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


def _decoding_defect(data: bytes, header: Header) -> str:
    """Returns how the image of a sequential JPEG and its coded data contradict each other; "" if they do not."""
    marker = _MARKER.search(data, header.coded_at)
    if marker is None or marker[0] != _END_MARKER:
        return f"marker 0x{marker[0].hex()} among the coded data, at byte {marker.start()}" if marker else "no end"
    end = marker.start()
    image = _eighth(header)
    last_row = (0, image.height - 1, image.width, image.height)
    noise = Image.frombytes("L", (image.width, 1), np.random.default_rng(0).bytes(image.width))
    image.paste(noise, last_row)  # a row that is not decoded stays as it is
    decoder = Image._getdecoder("L", "jpeg", _DECODER_ARGUMENTS)  # as PIL.ImageFile.Parser does, bit by bit
    decoder.setimage(image.im, (0, 0, *image.size))
    num_consumed, _ = decoder.decode(data[: max(end - _UNUSED_BYTES, header.coded_at)])
    if image.crop(last_row) != noise:
        return "its image ends before its coded data"
    decoder.decode(data[max(num_consumed, 0) : end] + bytes(_MISSING_BYTES))
    if image.crop(last_row) == noise:
        return "its coded data ends before its image"
    return ""


def _is_header_accepted(header_data: bytes, header: Header) -> bool:
    """Returns whether libjpeg accepts the part of a JPEG before its coded data, and only complains about missing
    data."""
    try:
        _eighth(header).frombytes(header_data, "jpeg", *_DECODER_ARGUMENTS)
    except ValueError as error:
        return str(error) == "not enough image data"
    return False


def _eighth(header: Header) -> Image.Image:
    """Creates a gray image of an eighth of the size."""
    height, width = header.stored_hw
    return Image.new("L", (-(-width // 8), -(-height // 8)))
