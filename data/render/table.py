"""The plans of a batch as a table of numbers, which is all that the torch renderer needs besides source pixels.

Legend: N source images, B images of the batch, L layers (the first layer of each image, then the second layers of mixed
images), K slots per layer (1, or 4 if there is a mosaic), M patches in all.

Coordinates: "canvas" and "source" as in `data.augment.transforms`, of the full source image. A patch is read from a
level of `pyramid`, a smaller copy of its source; "level" means continuous coordinates of that copy, where pixel i
covers [i, i + 1), and "centers" means level coordinates minus 0.5, so that integers are pixel centers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from data.augment.plan import Layer, SamplePlan
from data.render.pyramid import Patches, level_sizes, levels_for

MOSAIC_SLOTS = 4
# Widens regions, so that rounding leaves no pixel uncovered between two patches. Always less than half a canvas pixel.
EDGE_TOLERANCE = 1e-3
VISIBLE_MARGIN = 2  # source pixels around the visible area, for neighbors and rounding


class Column:
    """Columns of `RenderTable.geometry`."""

    MATRIX = slice(0, 9)  # canvas to level, by rows
    REGION = slice(9, 13)  # x1, y1, x2, y2 of the region that the patch shows, level
    CLAMP = slice(13, 17)  # x1, y1, x2, y2 of its first and last pixel, to which coordinates are clamped, centers
    COUNT = 17


@dataclass(frozen=True, slots=True)
class RenderTable:
    """Everything that is painted in a batch. An unused slot has an empty region."""

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

    They are in a device cache (`PyramidLayout`), or sent with the batch (`PackedPixels`).
    """

    def locate(self, patches: Patches) -> np.ndarray:
        """Returns the addresses of ``patches``, int64 (M, 2), in the form of `RenderTable.address`."""


def build_table(
    plans: Sequence[SamplePlan], canvas_hw: tuple[int, int], source_hw: np.ndarray, sources: PixelSource
) -> RenderTable:
    """Builds the table for plans with the canvas size ``canvas_hw``.

    The plans were drawn for source images with the sizes ``source_hw``, int (N, 2).
    """
    mixed = [number for number, plan in enumerate(plans) if len(plan.layers) == 2]
    layers = [plan.layers[0] for plan in plans] + [plans[number].layers[1] for number in mixed]
    geometry, address = _place_patches(layers, canvas_hw, source_hw, sources)
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


def _place_patches(
    layers: Sequence[Layer], canvas_hw: tuple[int, int], source_hw: np.ndarray, sources: PixelSource
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of `RenderTable.geometry` and `RenderTable.address` for ``layers``."""
    slots = MOSAIC_SLOTS if any(len(layer.patches) > 1 for layer in layers) else 1
    geometry = np.zeros((len(layers), slots, Column.COUNT), np.float32)
    geometry[..., Column.MATRIX] = np.eye(3, dtype=np.float32).reshape(-1)
    geometry[..., Column.REGION] = (1, 1, 0, 0)  # empty
    address = np.zeros((len(layers), slots, 2), np.int64)
    positions = [(number, slot) for number, layer in enumerate(layers) for slot in range(len(layer.patches))]
    if positions:
        layer_of, slot_of = np.array(positions).T
        patches = _patches_at_levels(layers, source_hw, canvas_hw)
        matrices = patches.canvas_to_level.reshape(-1, 9)
        geometry[layer_of, slot_of] = np.concatenate([matrices, patches.region, patches.clamp], 1)
        address[layer_of, slot_of] = sources.locate(patches.pixels)
    return geometry, address


class _LevelPatches(NamedTuple):
    """The patches of a batch, each in the coordinates of the level that it reads."""

    canvas_to_level: np.ndarray  # float64 (M, 3, 3)
    region: np.ndarray  # float64 (M, 4), `Column.REGION`
    clamp: np.ndarray  # float64 (M, 4), `Column.CLAMP`
    pixels: Patches


def _patches_at_levels(layers: Sequence[Layer], source_hw: np.ndarray, canvas_hw: tuple[int, int]) -> _LevelPatches:
    """Chooses the level that each patch of the layers reads, and converts the patch's region and matrix from the source
    to that level."""
    patches = [patch for layer in layers for patch in layer.patches]
    index = np.array([patch.index for patch in patches])
    regions = np.array([patch.region for patch in patches], np.float64)
    matrices = np.stack([patch.matrix for patch in patches])
    levels = levels_for(matrices, regions)
    level_wh = level_sizes(source_hw[index], levels)[:, ::-1].astype(np.float64)
    gain_xy = level_wh / source_hw[index][:, ::-1]
    level_regions = regions * np.tile(gain_xy, 2)
    canvas_to_level = _canvas_to_level(matrices, gain_xy)
    clamp = _pixel_centers(level_regions, level_wh)
    return _LevelPatches(
        canvas_to_level=canvas_to_level,
        region=level_regions + np.array([-1, -1, 1, 1]) * EDGE_TOLERANCE,
        clamp=clamp,
        pixels=Patches(index, levels, _visible_pixels(clamp, canvas_to_level, canvas_hw)),
    )


def _pixel_centers(regions: np.ndarray, level_wh: np.ndarray) -> np.ndarray:
    """Converts regions (M, 4) on levels of the sizes ``level_wh`` (M, 2) to the centers of their first and last pixels,
    keeping at least one pixel: float64 (M, 4)."""
    first = np.minimum(regions[:, :2], level_wh - 1)
    last = np.clip(regions[:, 2:] - 1, first, level_wh - 1)
    return np.concatenate([first, last], 1)


def _canvas_to_level(matrices: np.ndarray, gain_xy: np.ndarray) -> np.ndarray:
    """Returns the matrices (M, 3, 3) from the canvas to the levels that patches read.

    ``matrices``: (M, 3, 3), from full images to the canvas. ``gain_xy``: (M, 2), sizes of the levels relative to full
    images.
    """
    canvas_to_level = np.linalg.inv(matrices)
    canvas_to_level[:, :2] *= gain_xy[:, :, None]
    canvas_to_level[_is_affine(matrices), 2] = (0, 0, 1)  # exactly, in spite of rounding
    return canvas_to_level


def _is_affine(matrices: np.ndarray) -> np.ndarray:
    """Returns which matrices (M, 3, 3) have no perspective, bool (M,)."""
    return (matrices[:, 2, :2] == 0).all(1)


def _visible_pixels(clamp: np.ndarray, canvas_to_level: np.ndarray, canvas_hw: tuple[int, int]) -> np.ndarray:
    """Returns the pixels of levels that the canvas can show, with a margin: int64 (M, 4) of x1, y1, x2, y2.

    With perspective, these are all pixels of the patch. A patch that reaches the canvas only by rounding keeps one
    pixel. ``clamp``: (M, 4), `Column.CLAMP`.
    """
    height, width = canvas_hw
    canvas_corners = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], np.float64)
    corners = np.einsum("mij,cj->mci", canvas_to_level, canvas_corners)[..., :2]  # (M, 4, 2), on the level
    visible_low = corners.min(1) - VISIBLE_MARGIN
    visible_high = corners.max(1) + VISIBLE_MARGIN
    has_perspective = ~_is_affine(canvas_to_level)
    visible_low[has_perspective] = -np.inf
    visible_high[has_perspective] = np.inf
    patch_low = np.floor(clamp[:, :2])
    patch_high = np.ceil(clamp[:, 2:]) + 1
    low = np.clip(np.floor(visible_low), patch_low, patch_high - 1)
    high = np.clip(np.ceil(visible_high), low + 1, patch_high)
    return np.concatenate([low, high], 1).astype(np.int64)
