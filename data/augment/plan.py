"""Sample plans: augmentation parameters, which depend on the sample keys alone. No pixel is read here.

A plan says which source images appear, which part of each, and the one matrix that takes it straight to the output
canvas: its position in the mosaic and all geometric transforms are composed beforehand. This equals the classic two
steps: paste four images onto a canvas of twice the size, then cut out a randomly transformed window.

The plans of a batch are computed together, since a numpy operation takes about as long for one number as for many. A
plan is bitwise equal in any batch.

Frames: see `data.augment.transforms`. All matrices are float64 (3, 3) and act on continuous pixel coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from data.augment.mosaic import Mosaic, TilePlacement, choose_mixup, fitted_sizes, mixup_ratio, place_tiles
from data.augment.transforms import (
    ColorJitter,
    Draws,
    GeometricTransform,
    PixelOperation,
    RandomFlip,
    RandomPerspective,
    composed,
    to_normalized,
    transform_labels,
)
from utils.config.settings import Hyperparameters, closing_epochs
from utils.structures import SampleKey

# In the order in which they act. A new augmentation is a class and an entry here.
GEOMETRIC: tuple[type[GeometricTransform], ...] = (RandomPerspective, RandomFlip)
PIXEL: tuple[type[PixelOperation], ...] = (ColorJitter,)

Region = tuple[int, int, int, int]  # x1, y1, x2, y2 in source pixels


@dataclass(frozen=True, slots=True)
class Tile:
    """One source image on the canvas."""

    index: int  # image in the data set
    region: Region  # the part that is rendered
    matrix: np.ndarray  # (3, 3) source to canvas


@dataclass(frozen=True, slots=True)
class Layer:
    """Tiles in painting order over a gray canvas, then pixel operations, each with its parameters (k,)."""

    tiles: tuple[Tile, ...]
    operations: tuple[tuple[PixelOperation, np.ndarray], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """One layer, or two to be mixed."""

    canvas_hw: tuple[int, int]
    layers: tuple[Layer, ...]
    mix: float  # weight of the first layer


def draw_plans(
    keys: Sequence[SampleKey],
    *,
    source_hw: np.ndarray,
    hyp: Hyperparameters,
    seed: int,
    epochs: int,
    single_image: bool = False,
) -> list[SamplePlan]:
    """The plans of training samples. Each depends only on its key and the other arguments, so it is the same on every
    rank, in every worker and after a restart.

    Args:
        keys: the samples; canvas sizes may differ.
        source_hw: int (N, 2), height and width of every source image that the renderer will read.
        hyp: probabilities and ranges.
        seed: of the run.
        epochs: of the whole run; ``hyp.close_mosaic`` and ``hyp.close_scale`` act at its end.
        single_image: never apply mosaic or mixup (for rectangular batches, whose canvas fits the aspect of one image).
    """
    if not keys:
        return []
    draws = Draws(seed, keys)
    mosaic_epochs = 0 if single_image else epochs - closing_epochs(hyp.close_mosaic, epochs)
    combine = np.array([key.epoch < mosaic_epochs for key in keys])
    mixed, partners = choose_mixup(draws.of_mixing, keys, combine, hyp.mixup, len(source_hw))
    draws.mixed = mixed
    of_layers = [*keys, *(keys[n] for n in mixed)]
    indices = [*(key.index for key in keys), *partners]
    layers = _draw_layers(draws, of_layers, indices, combine[[*range(len(keys)), *mixed]], source_hw, hyp, epochs)
    plans = [SamplePlan(key.canvas_hw, (layer,), 1.0) for key, layer in zip(keys, layers)]
    for n, second in zip(mixed, layers[len(keys) :]):
        plans[n] = SamplePlan(keys[n].canvas_hw, (layers[n], second), mixup_ratio(seed, keys[n]))
    return plans


def _draw_layers(
    draws: Draws,
    keys: Sequence[SampleKey],
    indices: Sequence[int],
    combine: np.ndarray,
    source_hw: np.ndarray,
    hyp: Hyperparameters,
    epochs: int,
) -> list[Layer]:
    """A layer for each key. ``indices``: its main image; ``combine``: whether it may be a mosaic."""
    mosaic = Mosaic(hyp)
    members = mosaic.members(draws.of_layers(mosaic), keys, indices, combine, len(source_hw))
    canvas_hw = np.array([key.canvas_hw for key in keys])
    close_scale = closing_epochs(hyp.close_scale, epochs)
    jitter = np.array([scale_jitter(key.epoch, epochs, close_scale) for key in keys])
    placed = _place(draws, mosaic, members, jitter, source_hw, canvas_hw[:, ::-1].astype(np.float64))
    operations = [operation for kind in PIXEL if (operation := kind(hyp)).is_active]
    parameters = [operation.parameters(draws.of_layers(operation), canvas_hw) for operation in operations]
    tiles = iter(zip(placed.is_seen.tolist(), placed.region.tolist(), placed.matrix))
    layers = []
    for number, images in enumerate(members):
        seen = (Tile(i, tuple(region), matrix) for i, (is_seen, region, matrix) in zip(images, tiles) if is_seen)
        layers.append(Layer(tuple(seen), tuple((o, rows[number]) for o, rows in zip(operations, parameters))))
    return layers


def scale_jitter(epoch: int, epochs: int, close: int) -> float:
    """The range of the scale jitter in ``epoch`` as a fraction of the whole: 1, and over the last ``close`` epochs
    linearly less, toward 0 at the end of the run."""
    return min((epochs - epoch) / (close + 1), 1.0)


def _place(
    draws: Draws,
    mosaic: Mosaic,
    members: Sequence[Sequence[int]],
    jitter: np.ndarray,
    source_hw: np.ndarray,
    canvas_wh: np.ndarray,
) -> TilePlacement:
    """All tiles of layers whose images are ``members``, in their order.

    ``jitter``: float64 (L,), by `scale_jitter`. It shrinks before the run ends, because gray borders, which only shrunk
    images have, tell the model the scale: boxes would be too small on letterboxed images and too large on others
    (compare Touvron et al. 2019, "Fixing the train-test resolution discrepancy").
    """
    counts = np.array([len(images) for images in members])
    is_mosaic = counts > 1
    frame_wh = np.where(is_mosaic[:, None], 2 * canvas_wh, canvas_wh)
    outer, from_wh = np.tile(np.eye(3), (len(members), 1, 1)), frame_wh
    for kind in GEOMETRIC:
        transform = kind(mosaic.hyp)
        u = draws.of_layers(transform)
        if kind is RandomPerspective:
            column = u[:, RandomPerspective.SCALE]  # 0.5, the middle of its range, changes nothing
            u[:, RandomPerspective.SCALE] = np.where(jitter < 1, 0.5 + (column - 0.5) * jitter, column)
        outer = composed(transform.matrices(u, from_wh, canvas_wh), outer)
        from_wh = canvas_wh
    layer = np.repeat(np.arange(len(members)), counts)
    slots = np.concatenate([np.arange(count) for count in counts])
    sources = source_hw[np.array([i for images in members for i in images])]
    sizes = fitted_sizes(sources, canvas_wh[layer])
    u = draws.of_layers(mosaic)[layer]
    corners = mosaic.corners(u, slots, is_mosaic[layer], sizes, canvas_wh[layer])
    return place_tiles(sources, corners, sizes, frame_wh[layer], outer[layer], canvas_wh[layer])


def plan_labels(
    plans: Sequence[SamplePlan],
    source_hw: np.ndarray,
    labels_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> list[np.ndarray]:
    """The labels of each plan, float32 (n, 5): class, cx, cy, w, h normalized to the canvas.

    Args:
        plans: of any canvas sizes.
        source_hw: int (N, 2) of all source images, for which the plans were made.
        labels_of: see `DatasetIndex.labels_of`.
    """
    tiles_of = [[tile for layer in plan.layers for tile in layer.tiles] for plan in plans]
    tiles = list(chain.from_iterable(tiles_of))
    counts = [len(members) for members in tiles_of]
    if not tiles:
        return [np.zeros((0, 5), np.float32) for _ in plans]
    images = np.array([tile.index for tile in tiles])
    canvas_hw = np.repeat([plan.canvas_hw for plan in plans], counts, 0)
    moved, tile = transform_labels(
        *labels_of(images),
        source_hw=source_hw[images],
        regions=np.array([tile.region for tile in tiles]),
        matrices=np.array([tile.matrix for tile in tiles]),
        canvas_hw=canvas_hw,
    )
    ends = np.searchsorted(tile, np.cumsum(counts))
    return np.split(to_normalized(moved, canvas_hw[tile]), ends[:-1])
