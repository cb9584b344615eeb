"""Decodes image files to upright 8-bit RGB arrays, or arrays of another `PixelFormat` (channels.py).

The result does not depend on the OpenCV version: orientation is applied here, not by the decoder. Files are read by
Python, so every path that the system can open works.

- EXIF orientation (JPEG, PNG, WebP) is applied; the decoder applies TIFF's tag.
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

# Lower case. All OpenCV packages on PyPI can decode these.
_SUFFIXES = (
    ".jpg .jpeg .jpe .jfif .jif .pjpeg .pjp .mpo .png .apng .bmp .dib .webp .tif .tiff .jp2 .j2k .pbm .pgm .ppm .pnm"
)
IMAGE_SUFFIXES = frozenset(_SUFFIXES.split(" "))
ARRAY_SUFFIX = ".npy"  # of images only where a data set or a model has a format of its own: other programs' caches
# Image formats that are not supported.
_UNREAD = ".arw .avif .cr2 .cr3 .dng .exr .gif .hdr .heic .heif .ico .jxl .nef .orf .pcx .pfm .psd .raf .rw2 .svg .tga"
_UNREAD_SUFFIXES = frozenset(_UNREAD.split(" "))
# Files that lie next to images. They are not opened.
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
MOST_IMAGE_BYTES = 1 << 31  # of a file
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15 but DHT, JPG and DAC
_SEQUENTIAL = (0xC0, 0xC1)  # SOF0, SOF1
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length: TEM, RST0..RST7
_ORIENTATION_TAG = 0x0112
_MIRRORS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # by orientation, those from 5 on transposed first: code of cv2.flip

OnWarning = Callable[[str, str], None]  # called with the path and the decoder's warning about a damaged image


@functools.cache  # once a process
def log_damage(path: str, warning: str) -> None:
    """The `OnWarning` of images that are used as their decoder could recover them."""
    get_logger().warning("%s: is damaged (%s); it is used as decoded", path, warning)


class Header(NamedTuple):
    """What the header of an image file says."""

    kind: str  # "jpeg", "tiff", "npy" or "other"
    orientation: int = 1  # of a JPEG: 1..8
    size: tuple[int, int] | None = None  # of a JPEG: height and width as stored, before orientation
    coded_at: int = 0  # of a sequential JPEG of one scan: where its coded data begins, bytes

    @property
    def upright_hw(self) -> tuple[int, int]:
        """Of a JPEG: height and width after orientation."""
        height, width = self.size
        return (width, height) if self.orientation >= 5 else (height, width)


def image_suffixes(pixels: PixelFormat) -> frozenset[str]:
    """The suffixes, in lower case, of images with these pixels."""
    return IMAGE_SUFFIXES if pixels == RGB8 else IMAGE_SUFFIXES | {ARRAY_SUFFIX}


def _other_content(data: bytes) -> str:
    """What an image is whose format is not supported, and what to do; "" for other content."""
    kind = suffix_of(data[:_SIGNATURE_BYTES])
    if kind not in _UNREAD_SUFFIXES:
        return ""
    return f"its content is that of a {kind} file, which is not supported; convert it to JPEG or PNG"


def is_image_name(name: str) -> bool:
    """Whether a file has the suffix of an image, of one that is not supported, too."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix in IMAGE_SUFFIXES or suffix in _UNREAD_SUFFIXES or suffix == ARRAY_SUFFIX


def suffix_of(content: bytes) -> str:
    """The suffix of image files that begin like ``content``, such as ".jpg"; "" for content of other kinds."""
    return next((kind for kind, signature in _SIGNATURES.items() if re.match(signature, content, re.DOTALL)), "")


def unread_image(path: str | os.PathLike) -> str:
    """Why an image file is not read, and what to do: its format is not supported, or its first bytes are those of an
    image, but its suffix is not. "" for an image that is read, and for any other file."""
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
    """A line about files that are left out. ``unread``: the name of each, and the result of `unread_image`."""
    return f"{counted(len(unread), 'file')} left out, first {unread[0]}"


def read_image(path: str | os.PathLike, on_warning: OnWarning | None = None, pixels: PixelFormat = RGB8) -> np.ndarray:
    """The image at ``path`` as uint8 (H, W, 3) RGB, or (H, W, C) of another format, upright, C-contiguous.

    A damaged JPEG is returned as its decoder could recover it, and ``on_warning`` is called. Raises UserError if the
    file is missing, unreadable, damaged or of an unsupported kind.
    """
    data = read_bytes(path)
    return decode_image(data, read_header(data, path), path, on_warning=on_warning, pixels=pixels)


def have_single_colors(paths: Sequence[str], pixels: PixelFormat = RGB8) -> bool:
    """Whether each of the images has the same value everywhere, by channel. False for none, and if one cannot be read.
    They are read up to the first one that varies."""

    def is_single_color(path: str) -> bool:
        values = read_image(path, lambda *_: None, pixels).reshape(-1, pixels.channels)
        return bool((values == values[0]).all())

    try:
        return len(paths) > 0 and all(map(is_single_color, paths))
    except UserError:
        return False


def read_reduced(
    path: str | os.PathLike, least_hw: tuple[int, int], on_warning: OnWarning | None = None, pixels: PixelFormat = RGB8
) -> tuple[np.ndarray, tuple[int, int]]:
    """The image as `read_image` returns it, possibly reduced, and its full upright height and width.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size (by its decoder, from fewer frequencies of each block) if that is
    at least ``least_hw`` and the padding of the last row or column is at most half a pixel.
    """
    data = read_bytes(path)
    header = read_header(data, path)
    if header.kind != "jpeg":
        image = decode_image(data, header, path, on_warning=on_warning, pixels=pixels)
        return image, image.shape[:2]
    full = header.upright_hw
    flag = _COLOR
    for s, reduced in _REDUCED.items():
        if all(-(-side // s) >= least and 2 * (-side % s) <= s for side, least in zip(full, least_hw)):
            flag = reduced
    return decode_image(data, header, path, flag, on_warning, pixels), full


def read_bytes(path: str | os.PathLike) -> bytes:
    """Returns the content of an image file, or of an image in shards. Raises UserError, or OSError when the disk
    fails."""
    index = shard_index(path)
    if index is not None:
        return read_member(path, index)
    try:
        return read_regular(path, most=MOST_IMAGE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except OSError as error:
        if explanation(error):  # the disk has failed, the image may be correct
            error.filename = os.fspath(path)
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def imdecode(
    data: bytes, flags: int, path: str | os.PathLike, on_warning: OnWarning | None = None
) -> tuple[np.ndarray, bytes]:
    """The image as OpenCV decodes it, and its EXIF block. Raises UserError."""
    try:
        found, warning = watched(lambda: cv2.imdecodeWithMetadata(np.frombuffer(data, np.uint8), flags=flags))
    except cv2.error as error:
        if getattr(error, "code", None) == cv2.Error.StsNoMem:  # the image may be correct
            raise MemoryError(error.err) from None
        raise UserError(f"{path}: cannot be decoded ({getattr(error, 'err', error)})") from None
    image, kinds, blocks = found
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
    """The image in ``data``; ``largest`` receives the largest value of a 16-bit one. Raises UserError."""
    is_rgb, orientation = True, header.orientation
    if header.kind == "jpeg":  # the decoder converts gray and CMYK
        check_jpeg_channels(path, pixels)
        flag = jpeg_flag & ~_COLOR if pixels.channels == 1 else jpeg_flag
        image, _ = imdecode(data, flag | cv2.IMREAD_IGNORE_ORIENTATION, path, on_warning)
    elif header.kind == "npy":
        image = read_npy(data, path, pixels)
    elif header.kind == "tiff" and pixels != RGB8:
        image, orientation = read_tiff(data, path)
    else:
        (image, exif), is_rgb = imdecode(data, cv2.IMREAD_UNCHANGED, path, on_warning), False
        orientation = exif_orientation(exif)
    if largest is not None and image.dtype == np.uint16:
        largest.append(int(image.max(initial=0)))
    return with_channels(orient(to_format(image, path, pixels, is_rgb=is_rgb), orientation))


def orient(image: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        image = cv2.transpose(image)
    mirror = _MIRRORS.get(orientation)
    return image if mirror is None else cv2.flip(image, mirror)


def reduced_sizes(image_hw: np.ndarray, imgsz: int) -> np.ndarray:
    """Sizes of source images, int32 (N, 2), from those of the files. The shorter side is rounded up."""
    sizes = image_hw.astype(np.int64)
    longest = sizes.max(axis=1, keepdims=True, initial=1)
    reduced = np.minimum(-(-sizes * imgsz // longest), imgsz)
    return np.where(longest > imgsz, reduced, sizes).astype(np.int32)


def read_source(
    path: str, image_hw: np.ndarray, source_hw: np.ndarray, pixels: PixelFormat = RGB8, *, reduces: bool = True
) -> np.ndarray:
    """Decodes an image of a scanned data set and reduces it to the size ``source_hw``: (h, w, C). ``reduces``: whether
    a JPEG may be decoded at a fraction of its size. Raises UserError: the file cannot be decoded, or its size is not
    ``image_hw``, that of the index."""
    height, width = (int(v) for v in source_hw)
    least_h, least_w = (int(v) for v in (source_hw if reduces else image_hw))
    try:
        image, stored_hw = read_reduced(path, (least_h, least_w), log_damage, pixels)
    except UserError as error:
        raise UserError(f"{error}; restore or remove it, and start again") from None
    if stored_hw != tuple(image_hw):
        raise UserError(
            f"{path}: is {stored_hw[1]}x{stored_hw[0]} pixels but was {image_hw[1]}x{image_hw[0]} when the data "
            f"set was indexed; it changed during the run, start again"
        )
    if image.shape[:2] == (height, width):
        return image
    return with_channels(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR))


def read_header(data: bytes, path: str | os.PathLike) -> Header:
    """The header of an image file in memory. Raises UserError for an empty file and a truncated JPEG or PNG. Pillow
    would take several times as long, for each image of each epoch."""
    try:
        if not data:
            raise ValueError("the file is empty")
        if data[:2] == b"\xff\xd8":
            return _read_jpeg(data)
        for kind, _, end in png_chunks(data):
            if end + 4 > len(data):  # OpenCV would allocate as much as the length says
                raise ValueError(f"truncated in chunk {kind.decode('latin-1')!r}")
    except ValueError as error:
        raise UserError(f"{path}: damaged image ({error})") from None
    return Header("npy" if data[:6] == NPY_MAGIC else "tiff" if data[:4] in TIFF_MAGIC else "other")


def _read_jpeg(data: bytes) -> Header:
    size, orientation, at, components = None, 1, 2, b""
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise ValueError(f"no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF or marker in _JPEG_BARE:  # fill byte, or a marker without a length
            at += 1 if marker == 0xFF else 2
            continue
        if marker == 0xD9:
            raise ValueError("it ends before the image data")
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2:
            raise ValueError(f"bad segment length at byte {at}")
        if marker in _JPEG_FRAMES and at + 9 <= len(data):
            size = struct.unpack(">HH", data[at + 5 : at + 9])
            components = data[at + 9 : at + 10] if marker in _SEQUENTIAL else b""
        elif marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = exif_orientation(data[at + 10 : at + 2 + length])
        elif marker == 0xDA:
            # In coded data 0xFF is followed by 0 or RSTn, so this is the end marker, even with trailing bytes.
            if not data.endswith(b"\xff\xd9") and data.find(b"\xff\xd9", at + length) < 0:
                raise ValueError("truncated: no end marker")
            if not size or not all(size):
                raise ValueError("no size in the header")
            is_whole = components == data[at + 4 : at + 5] != b""  # one scan has them all
            return Header("jpeg", orientation, size, at + 2 + length if is_whole else 0)
        at += 2 + length
    raise ValueError("truncated in the header")


def orientation_of(path: str | os.PathLike) -> int:
    """The EXIF orientation of an image file, 1 to 8, that `read_image` applies. Raises UserError as that does."""
    data = read_bytes(path)
    header = read_header(data, path)
    if header.kind == "tiff":  # begins like an EXIF block
        return exif_orientation(data)
    if header.kind != "other":
        return header.orientation
    _, exif = imdecode(data, cv2.IMREAD_UNCHANGED, path)
    return exif_orientation(exif)


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, begin and end of the content, which may be cut, of each chunk of a PNG; nothing for other files."""
    at, kind = 8, b""
    while data[:8] == _PNG_MAGIC and at + 8 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at + 8, at + 8 + length
        at += length + 12


def exif_orientation(tiff: bytes) -> int:
    """The orientation, 1 to 8, in an EXIF block (a TIFF header and its first directory); 1 if it has none."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
            if tag == _ORIENTATION_TAG and kind == 3:  # an unsigned short, as EXIF requires
                return value if 1 <= value <= 8 else 1
    except struct.error:  # it ends early
        pass
    return 1
