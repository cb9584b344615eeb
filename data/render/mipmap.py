"""Source images at halved sizes, for the torch renderer: it reads four neighbouring pixels, so a source that is to
shrink to half or less is read from a smaller copy of itself (Williams, "Pyramidal parametrics", SIGGRAPH 1983).

Level l of an image of h x w pixels has ``max(h >> l, 1)`` x ``max(w >> l, 1)``, each averaged over the area that it
stands for. A device cache holds all levels; without one the level wanted is made where the image is read. Both come
from `level_image`, so where pixels are kept changes none.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

MAX_LEVEL = 5


def level_sizes(image_hw: np.ndarray, level: int | np.ndarray) -> np.ndarray:
    """Heights and widths int64 (N, 2) at ``level`` (one, or one an image) of images (N, 2)."""
    shift = np.asarray(level, np.int64)[..., None]
    return np.maximum(np.asarray(image_hw, np.int64) >> shift, 1)


def level_image(image: np.ndarray, level: int) -> np.ndarray:
    """uint8 (h, w, 3) to its copy at ``level``; the image itself at level 0."""
    if level == 0:
        return image
    height, width = (max(side >> level, 1) for side in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)


def levels_for(matrices: np.ndarray, regions: np.ndarray) -> np.ndarray:
    """int64 (T,): the level at which a region's middle is still at least as fine as the canvas.

    Args:
        matrices: (T, 3, 3) source to canvas.
        regions: (T, 4) x1, y1, x2, y2 in source pixels.
    """
    centres = (regions[:, :2] + regions[:, 2:]) / 2
    depth = np.einsum("ti,ti->t", matrices[:, 2, :2], centres) + matrices[:, 2, 2]
    area_gain = np.abs(np.linalg.det(matrices)) / np.maximum(np.abs(depth), 1e-9) ** 3  # determinant of the Jacobian
    halvings = -0.5 * np.log2(np.maximum(area_gain, 1e-12))
    return np.floor(halvings + 1e-6).clip(0, MAX_LEVEL).astype(np.int64)


@dataclass(frozen=True)
class PyramidLayout:
    """Where each level of each image begins in a flat array of pixels: images in order, levels from fine to coarse."""

    source_hw: np.ndarray  # int (N, 2)
    starts: np.ndarray  # int64 (N + 1,), pixels

    @classmethod
    def of(cls, source_hw: np.ndarray) -> PyramidLayout:
        pixels = sum(level_sizes(source_hw, level).prod(1) for level in range(MAX_LEVEL + 1))
        return cls(source_hw, np.concatenate([[0], np.cumsum(pixels, dtype=np.int64)]))

    @property
    def pixels(self) -> int:
        return int(self.starts[-1])

    def start_of(self, images: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """int64 (T,): the first pixel of a level of an image."""
        sizes = np.stack([level_sizes(self.source_hw[images], level).prod(1) for level in range(MAX_LEVEL)], 1)
        finer = np.arange(MAX_LEVEL) < levels[:, None]
        return self.starts[images] + (sizes * finer).sum(1)

    def flat(self, image: np.ndarray) -> np.ndarray:
        """uint8 (P, 3): all levels of one image, as they lie in the array."""
        return np.concatenate([level_image(image, level).reshape(-1, 3) for level in range(MAX_LEVEL + 1)])
