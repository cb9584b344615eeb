"""Decodes image files to upright 8-bit RGB arrays, or to arrays of another `PixelFormat`, also at reduced sizes.

An image is what OpenCV decodes, an array in a .npy file, or a TIFF that tifffile reads (tiff.py). Python reads the
files, so every path that the system can open works.

- EXIF orientation (JPEG, PNG, WebP, TIFF) is applied here, so that it does not depend on the version of OpenCV.
- Grayscale is repeated over three channels; palettes are expanded.
- 16-bit values are divided by 257 and rounded, so 0 stays 0 and 65535 becomes 255.
- An alpha channel is dropped; colors are not blended with a background.
- The first image of an animation or multi-page file is used; the pages of a TIFF may also be channels.
"""

from __future__ import annotations

import functools
import io
import os
from typing import NamedTuple

import cv2
import numpy as np

from data.images.header import Header, exif_orientation, read_header
from data.images.kinds import MAX_IMAGE_BYTES
from data.images.shards import read_member, shard_index
from data.images.tiff import opencv_reads, read_tiff
from utils.errors import UserError
from utils.files.safe_io import read_regular
from utils.machine.limits import raise_if_limit
from utils.pixels import RGB8, PixelFormat, as_16_bits
from utils.strings import counted

_FLIP_CODES = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # for cv2.flip, by orientation; 5 to 8 are transposed first
# OpenCV's conversion code, by the channel counts of the image and of the format.
_FROM_BGR = {
    (1, 3): cv2.COLOR_GRAY2RGB,
    (3, 3): cv2.COLOR_BGR2RGB,
    (4, 3): cv2.COLOR_BGRA2RGB,
    (3, 1): cv2.COLOR_BGR2GRAY,
    (4, 1): cv2.COLOR_BGRA2GRAY,
    (4, 4): cv2.COLOR_BGRA2RGBA,
}
_FROM_RGB = {
    (1, 3): cv2.COLOR_GRAY2RGB,
    (4, 3): cv2.COLOR_RGBA2RGB,
    (3, 1): cv2.COLOR_RGB2GRAY,
    (4, 1): cv2.COLOR_RGBA2GRAY,
}

# Flags for OpenCV, by the divisor of a JPEG's size.
_REDUCED = {
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | cv2.IMREAD_COLOR_RGB,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | cv2.IMREAD_COLOR_RGB,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_COLOR_RGB,
}


def read_image(path: str | os.PathLike, pixels: PixelFormat = RGB8) -> np.ndarray:
    """Reads the image at ``path``: uint8 (H, W, 3) RGB, or (H, W, C) of another format, upright, C-contiguous.

    Raises UserError if the file is missing, unreadable, truncated or in an unsupported format. A JPEG with other damage
    is returned as its decoder repairs it; `data.images.verify` finds such files.
    """
    return decode_image(EncodedImage.read(path), pixels=pixels)


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
        raise_if_limit(error, path)
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


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


class StoredImage(NamedTuple):
    """A decoded image as stored in its file."""

    values: np.ndarray  # uint8 or uint16, (H, W) or (H, W, C), not upright
    is_rgb: bool  # BGR otherwise
    orientation: int

    def to_format(self, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
        """Returns the upright image (H, W, C) in the format. Raises UserError."""
        return with_channels(orient(to_format(self.values, path, pixels, is_rgb=self.is_rgb), self.orientation))


def decode_image(
    image: EncodedImage, *, jpeg_flag: int = cv2.IMREAD_COLOR_RGB, pixels: PixelFormat = RGB8
) -> np.ndarray:
    """Decodes an image: (H, W, C), upright. ``jpeg_flag``: for OpenCV. Raises UserError."""
    return decode_stored(image, jpeg_flag=jpeg_flag, pixels=pixels).to_format(image.path, pixels)


def decode_stored(
    image: EncodedImage, *, jpeg_flag: int = cv2.IMREAD_COLOR_RGB, pixels: PixelFormat = RGB8
) -> StoredImage:
    """Decodes an image without converting it to ``pixels``, the format in which it will be used. Raises UserError."""
    path, data, header = image
    if header.kind == "jpeg":  # the decoder converts gray and CMYK
        check_jpeg_channels(path, pixels)
        flag = jpeg_flag & ~cv2.IMREAD_COLOR_RGB if pixels.channels == 1 else jpeg_flag
        values, _ = imdecode(data, flag | cv2.IMREAD_IGNORE_ORIENTATION, path)
        return StoredImage(values, is_rgb=True, orientation=header.orientation)
    if header.kind == "npy":
        return StoredImage(_read_npy(data, path, pixels), is_rgb=True, orientation=1)
    if header.kind == "tiff" and not (pixels == RGB8 and opencv_reads(data)):
        values, orientation = read_tiff(data, path, pixels)
        return StoredImage(values, is_rgb=True, orientation=orientation)
    values, exif = imdecode(data, cv2.IMREAD_UNCHANGED, path)
    return StoredImage(values, is_rgb=False, orientation=exif_orientation(exif))


def imdecode(data: bytes, flags: int, path: str | os.PathLike) -> tuple[np.ndarray, bytes]:
    """Decodes an image with OpenCV; returns it with its EXIF block. Raises UserError."""
    _log_only_errors()
    try:
        image, kinds, blocks = cv2.imdecodeWithMetadata(np.frombuffer(data, np.uint8), flags=flags)
    except cv2.error as error:
        if getattr(error, "code", None) == cv2.Error.StsNoMem:  # the image may be fine
            raise MemoryError(error.err) from None
        raise UserError(f"{path}: cannot be decoded ({getattr(error, 'err', error)})") from None
    if image is None:
        raise UserError(f"{path}: cannot be decoded (damaged, or not an image)")
    exif = dict(zip(kinds, blocks)).get(cv2.IMAGE_METADATA_EXIF)
    return image, b"" if exif is None else exif.tobytes()


@functools.cache  # once per process
def _log_only_errors() -> None:
    """Keeps OpenCV from warning about the tags of each GeoTIFF, which libtiff does not know."""
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)


def _read_npy(data: bytes, path: str | os.PathLike, pixels: PixelFormat) -> np.ndarray:
    """Returns the array in the content of a .npy file: (H, W) or (H, W, c). Raises UserError for any other array."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception:  # numpy raises many kinds for damaged content
        raise UserError(f"{path}: damaged .npy file, or not an array of numbers") from None
    if array.ndim not in (2, 3) or array.size == 0:
        raise UserError(f"{path}: has shape {array.shape}; expected (H, W) or (H, W, channels)")
    if array.ndim == 3 and array.shape[0] == pixels.channels != array.shape[2]:
        raise UserError(f"{path}: has shape {array.shape}, channels first; save it as (H, W, channels)")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def orient(image: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF orientation, 1 to 8."""
    if orientation in (5, 6, 7, 8):
        image = np.ascontiguousarray(image.swapaxes(0, 1))  # cv2.transpose rejects pixels of more than 32 bytes
    flip_code = _FLIP_CODES.get(orientation)
    return image if flip_code is None else cv2.flip(image, flip_code)


def to_format(
    image: np.ndarray, path: str | os.PathLike, pixels: PixelFormat = RGB8, *, is_rgb: bool = False
) -> np.ndarray:
    """Converts decoded pixels to (H, W, C) of the format, C-contiguous.

    ``image`` is (H, W) or (H, W, c), uint8 or uint16, BGR unless ``is_rgb``. An 8-bit format gets 16-bit values divided
    by 257 and rounded. A format with one or three channels gets gray, RGB and RGBA images converted; any other format
    requires an image with the same number of channels. Raises UserError.
    """
    if image.dtype not in (np.uint8, np.uint16):
        raise UserError(f"{path}: {image.dtype} pixels are not supported; convert the image to 8 or 16 bits")
    channels = 1 if image.ndim == 2 else image.shape[2]
    conversion = (_FROM_RGB if is_rgb else _FROM_BGR).get((channels, pixels.channels))
    if conversion is None and channels != pixels.channels:
        raise _channel_error(channels, path, pixels)
    image = _with_bits(image, path, pixels.bits)
    if conversion is not None:
        image = cv2.cvtColor(image, conversion)
    return with_channels(np.ascontiguousarray(image))


def _channel_error(channels: int, path: str | os.PathLike, pixels: PixelFormat) -> UserError:
    """Returns the error about an image whose number of ``channels`` cannot be converted to the format."""
    if pixels == RGB8:
        reason = "; expected 1 (gray), 3 (color), 4 (color and alpha), or the number of 'channels' in the YAML"
    else:
        reason = f", but the data set or model has {pixels.channels}; correct 'channels' in the YAML, or the image"
    return UserError(f"{path}: {counted(channels, 'channel')}{reason}")


def _with_bits(image: np.ndarray, path: str | os.PathLike, bits: int) -> np.ndarray:
    """Converts uint8 or uint16 values to a format with ``bits`` bits. Raises UserError if a value exceeds its range."""
    if bits == 8:
        return cv2.convertScaleAbs(image, alpha=1 / 257) if image.dtype == np.uint16 else image
    if image.dtype == np.uint16:
        largest = int(image.max(initial=0))
        if largest >> bits:
            raise UserError(f"{path}: has the value {largest}, above {bits} bits; correct 'bits' in the YAML")
    return as_16_bits(image, bits)


def with_channels(image: np.ndarray) -> np.ndarray:
    """Returns (H, W, C), adding the last axis to (H, W), in which OpenCV returns an image with one channel."""
    return image if image.ndim == 3 else image[..., None]


def check_jpeg_channels(path: str | os.PathLike, pixels: PixelFormat) -> None:
    """Raises UserError for a format whose number of channels no JPEG has."""
    if pixels.channels not in (1, 3):
        raise UserError(f"{path}: a JPEG has 3 channels at most, but the data set or model has {pixels.channels}")


def read_reduced(
    path: str | os.PathLike, min_hw: tuple[int, int], pixels: PixelFormat = RGB8
) -> tuple[np.ndarray, tuple[int, int]]:
    """Reads an image as `read_image` does, possibly reduced; returns it with its full upright height and width.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size (by its decoder, from fewer frequencies of each block) if that is
    at least ``min_hw`` and the padding of the last row or column is at most half a pixel.
    """
    encoded = EncodedImage.read(path)
    if encoded.header.kind != "jpeg":
        image = decode_image(encoded, pixels=pixels)
        height, width = image.shape[:2]
        return image, (height, width)
    full_hw = encoded.header.upright_hw
    flag = cv2.IMREAD_COLOR_RGB
    for divisor, reduced_flag in _REDUCED.items():
        is_large_enough = all(-(-side // divisor) >= smallest for side, smallest in zip(full_hw, min_hw))
        if is_large_enough and all(2 * (-side % divisor) <= divisor for side in full_hw):
            flag = reduced_flag
    return decode_image(encoded, jpeg_flag=flag, pixels=pixels), full_hw


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
        image, full_hw = read_reduced(path, (min_h, min_w), pixels)
    except UserError as error:
        raise UserError(f"{error}; restore or remove it") from None
    if full_hw != tuple(image_hw):
        raise UserError(
            f"{path}: is {full_hw[1]}x{full_hw[0]} pixels but was {image_hw[1]}x{image_hw[0]} when the data "
            "set was indexed; it changed during the run"
        )
    if antialias and image.shape[:2] == full_hw:
        return resize(image, width, height)
    if image.shape[:2] == (height, width):
        return image
    return with_channels(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR))


def resize(image: np.ndarray, width: int, height: int, target: np.ndarray | None = None) -> np.ndarray:
    """Resizes ``image`` (h, w, C) bilinearly, or by area if both sides shrink to half or less.

    Bilinear interpolation would cause aliasing then. ``target``: (height, width, C) to write into and return; without a
    target, the result may be ``image`` itself.
    """
    if image.shape[:2] == (height, width):
        if target is None:
            return image
        target[:] = image
        return target
    if image.shape[0] >= 2 * height and image.shape[1] >= 2 * width:
        return resize_area(image, (width, height), target)
    return with_channels(cv2.resize(image, (width, height), dst=target, interpolation=cv2.INTER_LINEAR))


def resize_area(image: np.ndarray, size_wh: tuple[int, int], target: np.ndarray | None = None) -> np.ndarray:
    """Shrinks ``image`` (h, w, C), so that each pixel is the mean of the area it covers, into ``target`` if given."""
    if image.shape[2] <= 4:
        return with_channels(cv2.resize(image, size_wh, dst=target, interpolation=cv2.INTER_AREA))
    # OpenCV resizes at most four channels at once.
    groups = (np.ascontiguousarray(image[..., first : first + 4]) for first in range(0, image.shape[2], 4))
    resized = [with_channels(cv2.resize(group, size_wh, interpolation=cv2.INTER_AREA)) for group in groups]
    return np.concatenate(resized, 2, out=target)
