"""Draws sample plans, which determine how training samples are augmented, without reading a pixel.

A plan lists source images, a region of each, and the one matrix that maps the region straight to the output canvas: its
position in the mosaic and all geometric transforms are composed beforehand. The result equals that of the usual two
steps: paste four images onto a canvas of twice the size, then cut out a randomly transformed window.

The plans of a batch are computed together, since a NumPy operation takes about as long for one number as for many. A
plan is bitwise equal in any batch.

Frames: see `data.augment.transforms`. All matrices are float64 (3, 3) and act on continuous pixel coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from data.augment.mosaic import Mosaic, PartnerPool, Placement, choose_mixup, fitted_sizes, place_patches
from data.augment.transforms import (
    ColorJitter,
    GeometricTransform,
    PixelOperation,
    RandomFlip,
    RandomPerspective,
    RandomStreams,
    to_normalized,
    transform_labels,
)
from utils.batches import SampleKey
from utils.config.settings import Hyperparameters, closing_epochs
from utils.rng import Stream, keyed_generator

MIXUP_BETA = 32.0
# In the order of application. A new augmentation of single images is a class and an entry here.
GEOMETRIC: tuple[type[GeometricTransform], ...] = (RandomPerspective, RandomFlip)
PIXEL: tuple[type[PixelOperation], ...] = (ColorJitter,)

Region = tuple[int, int, int, int]  # x1, y1, x2, y2 in source pixels


@dataclass(frozen=True, slots=True)
class Patch:
    """A source image, or a region of it, on the canvas."""

    index: int  # image in the data set
    region: Region  # the region to render
    matrix: np.ndarray  # (3, 3) source to canvas


@dataclass(frozen=True, slots=True)
class Layer:
    """Patches, painted in order on a gray canvas, then pixel operations, each with its parameters (k,)."""

    patches: tuple[Patch, ...]
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
    pool: PartnerPool | None = None,
) -> list[SamplePlan]:
    """Draws the plans of training samples.

    A plan depends only on its key and the other arguments, so it is the same on every rank, in every worker and after a
    restart.

    Args:
        keys: the samples; canvas sizes may differ.
        source_hw: int (N, 2), sizes of all source images as the renderer will read them.
        epochs: length of the whole run; ``hyp.close_mosaic`` and ``hyp.close_scale`` act at its end.
        single_image: whether to omit mosaic and mixup (for rectangular batches, whose canvas fits one image's aspect).
        pool: images for mosaic and mixup of samples without a block; None for all N alike.
    """
    if not keys:
        return []
    pool = pool or PartnerPool(np.ones(len(source_hw)))
    streams = RandomStreams(seed, keys)
    mosaic_epochs = 0 if single_image else epochs - closing_epochs(hyp.close_mosaic, epochs)
    combine = np.array([key.epoch < mosaic_epochs for key in keys])
    mixed, partners = choose_mixup(streams.mixing_uniforms, keys, combine, hyp.mixup, pool)
    streams.mixed = mixed
    drawn = _LayerKeys(
        keys=[*keys, *(keys[n] for n in mixed)],
        images=[*(key.index for key in keys), *partners],
        may_join=combine[[*range(len(keys)), *mixed]],
    )
    layers = _draw_layers(streams, drawn, source_hw, hyp, epochs, pool)
    plans = [SamplePlan(key.canvas_hw, (layer,), 1.0) for key, layer in zip(keys, layers)]
    for n, second in zip(mixed, layers[len(keys) :]):
        rng = keyed_generator(seed, Stream.MIXUP, keys[n].epoch, keys[n].position)
        plans[n] = SamplePlan(keys[n].canvas_hw, (layers[n], second), float(rng.beta(MIXUP_BETA, MIXUP_BETA)))
    return plans


class _LayerKeys(NamedTuple):
    """What layers are drawn for: L of them, the first ones of all samples, then the second ones."""

    keys: list[SampleKey]
    images: list[int]  # main image of each layer
    may_join: np.ndarray  # bool (L,), whether a layer may be a mosaic


def _draw_layers(
    streams: RandomStreams,
    drawn: _LayerKeys,
    source_hw: np.ndarray,
    hyp: Hyperparameters,
    epochs: int,
    pool: PartnerPool,
) -> list[Layer]:
    """Draws the layers: their images, where these are on the canvas, and the parameters of pixel operations."""
    mosaic = Mosaic(hyp)
    members = mosaic.members(streams.layer_uniforms(mosaic), drawn.keys, drawn.images, drawn.may_join, pool)
    canvas_hw = np.array([key.canvas_hw for key in drawn.keys])
    closing = closing_epochs(hyp.close_scale, epochs)
    jitter = np.array([min((epochs - key.epoch) / (closing + 1), 1.0) for key in drawn.keys])
    placed = _place(streams, mosaic, members, jitter, source_hw, canvas_hw[:, ::-1].astype(np.float64))
    operations = [operation for operation in (kind(hyp) for kind in PIXEL) if operation.is_active]
    parameters = [operation.parameters(streams.layer_uniforms(operation), canvas_hw) for operation in operations]
    patches = iter(zip(placed.is_seen.tolist(), placed.region.tolist(), placed.matrix))
    layers = []
    for number, images in enumerate(members):
        visible = tuple(
            Patch(image, (x1, y1, x2, y2), matrix)
            for image, (is_seen, (x1, y1, x2, y2), matrix) in zip(images, patches)
            if is_seen
        )
        layer_operations = tuple((operation, rows[number]) for operation, rows in zip(operations, parameters))
        layers.append(Layer(visible, layer_operations))
    return layers


def _place(
    streams: RandomStreams,
    mosaic: Mosaic,
    members: Sequence[Sequence[int]],
    jitter: np.ndarray,
    source_hw: np.ndarray,
    canvas_wh: np.ndarray,
) -> Placement:
    """Places all patches of the layers, whose images are ``members``, in their order. ``jitter``: see
    `GeometricTransform.closing`."""
    counts = np.array([len(images) for images in members])
    is_mosaic = counts > 1
    frame_wh = np.where(is_mosaic[:, None], 2 * canvas_wh, canvas_wh)
    transforms = [kind(mosaic.hyp) for kind in GEOMETRIC]
    outer = _compose(transforms, streams, jitter, frame_wh, canvas_wh)
    layer = np.repeat(np.arange(len(members)), counts)
    slots = np.concatenate([np.arange(count) for count in counts])
    sources = source_hw[np.array([i for images in members for i in images])]
    sizes = fitted_sizes(sources, canvas_wh[layer])
    uniforms = streams.layer_uniforms(mosaic)[layer]
    corners = mosaic.corners(uniforms, slots, is_mosaic[layer], sizes, canvas_wh[layer])
    return place_patches(sources, corners, sizes, frame_wh[layer], outer[layer], canvas_wh[layer])


def _compose(
    transforms: Sequence[GeometricTransform],
    streams: RandomStreams,
    jitter: np.ndarray,
    frame_wh: np.ndarray,
    canvas_wh: np.ndarray,
) -> np.ndarray:
    """Returns the product of the transforms' matrices for each layer, (L, 3, 3), from its frame to its canvas."""
    product = np.tile(np.eye(3), (len(frame_wh), 1, 1))
    from_wh = frame_wh
    for transform in transforms:
        uniforms = transform.closing(streams.layer_uniforms(transform), jitter)
        # Not `@`, whose rounding may depend on the number of layers.
        after = transform.matrices(uniforms, from_wh, canvas_wh)[:, :, :, None]
        before = product[:, None, :, :]
        product = after[:, :, 0] * before[:, :, 0] + after[:, :, 1] * before[:, :, 1] + after[:, :, 2] * before[:, :, 2]
        from_wh = canvas_wh
    return product


def plan_labels(
    plans: Sequence[SamplePlan], source_hw: np.ndarray, labels_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> list[np.ndarray]:
    """Returns the labels of each plan, float32 (n, 5): class, cx, cy, w, h normalized to the canvas.

    ``source_hw``: as for `draw_plans`; ``labels_of``: see `DatasetIndex.labels_of`.
    """
    patches_of = [[patch for layer in plan.layers for patch in layer.patches] for plan in plans]
    patches = list(chain.from_iterable(patches_of))
    counts = [len(members) for members in patches_of]
    if not patches:
        return [np.zeros((0, 5), np.float32) for _ in plans]
    images = np.array([patch.index for patch in patches])
    canvas_hw = np.repeat([plan.canvas_hw for plan in plans], counts, 0)
    moved, patch = transform_labels(
        *labels_of(images),
        source_hw=source_hw[images],
        regions=np.array([patch.region for patch in patches]),
        matrices=np.array([patch.matrix for patch in patches]),
        canvas_hw=canvas_hw,
    )
    ends = np.searchsorted(patch, np.cumsum(counts))
    return np.split(to_normalized(moved, canvas_hw[patch]), ends[:-1])
