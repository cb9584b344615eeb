"""Reads images at reduced sizes: JPEGs by their decoder, and the images of a data set as samples need them."""

from __future__ import annotations

import os

import cv2
import numpy as np

from data.images.decode import EncodedImage, decode_image, with_channels
from utils.errors import UserError
from utils.pixels import RGB8, PixelFormat

# Flags for OpenCV, by the divisor of a JPEG's size.
_REDUCED = {
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | cv2.IMREAD_COLOR_RGB,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | cv2.IMREAD_COLOR_RGB,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_COLOR_RGB,
}


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
