"""Decodes image files to upright 8-bit RGB arrays, or to arrays of another `PixelFormat` (channels.py, tiff.py).

Python reads the files, so every path that the system can open works.

- EXIF orientation (JPEG, PNG, WebP, TIFF) is applied here, so that it does not depend on the version of OpenCV.
- Grayscale is repeated over three channels; palettes are expanded.
- 16-bit values are divided by 257 and rounded, so 0 stays 0 and 65535 becomes 255.
- An alpha channel is dropped; colors are not blended with a background.
- The first image of an animation or multi-page file is used, and the default image of an animated PNG; the pages of a
  TIFF may also be channels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np

from data.image_io.channels import check_jpeg_channels, to_format, with_channels
from data.image_io.content import read_bytes
from data.image_io.file_kinds import kind_misread_by_opencv, undecodable_reason
from data.image_io.header import Header, exif_orientation, read_header, without_animation
from data.image_io.npy import read_npy
from data.image_io.tiff import opencv_reads, prepare_for_opencv, read_tiff
from data.image_io.tiff_damage import check_fields
from data.image_io.tiff_fields import PixelFields
from utils.errors import UserError
from utils.logger import get_logger
from utils.pixels import RGB8, PixelFormat
from utils.process.decoder_warnings import capture_warning

_FLIP_CODES = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # for cv2.flip, by orientation; 5 to 8 are transposed first

OnWarning = Callable[[str, str], None]  # called with the path and the decoder's warning about a damaged image


@functools.cache  # logs each image once per process
def log_damage(path: str, warning: str) -> None:
    """An `OnWarning` that logs that an image is damaged, and used as far as its decoder could recover it."""
    get_logger().warning("%s: is damaged (%s); using the part that could be decoded", path, warning)


def read_image(path: str | os.PathLike, on_warning: OnWarning | None = None, pixels: PixelFormat = RGB8) -> np.ndarray:
    """Reads the image at ``path``: uint8 (H, W, 3) RGB, or (H, W, C) of another format, upright, C-contiguous.

    A damaged JPEG is returned as far as its decoder could recover it, and ``on_warning`` is called. Raises UserError if
    the file is missing, unreadable, damaged or in an unsupported format.
    """
    return decode_image(EncodedImage.read(path), on_warning=on_warning, pixels=pixels)


class EncodedImage(NamedTuple):
    """The content of an image file."""

    path: str | os.PathLike  # for messages
    data: bytes
    header: Header

    @classmethod
    def read(cls, path: str | os.PathLike) -> EncodedImage:
        """Reads a file. Raises UserError if it is missing or unreadable, or its header is damaged."""
        return cls.from_data(read_bytes(path), path)

    @classmethod
    def from_data(cls, data: bytes, path: str | os.PathLike) -> EncodedImage:
        return cls(path, data, read_header(data, path))


def imdecode(
    data: bytes, flags: int, path: str | os.PathLike, on_warning: OnWarning | None = None
) -> tuple[np.ndarray, bytes]:
    """Decodes an image with OpenCV; returns it with its EXIF block. Raises UserError."""
    try:
        decoded, warning = capture_warning(lambda: cv2.imdecodeWithMetadata(np.frombuffer(data, np.uint8), flags=flags))
    except cv2.error as error:
        if getattr(error, "code", None) == cv2.Error.StsNoMem:  # the image may be fine
            raise MemoryError(error.err) from None
        raise UserError(f"{path}: cannot be decoded ({getattr(error, 'err', error)})") from None
    image, kinds, blocks = decoded
    if image is None:
        raise UserError(f"{path}: cannot be decoded ({undecodable_reason(data)})")
    if warning and on_warning is not None:
        on_warning(os.fspath(path), warning)
    exif = dict(zip(kinds, blocks)).get(cv2.IMAGE_METADATA_EXIF)
    return image, b"" if exif is None else exif.tobytes()


def decode_image(
    image: EncodedImage,
    *,
    jpeg_flag: int = cv2.IMREAD_COLOR_RGB,
    on_warning: OnWarning | None = None,
    pixels: PixelFormat = RGB8,
) -> np.ndarray:
    """Decodes an image: (H, W, C), upright. Raises UserError."""
    stored = decode_stored(image, jpeg_flag=jpeg_flag, on_warning=on_warning, pixels=pixels)
    return stored.to_format(image.path, pixels)


class StoredImage(NamedTuple):
    """A decoded image as stored in its file."""

    values: np.ndarray  # uint8 or uint16, (H, W) or (H, W, C), not upright
    is_rgb: bool  # BGR otherwise
    orientation: int

    def to_format(self, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
        """Returns the upright image (H, W, C) in the format. Raises UserError."""
        return with_channels(orient(to_format(self.values, path, pixels, is_rgb=self.is_rgb), self.orientation))


def decode_stored(
    image: EncodedImage,
    *,
    jpeg_flag: int = cv2.IMREAD_COLOR_RGB,
    on_warning: OnWarning | None = None,
    pixels: PixelFormat = RGB8,
) -> StoredImage:
    """Decodes an image without converting it to ``pixels``, the format in which it will be used. Raises UserError."""
    path, data, header = image
    if header.kind == "jpeg":  # the decoder converts gray and CMYK
        check_jpeg_channels(path, pixels)
        flag = jpeg_flag & ~cv2.IMREAD_COLOR_RGB if pixels.channels == 1 else jpeg_flag
        values, _ = imdecode(data, flag | cv2.IMREAD_IGNORE_ORIENTATION, path, on_warning)
        return StoredImage(values, is_rgb=True, orientation=header.orientation)
    if header.kind == "npy":
        return StoredImage(read_npy(data, path, pixels), is_rgb=True, orientation=header.orientation)
    if header.kind == "tiff":
        return _decode_tiff(image, on_warning, pixels)
    misread_kind = kind_misread_by_opencv(data, pixels)
    if misread_kind:
        raise UserError(f"{path}: {misread_kind} is not supported; convert it to PNG")
    if header.kind == "apng":
        data = without_animation(data)
    elif data.startswith((b"P2", b"P3")):
        data += b"\n"  # OpenCV needs a character after the last number of a text PNM
    values, exif = imdecode(data, cv2.IMREAD_UNCHANGED, path, on_warning)
    return StoredImage(values, is_rgb=False, orientation=exif_orientation(exif))


def _decode_tiff(image: EncodedImage, on_warning: OnWarning | None, pixels: PixelFormat) -> StoredImage:
    """Implements `decode_stored` for a TIFF, with OpenCV or tifffile."""
    path, data, _ = image
    fields = PixelFields.read(data)
    check_fields(fields, path)
    orientation = exif_orientation(data)
    if pixels == RGB8 and opencv_reads(fields):
        values, _ = imdecode(prepare_for_opencv(data), cv2.IMREAD_UNCHANGED, path, on_warning)
        return StoredImage(values, is_rgb=False, orientation=orientation)
    values = read_tiff(data, path, pixels, fields.compression)
    return StoredImage(values, is_rgb=True, orientation=orientation)


def orient(image: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        image = np.ascontiguousarray(image.swapaxes(0, 1))  # cv2.transpose rejects pixels of more than 32 bytes
    flip_code = _FLIP_CODES.get(orientation)
    return image if flip_code is None else cv2.flip(image, flip_code)
