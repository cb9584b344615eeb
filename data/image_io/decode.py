"""Decodes image files to upright 8-bit RGB arrays, or to arrays of another `PixelFormat` (channels.py).

The result does not depend on the OpenCV version: orientation is applied here, not by the decoder. Python reads the
files, so every path that the system can open works.

- EXIF orientation (JPEG, PNG, WebP) is applied; for TIFF, the decoder applies the tag.
- Grayscale is repeated over three channels; palettes are expanded.
- 16-bit values are divided by 257 and rounded, so 0 stays 0 and 65535 becomes 255.
- An alpha channel is dropped; colors are not blended with a background.
- The first image of an animation or multi-page file is used.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from data.image_io.channels import (
    NPY_MAGIC,
    TIFF_MAGIC,
    check_jpeg_channels,
    read_npy,
    read_tiff,
    to_format,
    with_channels,
)
from data.image_io.shards import read_member, shard_index
from utils.errors import UserError
from utils.files.safe_io import open_regular, read_regular
from utils.logger import get_logger
from utils.machine.decoder_warnings import watched
from utils.machine.limits import explanation
from utils.pixels import RGB8, PixelFormat
from utils.strings import counted

# Lower case. Every OpenCV package on PyPI can decode these.
_SUFFIXES = (
    ".jpg .jpeg .jpe .jfif .jif .pjpeg .pjp .mpo .png .apng .bmp .dib .webp .tif .tiff .jp2 .j2k .pbm .pgm .ppm .pnm"
)
IMAGE_SUFFIXES = frozenset(_SUFFIXES.split(" "))
# With 8-bit RGB images, .npy files are caches of other programs; in any other pixel format they are images.
ARRAY_SUFFIX = ".npy"
# Image formats that are not supported.
_UNREAD = ".arw .avif .cr2 .cr3 .dng .exr .gif .hdr .heic .heif .ico .jxl .nef .orf .pcx .pfm .psd .raf .rw2 .svg .tga"
_UNREAD_SUFFIXES = frozenset(_UNREAD.split(" "))
# Suffixes of other files that often lie next to images. Such files are not opened to see whether they are images.
_OTHERS = ".txt .xml .json .jsonl .yaml .yml .csv .tsv .md .html .pdf .cache .npy .npz .mat .pt .zip .tar .gz .lmdb"
_OTHER_SUFFIXES = frozenset(_OTHERS.split(" "))
_SIGNATURE_BYTES = 16
# The first bytes of image files.
_SIGNATURES = {
    ".jpg": rb"\xff\xd8\xff",
    ".png": rb"\x89PNG\r\n\x1a\n",
    ".webp": rb"RIFF.{4}WEBP",
    ".bmp": rb"BM.{4}\0{4}",
    ".tif": rb"II\*\0|MM\0\*",
    ".jp2": rb"\0{3}\x0cjP  ",
    ".gif": rb"GIF8[79]a",
    ".avif": rb".{4}ftypavi[fs]",
    ".heic": rb".{4}ftyp(?:hei|hev|mif1|msf1)",
}

_COLOR = cv2.IMREAD_COLOR_RGB
_REDUCED = {
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | _COLOR,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | _COLOR,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | _COLOR,
}
MAX_IMAGE_BYTES = 1 << 31  # largest image file
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15, without DHT, JPG and DAC
_SEQUENTIAL = (0xC0, 0xC1)  # SOF0, SOF1
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length: TEM, RST0..RST7
_ORIENTATION_TAG = 0x0112
_FLIP_CODES = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # for cv2.flip, by orientation; 5 to 8 are transposed first

OnWarning = Callable[[str, str], None]  # called with the path and the decoder's warning about a damaged image


@functools.cache  # logs each image once per process
def log_damage(path: str, warning: str) -> None:
    """An `OnWarning` that logs the damage of an image that is used as far as its decoder could recover it."""
    get_logger().warning("%s: is damaged (%s); it is used as decoded", path, warning)


class Header(NamedTuple):
    """Facts from the header of an image file. Only a JPEG has the fields after ``kind``."""

    kind: str  # "jpeg", "tiff", "npy" or "other"
    orientation: int = 1  # EXIF, 1 to 8
    stored_hw: tuple[int, int] = (0, 0)  # height and width before orientation
    coded_at: int = 0  # byte at which the coded data of a sequential JPEG with one scan begins; 0 for other JPEGs

    @property
    def upright_hw(self) -> tuple[int, int]:
        """Height and width of a JPEG after orientation."""
        height, width = self.stored_hw
        return (width, height) if self.orientation >= 5 else (height, width)


def image_suffixes(pixels: PixelFormat) -> frozenset[str]:
    """Returns the suffixes, in lower case, of image files with these pixels."""
    return IMAGE_SUFFIXES if pixels == RGB8 else IMAGE_SUFFIXES | {ARRAY_SUFFIX}


def _other_content(data: bytes) -> str:
    """Says which unsupported image format the content has, and what to do; "" for any other content."""
    kind = suffix_of(data[:_SIGNATURE_BYTES])
    if kind not in _UNREAD_SUFFIXES:
        return ""
    return f"its content is that of a {kind} file, which is not supported; convert it to JPEG or PNG"


def is_image_name(name: str) -> bool:
    """Whether a file has the suffix of an image, supported or not."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix in IMAGE_SUFFIXES or suffix in _UNREAD_SUFFIXES or suffix == ARRAY_SUFFIX


def suffix_of(content: bytes) -> str:
    """Returns the suffix for image files that begin like ``content``, such as ".jpg"; "" if it is no known image."""
    return next((kind for kind, signature in _SIGNATURES.items() if re.match(signature, content, re.DOTALL)), "")


def unread_image(path: str | os.PathLike) -> str:
    """Says why an image file is not read, and what to do; "" for an image that is read, and for any other file.

    A file is not read if its format is not supported, or if it begins like an image but has another suffix.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _UNREAD_SUFFIXES:
        return f"{suffix} files are not supported; convert them to JPEG or PNG"
    if suffix in IMAGE_SUFFIXES or suffix in _OTHER_SUFFIXES:
        return ""
    try:
        with open_regular(path) as file:
            start = file.read(_SIGNATURE_BYTES)
    except OSError as error:
        if explanation(error):
            raise
        return ""
    kind = suffix_of(start)
    if not kind:
        return ""
    remedy = f"rename it to end in {kind}" if kind in IMAGE_SUFFIXES else "convert it to JPEG or PNG"
    return f"its content is that of a {kind} file, but its suffix is not; {remedy}"


def unread_summary(unread: Sequence[str]) -> str:
    """Returns a line about files that are left out. ``unread``: the name and the `unread_image` reason of each."""
    return f"{counted(len(unread), 'file')} left out, first {unread[0]}"


def read_image(path: str | os.PathLike, on_warning: OnWarning | None = None, pixels: PixelFormat = RGB8) -> np.ndarray:
    """Reads the image at ``path``: uint8 (H, W, 3) RGB, or (H, W, C) of another format, upright, C-contiguous.

    A damaged JPEG is returned as far as its decoder could recover it, and ``on_warning`` is called. Raises UserError if
    the file is missing, unreadable, damaged or in an unsupported format.
    """
    data = read_bytes(path)
    return decode_image(data, read_header(data, path), path, on_warning=on_warning, pixels=pixels)


def have_single_colors(paths: Sequence[str], pixels: PixelFormat = RGB8) -> bool:
    """Whether every image is of one color, that is, constant in each channel.

    Returns False for no images, and if one cannot be read. Reads up to the first image that varies.
    """

    def is_single_color(path: str) -> bool:
        values = read_image(path, lambda *_: None, pixels).reshape(-1, pixels.channels)
        return bool((values == values[0]).all())

    try:
        return len(paths) > 0 and all(map(is_single_color, paths))
    except UserError:
        return False


def read_reduced(
    path: str | os.PathLike, min_hw: tuple[int, int], on_warning: OnWarning | None = None, pixels: PixelFormat = RGB8
) -> tuple[np.ndarray, tuple[int, int]]:
    """Reads an image as `read_image` does, possibly reduced; returns it with its full upright height and width.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size (by its decoder, from fewer frequencies of each block) if that is
    at least ``min_hw`` and the padding of the last row or column is at most half a pixel.
    """
    data = read_bytes(path)
    header = read_header(data, path)
    if header.kind != "jpeg":
        image = decode_image(data, header, path, on_warning=on_warning, pixels=pixels)
        height, width = image.shape[:2]
        return image, (height, width)
    full_hw = header.upright_hw
    flag = _COLOR
    for divisor, reduced_flag in _REDUCED.items():
        is_large_enough = all(-(-side // divisor) >= smallest for side, smallest in zip(full_hw, min_hw))
        if is_large_enough and all(2 * (-side % divisor) <= divisor for side in full_hw):
            flag = reduced_flag
    return decode_image(data, header, path, flag, on_warning, pixels), full_hw


def read_bytes(path: str | os.PathLike) -> bytes:
    """Returns the content of an image file, or of an image in shards.

    Raises UserError, or OSError when the disk fails.
    """
    index = shard_index(path)
    if index is not None:
        return read_member(path, index)
    try:
        return read_regular(path, most=MAX_IMAGE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except OSError as error:
        if explanation(error):  # the disk has failed; the image may be fine
            error.filename = os.fspath(path)
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def imdecode(
    data: bytes, flags: int, path: str | os.PathLike, on_warning: OnWarning | None = None
) -> tuple[np.ndarray, bytes]:
    """Decodes an image with OpenCV; returns it with its EXIF block. Raises UserError."""
    try:
        decoded, warning = watched(lambda: cv2.imdecodeWithMetadata(np.frombuffer(data, np.uint8), flags=flags))
    except cv2.error as error:
        if getattr(error, "code", None) == cv2.Error.StsNoMem:  # the image may be fine
            raise MemoryError(error.err) from None
        raise UserError(f"{path}: cannot be decoded ({getattr(error, 'err', error)})") from None
    image, kinds, blocks = decoded
    if image is None:
        raise UserError(f"{path}: cannot be decoded ({_other_content(data) or 'damaged, or not an image'})")
    if warning and on_warning is not None:
        on_warning(os.fspath(path), warning)
    exif = dict(zip(kinds, blocks)).get(cv2.IMAGE_METADATA_EXIF)
    return image, b"" if exif is None else exif.tobytes()


def decode_image(
    data: bytes,
    header: Header,
    path: str | os.PathLike,
    jpeg_flag: int = _COLOR,
    on_warning: OnWarning | None = None,
    pixels: PixelFormat = RGB8,
    largest: list[int] | None = None,
) -> np.ndarray:
    """Decodes the image in ``data``; appends the largest value of a 16-bit image to ``largest``. Raises UserError."""
    is_rgb = True
    orientation = header.orientation
    if header.kind == "jpeg":  # the decoder converts gray and CMYK
        check_jpeg_channels(path, pixels)
        flag = jpeg_flag & ~_COLOR if pixels.channels == 1 else jpeg_flag
        image, _ = imdecode(data, flag | cv2.IMREAD_IGNORE_ORIENTATION, path, on_warning)
    elif header.kind == "npy":
        image = read_npy(data, path, pixels)
    elif header.kind == "tiff" and pixels != RGB8:
        image, orientation = read_tiff(data, path)
    else:
        image, exif = imdecode(data, cv2.IMREAD_UNCHANGED, path, on_warning)
        is_rgb = False
        orientation = exif_orientation(exif)
    if largest is not None and image.dtype == np.uint16:
        largest.append(int(image.max(initial=0)))
    return with_channels(orient(to_format(image, path, pixels, is_rgb=is_rgb), orientation))


def orient(image: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        image = cv2.transpose(image)
    flip_code = _FLIP_CODES.get(orientation)
    return image if flip_code is None else cv2.flip(image, flip_code)


def reduced_sizes(image_hw: np.ndarray, imgsz: int) -> np.ndarray:
    """Returns the sizes int32 (N, 2) of source images for the sizes of their files. Rounds the shorter side up."""
    sizes = image_hw.astype(np.int64)
    longest = sizes.max(axis=1, keepdims=True, initial=1)
    reduced = np.minimum(-(-sizes * imgsz // longest), imgsz)
    return np.where(longest > imgsz, reduced, sizes).astype(np.int32)


def read_source(
    path: str, image_hw: np.ndarray, source_hw: np.ndarray, pixels: PixelFormat = RGB8, *, reduces: bool = True
) -> np.ndarray:
    """Decodes an image of a scanned data set and reduces it to the size ``source_hw``: (h, w, C).

    Args:
        image_hw: size of the image in the index.
        reduces: whether a JPEG may be decoded at a fraction of its size.

    Raises UserError: the file cannot be decoded, or its size is not ``image_hw``.
    """
    height, width = (int(side) for side in source_hw)
    min_h, min_w = (int(side) for side in (source_hw if reduces else image_hw))
    try:
        image, full_hw = read_reduced(path, (min_h, min_w), log_damage, pixels)
    except UserError as error:
        raise UserError(f"{error}; restore or remove it, and start again") from None
    if full_hw != tuple(image_hw):
        raise UserError(
            f"{path}: is {full_hw[1]}x{full_hw[0]} pixels but was {image_hw[1]}x{image_hw[0]} when the data "
            f"set was indexed; it changed during the run, start again"
        )
    if image.shape[:2] == (height, width):
        return image
    return with_channels(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR))


def read_header(data: bytes, path: str | os.PathLike) -> Header:
    """Reads the header in the content of an image file. Raises UserError if it is empty, or a truncated JPEG or PNG.

    Pillow would take several times as long, for each image of each epoch.
    """
    try:
        if not data:
            raise ValueError("the file is empty")
        if data[:2] == b"\xff\xd8":
            return _read_jpeg(data)
        for kind, _, end in png_chunks(data):
            if end + 4 > len(data):  # OpenCV would allocate the stated length
                raise ValueError(f"truncated in chunk {kind.decode('latin-1')!r}")
    except ValueError as error:
        raise UserError(f"{path}: damaged image ({error})") from None
    if data[:6] == NPY_MAGIC:
        return Header("npy")
    if data[:4] in TIFF_MAGIC:
        return Header("tiff")
    return Header("other")


def _read_jpeg(data: bytes) -> Header:
    """Reads the header of a JPEG, marker by marker. Raises ValueError if it is damaged."""
    stored_hw = (0, 0)
    orientation = 1
    components = b""  # their number in a sequential frame, one byte
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise ValueError(f"no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker in _JPEG_BARE:
            at += 2
            continue
        if marker == 0xD9:
            raise ValueError("it ends before the image data")
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2:
            raise ValueError(f"bad segment length at byte {at}")
        if marker in _JPEG_FRAMES and at + 9 <= len(data):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            stored_hw = (height, width)
            components = data[at + 9 : at + 10] if marker in _SEQUENTIAL else b""
        elif marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = exif_orientation(data[at + 10 : at + 2 + length])
        elif marker == 0xDA:
            # In coded data 0xFF is followed by 0 or RSTn, so this finds the end marker, even before trailing bytes.
            if not data.endswith(b"\xff\xd9") and data.find(b"\xff\xd9", at + length) < 0:
                raise ValueError("truncated: no end marker")
            if not all(stored_hw):
                raise ValueError("no size in the header")
            scan_components = data[at + 4 : at + 5]
            has_one_scan = scan_components != b"" and scan_components == components
            return Header("jpeg", orientation, stored_hw, at + 2 + length if has_one_scan else 0)
        at += 2 + length
    raise ValueError("truncated in the header")


def orientation_of(path: str | os.PathLike) -> int:
    """Returns the EXIF orientation, 1 to 8, that `read_image` applies to a file. Raises UserError as that does."""
    data = read_bytes(path)
    header = read_header(data, path)
    if header.kind == "tiff":  # has the structure of an EXIF block
        return exif_orientation(data)
    if header.kind != "other":
        return header.orientation
    _, exif = imdecode(data, cv2.IMREAD_UNCHANGED, path)
    return exif_orientation(exif)


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, start and end of each chunk's content in a PNG, which may be cut off; nothing for other files."""
    at = 8
    kind = b""
    while data[:8] == _PNG_MAGIC and at + 8 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, at + 8 + length
        at += length + 12


def exif_orientation(tiff: bytes) -> int:
    """Returns the orientation, 1 to 8, in an EXIF block (a TIFF header and its first directory); 1 without one."""
    byte_order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if byte_order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{byte_order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{byte_order}H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, field_type, _, value = struct.unpack_from(f"{byte_order}HHIH", tiff, entry)
            if tag == _ORIENTATION_TAG and field_type == 3:  # an unsigned short, as EXIF requires
                return value if 1 <= value <= 8 else 1
    except struct.error:  # the block ends early
        pass
    return 1
