"""Draws sample plans, which determine how training samples are augmented, without reading a pixel.

A plan lists source images, a region of each, and the one matrix that maps the region straight to the output canvas: its
position in the mosaic and all geometric transforms are composed beforehand. The result is the same as in the usual two
steps: paste four images onto a canvas of twice the size, then cut out a randomly transformed window.

The plans of a batch are computed together, because a NumPy operation takes about as long for one number as for many. A
plan is bitwise equal in any batch, because the arithmetic is elementwise.

Coordinates and matrices: see `data.augment.transforms`.

Legend: L layers (the first layers of all samples, then the second layers of mixed samples), M patches of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from data.augment.mosaic import Mosaic, PartnerPool, choose_mixup
from data.augment.transforms import (
    Augmentation,
    ColorJitter,
    GeometricTransform,
    PixelOperation,
    RandomFlip,
    RandomPerspective,
    SharedColumns,
    are_axis_aligned,
    project_boxes,
)
from utils.batches import SampleKey
from utils.config.epochs import closing_epochs
from utils.config.settings import Hyperparameters
from utils.rng import Stream, keyed_generator, keyed_uniforms, named_stream

MIXUP_BETA = 32.0
# In the order of application, each with its hyper-parameters. A new augmentation of one image is a class and an entry.
GEOMETRIC: tuple[type[GeometricTransform], ...] = (
    RandomPerspective,  # degrees, translate, scale, shear, perspective
    RandomFlip,  # fliplr, flipud
)
PIXEL: tuple[type[PixelOperation], ...] = (
    ColorJitter,  # hsv_h, hsv_s, hsv_v
)


@dataclass(frozen=True, slots=True)
class Patch:
    """A source image, or a region of it, on the canvas."""

    index: int  # number of the sample: an image or a tile
    region: tuple[int, int, int, int]  # x1, y1, x2, y2 of the region to render, source pixels
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


class SamplePlanner:
    """Draws the plans of a run's training samples.

    A plan depends only on its key and on the arguments here, so it is the same on every rank, in every worker and after
    a restart.
    """

    def __init__(
        self,
        source_hw: np.ndarray,
        hyp: Hyperparameters,
        *,
        seed: int,
        single_image: bool = False,
        is_rgb: bool = True,
        pool: PartnerPool | None = None,
    ) -> None:
        """
        Args:
            source_hw: int (N, 2), sizes of all source images as the renderer will read them.
            single_image: whether to omit mosaic and mixup (for rectangular batches, whose canvas fits one image's
                aspect).
            is_rgb: whether images have colors; otherwise operations with ``color_settings`` are left out.
            pool: images for mosaic and mixup of samples without a block; None for all N alike.
        """
        self._source_hw = source_hw
        self._hyp = hyp
        self._seed = seed
        self._single_image = single_image
        self._pool = pool or PartnerPool(np.ones(len(source_hw)))
        self._mosaic = Mosaic(hyp)
        self._transforms = [kind(hyp) for kind in GEOMETRIC]
        operations = [kind(hyp) for kind in PIXEL if is_rgb or not kind.color_settings]
        self._operations = [operation for operation in operations if operation.is_active]

    def draw(self, keys: Sequence[SampleKey], run_epochs: int) -> list[SamplePlan]:
        """Draws the plans of samples, whose canvas sizes may differ.

        ``run_epochs``: length of the whole run; ``hyp.close_mosaic`` and ``hyp.close_scale`` act at its end.
        """
        if not keys:
            return []
        positions = [(key.epoch, key.position) for key in keys]
        shared = keyed_uniforms(self._seed, Stream.AUGMENT, positions, SharedColumns.COUNT)
        combining_epochs = 0 if self._single_image else run_epochs - closing_epochs(self._hyp.close_mosaic, run_epochs)
        may_combine = np.array([key.epoch < combining_epochs for key in keys])
        mixed, partners = choose_mixup(
            shared[:, SharedColumns.MIXUP], keys, allow_mixup=may_combine, probability=self._hyp.mixup, pool=self._pool
        )
        layers = self._draw_layers(
            _LayerRandomness(self._seed, positions, shared, mixed),
            [*keys, *(keys[n] for n in mixed)],
            main_images=[*(key.index for key in keys), *partners],
            may_combine=may_combine[[*range(len(keys)), *mixed]],
            run_epochs=run_epochs,
        )
        plans = [SamplePlan(key.canvas_hw, (layer,), 1.0) for key, layer in zip(keys, layers)]
        for n, second in zip(mixed, layers[len(keys) :]):
            rng = keyed_generator(self._seed, Stream.MIXUP, keys[n].epoch, keys[n].position)
            plans[n] = SamplePlan(keys[n].canvas_hw, (layers[n], second), float(rng.beta(MIXUP_BETA, MIXUP_BETA)))
        return plans

    def _draw_layers(
        self,
        randomness: _LayerRandomness,
        keys: Sequence[SampleKey],
        *,
        main_images: Sequence[int],
        may_combine: np.ndarray,
        run_epochs: int,
    ) -> list[Layer]:
        """Draws the layers: their images, the images' places on the canvas, and the parameters of pixel operations.

        ``keys``, ``main_images``, ``may_combine``: sample and main image of each layer, and whether it may be a mosaic.
        """
        mosaic_uniforms = randomness.uniforms(self._mosaic)
        images_by_layer = self._mosaic.choose_images(
            mosaic_uniforms, keys, indices=main_images, allow_mosaic=may_combine, pool=self._pool
        )
        canvas_hw = np.array([key.canvas_hw for key in keys])
        canvas_wh = canvas_hw[:, ::-1].astype(np.float64)
        counts = np.array([len(images) for images in images_by_layer])
        frame_wh = np.where((counts > 1)[:, None], 2 * canvas_wh, canvas_wh)
        frame_to_canvas = self._compose_transforms(randomness, keys, frame_wh, canvas_wh, run_epochs)

        layer = np.repeat(np.arange(len(counts)), counts)  # of each patch
        images = list(chain.from_iterable(images_by_layer))
        source_hw = self._source_hw[images]
        sizes = fitted_sizes(source_hw, canvas_wh[layer])
        pasted = PastedImages(
            source_hw=source_hw,
            corners=self._mosaic.corners(
                mosaic_uniforms[layer],
                quadrants=np.concatenate([np.arange(count) for count in counts]),
                is_mosaic=counts[layer] > 1,
                sizes=sizes,
                canvas_wh=canvas_wh[layer],
            ),
            sizes=sizes,
            frame_wh=frame_wh[layer],
            frame_to_canvas=frame_to_canvas[layer],
            canvas_wh=canvas_wh[layer],
        )
        region, matrix, is_seen = place_patches(pasted)
        patches: list[list[Patch]] = [[] for _ in counts]
        rows = zip(layer.tolist(), images, region.tolist(), matrix, is_seen.tolist())
        for number, image, (x1, y1, x2, y2), to_canvas, seen in rows:
            if seen:
                patches[number].append(Patch(image, (x1, y1, x2, y2), to_canvas))
        parameters = [operation.parameters(randomness.uniforms(operation), canvas_hw) for operation in self._operations]
        return [
            Layer(
                tuple(visible), tuple((operation, values[n]) for operation, values in zip(self._operations, parameters))
            )
            for n, visible in enumerate(patches)
        ]

    def _compose_transforms(
        self,
        randomness: _LayerRandomness,
        keys: Sequence[SampleKey],
        frame_wh: np.ndarray,
        canvas_wh: np.ndarray,
        run_epochs: int,
    ) -> np.ndarray:
        """Returns the product of the transforms' matrices for each layer, (L, 3, 3), from its frame to its canvas."""
        closing = closing_epochs(self._hyp.close_scale, run_epochs)
        scale_range = np.array([min((run_epochs - key.epoch) / (closing + 1), 1.0) for key in keys])
        product = np.tile(np.eye(3), (len(frame_wh), 1, 1))
        from_wh = frame_wh
        for transform in self._transforms:
            uniforms = transform.anneal(randomness.uniforms(transform), scale_range)
            # Not `@`, whose rounding may depend on the number of layers.
            after = transform.matrices(uniforms, from_wh, canvas_wh)[:, :, :, None]
            before = product[:, None, :, :]
            product = (
                after[:, :, 0] * before[:, :, 0] + after[:, :, 1] * before[:, :, 1] + after[:, :, 2] * before[:, :, 2]
            )
            from_wh = canvas_wh
        return product


class _LayerRandomness(NamedTuple):
    """The random numbers of a batch's layers, which depend only on the seed and the samples' keys."""

    seed: int
    positions: list[tuple[int, int]]  # epoch and position of each sample
    shared: np.ndarray  # (n, `SharedColumns.COUNT`) in [0, 1)
    mixed: list[int]  # samples that have a second layer

    def uniforms(self, augmentation: Augmentation) -> np.ndarray:
        """Returns the numbers of an augmentation, (L, `Augmentation.num_uniforms`) in [0, 1)."""
        columns = augmentation.columns
        count = augmentation.num_uniforms
        if columns is not None:
            first_layers = self.shared[:, SharedColumns.FIRST_LAYER]
            second_layers = self.shared[self.mixed, SharedColumns.SECOND_LAYER]
            return np.concatenate([first_layers[:, columns], second_layers[:, columns]])
        rows = keyed_uniforms(self.seed, named_stream(augmentation.name), self.positions, 2 * count)
        return np.concatenate([rows[:, :count], rows[self.mixed, count:]])


class PastedImages(NamedTuple):
    """Source images pasted on frames, one row for each patch."""

    source_hw: np.ndarray  # int (M, 2)
    corners: np.ndarray  # (M, 2): x and y of the upper left corner on the frame, whole numbers
    sizes: np.ndarray  # (M, 2): width and height on the frame, whole numbers
    frame_wh: np.ndarray  # (M, 2)
    frame_to_canvas: np.ndarray  # (M, 3, 3)
    canvas_wh: np.ndarray  # (M, 2)


def fitted_sizes(source_hw: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
    """Returns widths and heights (M, 2), whole numbers, of sources scaled to fit exactly into canvases (M, 2)."""
    gain = np.minimum(canvas_wh[:, 1] / source_hw[:, 0], canvas_wh[:, 0] / source_hw[:, 1])
    return np.maximum(np.rint(source_hw[:, ::-1] * gain[:, None]), 1.0)


def place_patches(pasted: PastedImages) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the region of each pasted image that is rendered, and its matrix.

    Returns regions int64 (M, 4), x1, y1, x2, y2 in source pixels; matrices float64 (M, 3, 3) from source to canvas; and
    whether the patch is on the canvas, bool (M,). The other two are valid only where it is.
    """
    source_wh = pasted.source_hw[:, ::-1].astype(np.float64)
    # The part of the source that is on its frame, in whole source pixels, at least one.
    per_pixel = source_wh / pasted.sizes
    low = np.minimum(np.rint((np.maximum(pasted.corners, 0) - pasted.corners) * per_pixel), source_wh - 1)
    high = np.rint((np.minimum(pasted.corners + pasted.sizes, pasted.frame_wh) - pasted.corners) * per_pixel)
    region = np.concatenate([low, np.maximum(high, low + 1)], 1)

    gain = pasted.sizes / source_wh
    matrix = np.empty_like(pasted.frame_to_canvas)
    along_x, along_y, origin = np.moveaxis(pasted.frame_to_canvas, 2, 0)  # (M, 3) each
    matrix[:, :, 0] = along_x * gain[:, :1]
    matrix[:, :, 1] = along_y * gain[:, 1:]
    matrix[:, :, 2] = along_x * pasted.corners[:, :1] + along_y * pasted.corners[:, 1:] + origin

    x1, y1, x2, y2 = project_boxes(matrix, region[:, :2], region[:, 2:]).T
    is_seen = (x1 < pasted.canvas_wh[:, 0]) & (y1 < pasted.canvas_wh[:, 1]) & (x2 > 0) & (y2 > 0)
    aligned = np.flatnonzero(are_axis_aligned(matrix))
    region[aligned], matrix[aligned], is_seen[aligned] = snap_to_pixels(
        region[aligned], matrix[aligned], pasted.canvas_wh[aligned]
    )
    return region.astype(np.int64), matrix, is_seen


def snap_to_pixels(
    region: np.ndarray, matrix: np.ndarray, canvas_wh: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Moves the edges of axis-aligned patches, by half a pixel at most, onto canvas pixels.

    A crop of whole source pixels then fills a rectangle of whole canvas pixels, which a resize renders several times
    faster than a warp. Labels use the same matrix, so they stay exactly on the objects. Returns regions, matrices and
    visibility as `place_patches` does.

    With gain 0.5 and offset -10.3, a source of 101 pixels covers -10.3 to 40.2 of a canvas of 30. Only its pixels 20 to
    81 are visible, which cover -0.3 to 30.2. These edges move to 0 and 30, so the new gain is 30 / 61:

    >>> matrix = np.array([[[0.5, 0, -10.3], [0, 0.5, -10.3], [0, 0, 1]]])
    >>> region, moved, is_seen = snap_to_pixels(np.array([[0, 0, 101, 101]]), matrix, np.array([[30, 30]]))
    >>> region.astype(int).tolist(), is_seen.tolist(), (moved[0, 0] * 61).round(9).tolist()
    ([[20, 20, 81, 81]], [True], [30.0, 0.0, -600.0])
    """
    gain = matrix[:, (0, 1), (0, 1)]
    offset = matrix[:, :2, 2]
    at_zero = -offset / gain
    at_limit = (canvas_wh - offset) / gain
    low = np.maximum(region[:, :2], np.floor(np.minimum(at_zero, at_limit)))
    high = np.minimum(region[:, 2:], np.ceil(np.maximum(at_zero, at_limit)))
    start = np.rint(gain * low + offset)
    end = np.rint(gain * high + offset)
    is_seen = ((high > low) & (start != end)).all(1)
    snapped = np.zeros_like(matrix)
    new_gain = (end - start) / np.where(high > low, high - low, 1.0)
    snapped[:, (0, 1), (0, 1)] = new_gain
    snapped[:, :2, 2] = start - new_gain * low
    snapped[:, 2, 2] = 1.0
    return np.concatenate([low, high], 1), snapped, is_seen
