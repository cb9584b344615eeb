"""Resizes images of any number of channels."""

from __future__ import annotations

import cv2
import numpy as np

from data.image_io.channels import with_channels


def resize_area(image: np.ndarray, size_wh: tuple[int, int], target: np.ndarray | None = None) -> np.ndarray:
    """Shrinks ``image`` (h, w, C), so that each pixel is the mean of the area it covers, into ``target`` if given."""
    if image.shape[2] <= 4:
        return with_channels(cv2.resize(image, size_wh, dst=target, interpolation=cv2.INTER_AREA))
    # OpenCV resizes at most four channels at once.
    groups = (np.ascontiguousarray(image[..., first : first + 4]) for first in range(0, image.shape[2], 4))
    resized = [with_channels(cv2.resize(group, size_wh, interpolation=cv2.INTER_AREA)) for group in groups]
    return np.concatenate(resized, 2, out=target)


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
