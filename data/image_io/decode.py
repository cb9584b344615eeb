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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from data.image_io.channels import check_jpeg_channels, read_npy, resize, to_format, with_channels
from data.image_io.file_kinds import kind_misread_by_opencv, unsupported_content
from data.image_io.header import Header, exif_orientation, read_header, without_animation
from data.image_io.shards import read_member, shard_index
from data.image_io.tiff import PixelFields, prepare_for_opencv, read_tiff
from utils.decoder_warnings import capture_warning
from utils.errors import UserError
from utils.files.safe_io import read_regular
from utils.logger import get_logger
from utils.pixels import RGB8, PixelFormat
from utils.process.limits import explain_limit

_COLOR = cv2.IMREAD_COLOR_RGB
_REDUCED = {
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | _COLOR,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | _COLOR,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | _COLOR,
}
MAX_IMAGE_BYTES = 1 << 31  # largest image file
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
    data = read_bytes(path)
    return decode_image(data, read_header(data, path), path, on_warning=on_warning, pixels=pixels)


def have_single_colors(paths: Sequence[str], pixels: PixelFormat = RGB8) -> bool:
    """Returns whether every image is of one color, that is, constant in each channel.

    Returns False without images, and if one cannot be read. Reads up to the first image that varies.
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
    return decode_image(data, header, path, jpeg_flag=flag, on_warning=on_warning, pixels=pixels), full_hw


def read_bytes(path: str | os.PathLike) -> bytes:
    """Returns the content of an image file, or of an image in shards.

    Raises UserError, or OSError when the disk fails.
    """
    index = shard_index(path)
    if index is not None:
        return read_member(path, index)
    try:
        return read_regular(path, max_bytes=MAX_IMAGE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except OSError as error:
        if explain_limit(error):  # the disk has failed; the image may be fine
            error.filename = os.fspath(path)
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


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
        raise UserError(f"{path}: cannot be decoded ({unsupported_content(data) or 'damaged, or not an image'})")
    if warning and on_warning is not None:
        on_warning(os.fspath(path), warning)
    exif = dict(zip(kinds, blocks)).get(cv2.IMAGE_METADATA_EXIF)
    return image, b"" if exif is None else exif.tobytes()


def decode_image(
    data: bytes,
    header: Header,
    path: str | os.PathLike,
    *,
    jpeg_flag: int = _COLOR,
    on_warning: OnWarning | None = None,
    pixels: PixelFormat = RGB8,
) -> np.ndarray:
    """Decodes the image in ``data``: (H, W, C), upright. Raises UserError."""
    stored = decode_stored(data, header, path, jpeg_flag=jpeg_flag, on_warning=on_warning, pixels=pixels)
    return stored.to_format(path, pixels)


class StoredImage(NamedTuple):
    """A decoded image as stored in its file."""

    values: np.ndarray  # uint8 or uint16, (H, W) or (H, W, C), not upright
    is_rgb: bool  # BGR otherwise
    orientation: int

    def to_format(self, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
        """Returns the upright image (H, W, C) in the format. Raises UserError."""
        return with_channels(orient(to_format(self.values, path, pixels, is_rgb=self.is_rgb), self.orientation))


def decode_stored(
    data: bytes,
    header: Header,
    path: str | os.PathLike,
    *,
    jpeg_flag: int = _COLOR,
    on_warning: OnWarning | None = None,
    pixels: PixelFormat = RGB8,
) -> StoredImage:
    """Decodes ``data`` without converting it to ``pixels``, the format in which it will be used. Raises UserError."""
    if header.kind == "jpeg":  # the decoder converts gray and CMYK
        check_jpeg_channels(path, pixels)
        flag = jpeg_flag & ~_COLOR if pixels.channels == 1 else jpeg_flag
        values, _ = imdecode(data, flag | cv2.IMREAD_IGNORE_ORIENTATION, path, on_warning)
        return StoredImage(values, is_rgb=True, orientation=header.orientation)
    if header.kind == "npy":
        return StoredImage(read_npy(data, path, pixels), is_rgb=True, orientation=header.orientation)
    if header.kind == "tiff":
        fields = PixelFields.read(data, path)
        orientation = exif_orientation(data)
        if pixels != RGB8 or not fields.opencv_reads_page():
            values = read_tiff(data, path, pixels, fields.compression)
            return StoredImage(values, is_rgb=True, orientation=orientation)
        values, _ = imdecode(prepare_for_opencv(data), cv2.IMREAD_UNCHANGED, path, on_warning)
        return StoredImage(values, is_rgb=False, orientation=orientation)
    misread_kind = kind_misread_by_opencv(data, pixels)
    if misread_kind:
        raise UserError(f"{path}: {misread_kind} is not supported; convert it to PNG")
    if header.kind == "apng":
        data = without_animation(data)
    values, exif = imdecode(data, cv2.IMREAD_UNCHANGED, path, on_warning)
    return StoredImage(values, is_rgb=False, orientation=exif_orientation(exif))


def orient(image: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        image = np.ascontiguousarray(image.swapaxes(0, 1))  # cv2.transpose rejects pixels of more than 32 bytes
    flip_code = _FLIP_CODES.get(orientation)
    return image if flip_code is None else cv2.flip(image, flip_code)


def reduced_sizes(image_hw: np.ndarray, imgsz: int) -> np.ndarray:
    """Returns the sizes int32 (N, 2) of source images, given the sizes in their files. Rounds the shorter side up."""
    sizes = image_hw.astype(np.int64)
    longest = sizes.max(axis=1, keepdims=True, initial=1)
    reduced = np.minimum(-(-sizes * imgsz // longest), imgsz)
    return np.where(longest > imgsz, reduced, sizes).astype(np.int32)


def read_source(
    path: str, image_hw: np.ndarray, source_hw: np.ndarray, pixels: PixelFormat = RGB8, *, antialias: bool = True
) -> np.ndarray:
    """Decodes an image of a scanned data set and reduces it to the size ``source_hw``: (h, w, C).

    Args:
        image_hw: size of the image in the index.
        antialias: whether to reduce as for training: a JPEG may be decoded at a fraction of its size, and an image that
            is decoded at full size and shrinks to half or less is reduced by area. Otherwise every image is reduced
            bilinearly from its full size, as detection and published evaluations of YOLO models do (benchmarks/LOG.md).

    Raises UserError: the file cannot be decoded, or its size is not ``image_hw``.
    """
    height, width = (int(side) for side in source_hw)
    min_h, min_w = (int(side) for side in (source_hw if antialias else image_hw))
    try:
        image, full_hw = read_reduced(path, (min_h, min_w), log_damage, pixels)
    except UserError as error:
        raise UserError(f"{error}; restore or remove it, and start again") from None
    if full_hw != tuple(image_hw):
        raise UserError(
            f"{path}: is {full_hw[1]}x{full_hw[0]} pixels but was {image_hw[1]}x{image_hw[0]} when the data "
            f"set was indexed; it changed during the run; start again"
        )
    if antialias and image.shape[:2] == full_hw:
        return resize(image, width, height)
    if image.shape[:2] == (height, width):
        return image
    return with_channels(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR))
