"""Recognizes image files by their names and first bytes, and explains why some of them are not read."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence

from utils.files.safe_io import open_regular
from utils.machine.limits import explain_limit
from utils.pixels import RGB8, PixelFormat
from utils.strings import counted

MAX_IMAGE_BYTES = 1 << 31  # largest image, in a file or in a shard
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
ANY_IMAGE_SUFFIXES = IMAGE_SUFFIXES | _UNREAD_SUFFIXES | {ARRAY_SUFFIX}  # supported or not
# Suffixes of other files that are often stored next to images. They are not opened to see whether they are images.
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
# BMP and PNM headers.
_BMP_HEADER_BYTES = 54  # of a file with the usual header of 40 bytes, before its masks or palette
_OS2_HEADER_BYTES = 12
_MAX_HEADER_BYTES_WITHOUT_MASKS = 52  # OpenCV ignores the masks of 32-bit files with such a header
_BMP_BIT_FIELDS = 3  # value of a BMP's compression: the colors of a pixel are found by masks
_BMP_MASKS = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)  # of red, green and blue, in the usual order
_PNM_SPACE = rb"(?:\s|#[^\n\r]*[\n\r])+"
_PNM_HEADER = re.compile(
    rb"P(?P<kind>[2356])" + _PNM_SPACE + rb"\d+" + _PNM_SPACE + rb"\d+" + _PNM_SPACE + rb"(?P<max_value>\d{1,9})"
)


def image_suffixes(pixels: PixelFormat) -> frozenset[str]:
    """Returns the suffixes, in lower case, of image files with these pixels."""
    return IMAGE_SUFFIXES if pixels == RGB8 else IMAGE_SUFFIXES | {ARRAY_SUFFIX}


def is_image(name: str, suffixes: frozenset[str]) -> bool:
    """Returns whether a file has one of the ``suffixes`` of images: `image_suffixes` or `ANY_IMAGE_SUFFIXES`."""
    return os.path.splitext(name)[1].lower() in suffixes


def is_never_image(suffix: str) -> bool:
    """Returns whether files with a suffix (lower case) are never images, whatever they contain."""
    return suffix in _OTHER_SUFFIXES


def suffix_of(content: bytes) -> str:
    """Returns the suffix, such as ".jpg", of image files that begin like ``content``; "" if it is no known kind."""
    return next((kind for kind, signature in _SIGNATURES.items() if re.match(signature, content, re.DOTALL)), "")


def unread_image(path: str | os.PathLike) -> str:
    """Returns why an image file is not read, and what to do; "" for an image that is read, and for any other file.

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
        if explain_limit(error):
            raise
        return ""
    kind = suffix_of(start)
    if not kind:
        return ""
    remedy = f"rename it to end in {kind}" if kind in IMAGE_SUFFIXES else "convert it to JPEG or PNG"
    return f"it contains a {kind} image, but has another suffix; {remedy}"


def unread_summary(unread: Sequence[str]) -> str:
    """Returns a line about files that are left out. ``unread``: name and `unread_image` reason of each file."""
    return f"{counted(len(unread), 'file')} left out, first {unread[0]}"


def unsupported_content(data: bytes) -> str:
    """Names the unsupported image format of the content, and what to do; "" for any other content."""
    kind = suffix_of(data[:_SIGNATURE_BYTES])
    if kind not in _UNREAD_SUFFIXES:
        return ""
    return f"it contains a {kind} image, which is not supported; convert it to JPEG or PNG"


def undecodable_reason(data: bytes) -> str:
    """Says why OpenCV may have failed to decode the content of a file."""
    if suffix_of(data[:_SIGNATURE_BYTES]) == ".jp2":
        return "damaged, or of a kind of JPEG 2000 that is not supported, such as with alpha; save it as PNG"
    return unsupported_content(data) or "damaged, or not an image"


def kind_misread_by_opencv(data: bytes, pixels: PixelFormat) -> str:
    """Names the kind of a BMP or PNM of which OpenCV would read wrong pixels without an error; "" for other files."""
    if data[:2] == b"BM" and len(data) >= _BMP_HEADER_BYTES:
        (header_bytes,) = struct.unpack_from("<I", data, 14)
        bits, compression = struct.unpack_from("<HI", data, 28)
        if header_bytes == _OS2_HEADER_BYTES:
            return "a BMP of OS/2"
        has_masks = bits == 32 and compression == _BMP_BIT_FIELDS and header_bytes <= _MAX_HEADER_BYTES_WITHOUT_MASKS
        if has_masks and data[54:66] != _BMP_MASKS:
            return "a BMP with its own bit masks"
    if data[:3] == b"P7\n":
        return "a PAM"
    match = _PNM_HEADER.match(data)
    if match is not None:
        max_value = int(match["max_value"])
        is_scaled = match["kind"] in (b"2", b"3") and max_value <= 255
        if not is_scaled and max_value not in (255, 65535, (1 << pixels.bits) - 1):
            return f"a PNM with values up to {max_value}"
    return ""
