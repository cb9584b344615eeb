"""The plans of a batch as a table of numbers: all that the torch renderer needs besides source pixels.

The renderer reads four neighboring pixels, so a source that shrinks to half or less is read from a smaller copy
of itself, a mipmap (Williams, "Pyramidal parametrics", SIGGRAPH 1983). Level l of an image of h x w pixels has
``max(h >> l, 1)`` x ``max(w >> l, 1)`` pixels, each the average of the area that it covers. A device cache holds all
levels; without one, the worker that reads the image computes the level.

Legend: B images, L layers (the first one of each image, then the second ones of those that are mixed), K slots per
layer (1, or 4 if there is a mosaic), M patches in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from data.augment.plan import Layer, SamplePlan
from data.image_io.channels import resize_area

MAX_LEVEL = 5


def level_sizes(image_hw: np.ndarray, level: int | np.ndarray) -> np.ndarray:
    """Returns sizes int64 (N, 2) at ``level``, an int or int (N,), of images with the sizes ``image_hw`` (N, 2)."""
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
    depth = np.einsum("ti,ti->t", matrices[:, 2, :2], centers) + matrices[:, 2, 2]
    area_gain = np.abs(np.linalg.det(matrices)) / np.maximum(np.abs(depth), 1e-9) ** 3  # determinant of the Jacobian
    halvings = -0.5 * np.log2(np.maximum(area_gain, 1e-12))
    return np.floor(halvings + 1e-6).clip(0, MAX_LEVEL).astype(np.int64)


class Patches(NamedTuple):
    """The pixels that each patch reads from its image."""

    index: np.ndarray  # type: ignore[assignment]  # int64 (M,) image; hides tuple.index, which nobody calls
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
        """Returns addresses in an array of this layout (a device cache); see `PixelSource.locate`."""
        image_hw = self.source_hw[patches.index]
        sizes = np.stack([level_sizes(image_hw, level).prod(1) for level in range(MAX_LEVEL)], 1)
        finer = np.arange(MAX_LEVEL) < patches.level[:, None]
        starts = self.starts[patches.index] + (sizes * finer).sum(1)
        return np.stack([starts, level_sizes(image_hw, patches.level)[:, 1]], 1)

    def flat(self, image: np.ndarray) -> np.ndarray:
        """Returns all levels of one image, (P, C)."""
        levels = (level_image(image, level) for level in range(MAX_LEVEL + 1))
        return np.concatenate([level.reshape(-1, image.shape[2]) for level in levels])


MOSAIC_SLOTS = 4
# Widens regions, so that rounding leaves no pixel uncovered between two patches. Always less than half a canvas pixel.
EDGE_TOLERANCE = 1e-3
VISIBLE_MARGIN = 2  # source pixels around the visible area, for neighbors and rounding


class Column:
    """Columns of `RenderTable.geometry`."""

    MATRIX = slice(0, 9)  # canvas to source, by rows, in pixels of the level to read
    INSIDE = slice(9, 13)  # x1, y1, x2, y2 of the region
    READ = slice(13, 17)  # the same for pixel centers, to which coordinates are clamped
    COUNT = 17


@dataclass(frozen=True, slots=True)
class RenderTable:
    """All that is painted in a batch. An unused slot has an empty region."""

    canvas_hw: tuple[int, int]
    images: int  # B
    geometry: Tensor  # float32 (L, K, 17), see `Column`
    address: Tensor  # int64 (L, K, 2): address of pixel (0, 0) in the flat source pixels, and pixels per row
    operations: tuple[Callable[[Tensor, Tensor], Tensor], ...]  # `PixelOperation.apply_torch`, in order
    parameters: tuple[Tensor, ...]  # float32 (L, k) of each of them
    mixed: Tensor  # int64 (L - B,): image into which a second layer is mixed
    mix: Tensor  # float32 (L - B,): weight of that image's first layer


class PixelSource(Protocol):
    """Finds the source pixels of patches.

    They are in a device cache (`PyramidLayout`), or sent with the batch (`data.loading.packed_pixels`).
    """

    def locate(self, patches: Patches) -> np.ndarray:
        """Returns the addresses of ``patches``, int64 (M, 2), as `RenderTable.address` has them."""


def build_table(
    plans: Sequence[SamplePlan], canvas_hw: tuple[int, int], source_hw: np.ndarray, sources: PixelSource
) -> RenderTable:
    """Builds the table for plans with the canvas size ``canvas_hw``.

    The plans were drawn for source images with the sizes ``source_hw``, int (N, 2).
    """
    mixed = [number for number, plan in enumerate(plans) if len(plan.layers) == 2]
    layers = [plan.layers[0] for plan in plans] + [plans[number].layers[1] for number in mixed]
    slots = MOSAIC_SLOTS if any(len(layer.patches) > 1 for layer in layers) else 1
    geometry = np.zeros((len(layers), slots, Column.COUNT), np.float32)
    geometry[..., Column.MATRIX] = np.eye(3, dtype=np.float32).reshape(-1)
    geometry[..., Column.INSIDE] = (1, 1, 0, 0)
    address = np.zeros((len(layers), slots, 2), np.int64)
    if any(layer.patches for layer in layers):
        layer_of, slot_of = np.array([(n, k) for n, layer in enumerate(layers) for k in range(len(layer.patches))]).T
        inverse, inside, read, patches = _measure(layers, source_hw, canvas_hw)
        geometry[layer_of, slot_of] = np.concatenate([inverse.reshape(-1, 9), inside, read], 1)
        address[layer_of, slot_of] = sources.locate(patches)
    parameters = ([values for _, values in layer.operations] for layer in layers)
    return RenderTable(
        canvas_hw=canvas_hw,
        images=len(plans),
        geometry=torch.from_numpy(geometry),
        address=torch.from_numpy(address),
        operations=tuple(operation.apply_torch for operation, _ in layers[0].operations) if layers else (),
        parameters=tuple(torch.from_numpy(np.array(values, np.float32)) for values in zip(*parameters, strict=True)),
        mixed=torch.tensor(mixed, dtype=torch.int64),
        mix=torch.tensor([plans[number].mix for number in mixed], dtype=torch.float32),
    )


def _measure(
    layers: Sequence[Layer], source_hw: np.ndarray, canvas_hw: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Patches]:
    """Computes canvas-to-source matrices (M, 3, 3), the columns INSIDE and READ (M, 4), and the pixels to read.

    All are in pixels of each patch's level.
    """
    patches = [patch for layer in layers for patch in layer.patches]
    index = np.array([patch.index for patch in patches])
    regions = np.array([patch.region for patch in patches], np.float64)
    matrices = np.stack([patch.matrix for patch in patches])
    levels = levels_for(matrices, regions)
    full = source_hw[index][:, ::-1].astype(np.float64)
    size = level_sizes(source_hw[index], levels)[:, ::-1].astype(np.float64)
    gain = size / full
    to_level = np.zeros_like(matrices)
    to_level[:, [0, 1, 2], [0, 1, 2]] = np.concatenate([gain, np.ones((len(gain), 1))], 1)
    inverse = to_level @ np.linalg.inv(matrices)
    is_affine = (matrices[:, 2, :2] == 0).all(1)
    inverse[is_affine, 2] = (0, 0, 1)
    corners = regions * np.tile(gain, 2)
    first = np.minimum(corners[:, :2], size - 1)
    last = np.clip(corners[:, 2:] - 1, first, size - 1)
    box = np.concatenate([np.floor(first), np.ceil(last) + 1], 1)
    # The area of each source that the canvas can show, with a margin; unbounded under perspective.
    height, width = canvas_hw
    canvas = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], np.float64)
    canvas_corners = np.einsum("tij,cj->tci", inverse, canvas)[..., :2]
    visible = np.concatenate([canvas_corners.min(1) - VISIBLE_MARGIN, canvas_corners.max(1) + VISIBLE_MARGIN], 1)
    visible[~is_affine] = (-np.inf, -np.inf, np.inf, np.inf)
    # A patch that reaches the canvas only by rounding keeps one pixel.
    box[:, :2] = np.clip(np.floor(visible[:, :2]), box[:, :2], box[:, 2:] - 1)
    box[:, 2:] = np.clip(np.ceil(visible[:, 2:]), box[:, :2] + 1, box[:, 2:])
    tolerance = np.array([-1, -1, 1, 1]) * EDGE_TOLERANCE
    return inverse, corners + tolerance, np.concatenate([first, last], 1), Patches(index, levels, box.astype(np.int64))
