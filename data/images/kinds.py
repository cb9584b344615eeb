"""The kinds of image files, by their suffixes."""

from __future__ import annotations

import os

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
# Images of other kinds, which are counted instead of read.
_UNREAD = ".arw .avif .cr2 .cr3 .dng .exr .gif .hdr .heic .heif .ico .jxl .nef .orf .pcx .pfm .psd .raf .rw2 .svg .tga"
UNREAD_SUFFIXES = frozenset(_UNREAD.split(" "))


def unread_text(suffix: str, number: int) -> str:
    """Formats how many files of a kind are not read, and what to do."""
    return f"{counted(number, f'{suffix} file')}; convert to JPEG or PNG"


def image_suffixes(pixels: PixelFormat) -> frozenset[str]:
    """Returns the suffixes, in lower case, of image files with these pixels."""
    return IMAGE_SUFFIXES if pixels == RGB8 else IMAGE_SUFFIXES | {ARRAY_SUFFIX}


def suffix_of(path: str | os.PathLike) -> str:
    """Returns the suffix of a file name in lower case, such as ".jpg"."""
    return os.path.splitext(path)[1].lower()
