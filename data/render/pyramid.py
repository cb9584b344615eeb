"""Mipmaps: smaller copies of source images, which the torch renderer reads (Williams, "Pyramidal parametrics", 1983).

The renderer reads four neighboring pixels, so a source that shrinks to half or less is read from a smaller copy of
itself. Level l of an image of h x w pixels has ``max(h >> l, 1)`` x ``max(w >> l, 1)`` pixels, each the average of the
area that it covers. A device cache holds all levels (`PyramidLayout`); without one, the worker that reads the image
computes the level, and sends the part that is visible (`PackedPixels`).

Legend: N images, M patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from data.images.reduce import resize_area

MAX_LEVEL = 5


def level_sizes(image_hw: np.ndarray, level: int | np.ndarray) -> np.ndarray:
    """Returns the sizes int64 (N, 2) at ``level``, an int or int (N,), of images of the sizes ``image_hw`` (N, 2)."""
    shift = np.asarray(level, np.int64)[..., None]
    return np.maximum(np.asarray(image_hw, np.int64) >> shift, 1)


def level_image(image: np.ndarray, level: int) -> np.ndarray:
    """Returns the copy of an image (h, w, C) at ``level``; at level 0 the image itself."""
    if level == 0:
        return image
    height, width = (max(side >> level, 1) for side in image.shape[:2])
    return resize_area(image, (width, height))


def levels_for(matrices: np.ndarray, regions: np.ndarray) -> np.ndarray:
    """Returns the coarsest level at which the middle of each region is at least as fine as the canvas: int64 (M,).

    See `Placement` for the arguments.
    """
    centers = (regions[:, :2] + regions[:, 2:]) / 2
    depth = np.einsum("mi,mi->m", matrices[:, 2, :2], centers) + matrices[:, 2, 2]
    area_gain = np.abs(np.linalg.det(matrices)) / np.maximum(np.abs(depth), 1e-9) ** 3  # determinant of the Jacobian
    halvings = -0.5 * np.log2(np.maximum(area_gain, 1e-12))
    return np.floor(halvings + 1e-6).clip(0, MAX_LEVEL).astype(np.int64)


class Patches(NamedTuple):
    """The pixels that each patch reads from its image."""

    index: np.ndarray  # type: ignore[assignment]  # int64 (M,) sample; hides tuple.index, which nobody calls
    level: np.ndarray  # int64 (M,)
    box: np.ndarray  # int64 (M, 4) x1, y1, x2, y2, in pixels of the level


@dataclass(frozen=True)
class PyramidLayout:
    """Positions of all levels of all images in a flat array of pixels: by image, levels from fine to coarse."""

    source_hw: np.ndarray  # int (N, 2)
    starts: np.ndarray  # int64 (N + 1,), pixels

    @classmethod
    def of(cls, source_hw: np.ndarray) -> PyramidLayout:
        """Lays out images of the sizes ``source_hw`` (N, 2)."""
        pixels = sum(level_sizes(source_hw, level).prod(1) for level in range(MAX_LEVEL + 1))
        return cls(source_hw, np.concatenate([[0], np.cumsum(pixels, dtype=np.int64)]))

    @property
    def pixels(self) -> int:
        """Number of pixels of all images at all levels."""
        return int(self.starts[-1])

    def locate(self, patches: Patches) -> np.ndarray:
        """Returns addresses in an array of this layout (a device cache); see `data.render.table.PixelSource.locate`."""
        image_hw = self.source_hw[patches.index]
        sizes = np.stack([level_sizes(image_hw, level).prod(1) for level in range(MAX_LEVEL)], 1)
        finer = np.arange(MAX_LEVEL) < patches.level[:, None]
        starts = self.starts[patches.index] + (sizes * finer).sum(1)
        return np.stack([starts, level_sizes(image_hw, patches.level)[:, 1]], 1)

    def flat(self, image: np.ndarray) -> np.ndarray:
        """Returns all levels of one image, (P, C)."""
        levels = (level_image(image, level) for level in range(MAX_LEVEL + 1))
        return np.concatenate([level.reshape(-1, image.shape[2]) for level in levels])


class PackedPixels:
    """Source pixels that travel with the plans of a batch, from the worker to the device.

    After `locate`, ``pixels`` (P, C) holds the visible area of each patch's image, one after another.
    """

    def __init__(self, load: Callable[[int], np.ndarray], allocate: Callable[[int], Tensor]) -> None:
        """
        Args:
            load: maps an image index to its source image, (h, w, C).
            allocate: returns memory for a number of pixels, uninitialized, (P, C).
        """
        self._load = load
        self._allocate = allocate
        self.pixels = allocate(1).zero_()  # the renderer reads a pixel even without patches

    def locate(self, patches: Patches) -> np.ndarray:
        """Packs the pixels of ``patches``; returns their addresses, see `data.render.table.PixelSource.locate`."""
        sizes = patches.box[:, 2:] - patches.box[:, :2]
        starts = np.concatenate([[0], np.cumsum(sizes.prod(1))]).astype(np.int64)
        self.pixels = self._allocate(int(starts[-1]))
        flat = self.pixels.numpy()
        for number, (index, level) in enumerate(zip(patches.index.tolist(), patches.level.tolist())):
            x1, y1, x2, y2 = patches.box[number].tolist()
            out = flat[starts[number] : starts[number + 1]].reshape(y2 - y1, x2 - x1, -1)
            out[:] = level_image(self._load(index), level)[y1:y2, x1:x2]
        origin = starts[:-1] - patches.box[:, 1] * sizes[:, 0] - patches.box[:, 0]
        return np.stack([origin, sizes[:, 0]], 1)
