"""Draws sample plans, which determine how training samples are augmented, without reading a pixel.

A plan lists source images, a region of each, and the one matrix that maps the region straight to the output canvas: its
position in the mosaic and all geometric transforms are composed beforehand. The result is the same as in the usual two
steps: paste four images onto a canvas of twice the size, then cut out a randomly transformed window.

The plans of a batch are computed together, because a NumPy operation takes about as long for one number as for many. A
plan is bitwise equal in any batch.

Coordinates: see `data.augment.transforms`. All matrices are float64 (3, 3) and act on continuous pixel coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from data.augment.augmentation import Augmentation, RandomStreams
from data.augment.mosaic import Mosaic, PartnerPool, choose_mixup
from data.augment.placement import Placement, fitted_sizes, place_patches
from data.augment.transforms import ColorJitter, GeometricTransform, PixelOperation, RandomFlip, RandomPerspective
from utils.batches import SampleKey
from utils.config.epochs import closing_epochs
from utils.config.settings import Hyperparameters
from utils.rng import Stream, keyed_generator

MIXUP_BETA = 32.0
# In the order of application. A new augmentation of single images is a class and an entry here.
GEOMETRIC: tuple[type[GeometricTransform], ...] = (RandomPerspective, RandomFlip)
PIXEL: tuple[type[PixelOperation], ...] = (ColorJitter,)

Region = tuple[int, int, int, int]  # x1, y1, x2, y2 in source pixels


@dataclass(frozen=True, slots=True)
class Patch:
    """A source image, or a region of it, on the canvas."""

    index: int  # number of the sample: an image or a tile
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
        pool: PartnerPool | None = None,
    ) -> None:
        """
        Args:
            source_hw: int (N, 2), sizes of all source images as the renderer will read them.
            single_image: whether to omit mosaic and mixup (for rectangular batches, whose canvas fits one image's
                aspect).
            pool: images for mosaic and mixup of samples without a block; None for all N alike.
        """
        self._source_hw = source_hw
        self._hyp = hyp
        self._seed = seed
        self._single_image = single_image
        self._pool = pool or PartnerPool(np.ones(len(source_hw)))
        self._mosaic = Mosaic(hyp)
        self._transforms = [kind(hyp) for kind in GEOMETRIC]
        self._operations = [operation for operation in (kind(hyp) for kind in PIXEL) if operation.is_active]

    def draw(self, keys: Sequence[SampleKey], run_epochs: int) -> list[SamplePlan]:
        """Draws the plans of samples, whose canvas sizes may differ.

        ``run_epochs``: length of the whole run; ``hyp.close_mosaic`` and ``hyp.close_scale`` act at its end.
        """
        if not keys:
            return []
        streams = RandomStreams(self._seed, keys)
        mosaic_epochs = 0 if self._single_image else run_epochs - closing_epochs(self._hyp.close_mosaic, run_epochs)
        may_combine = np.array([key.epoch < mosaic_epochs for key in keys])
        mixed, partners = choose_mixup(
            streams.mixing_uniforms, keys, allow_mixup=may_combine, probability=self._hyp.mixup, pool=self._pool
        )
        inputs = _LayerInputs(
            keys=[*keys, *(keys[n] for n in mixed)],
            images=[*(key.index for key in keys), *partners],
            allow_mosaic=may_combine[[*range(len(keys)), *mixed]],
            streams=streams,
            mixed=mixed,
        )
        layers = self._draw_layers(inputs, run_epochs)
        plans = [SamplePlan(key.canvas_hw, (layer,), 1.0) for key, layer in zip(keys, layers)]
        for n, second in zip(mixed, layers[len(keys) :]):
            rng = keyed_generator(self._seed, Stream.MIXUP, keys[n].epoch, keys[n].position)
            plans[n] = SamplePlan(keys[n].canvas_hw, (layers[n], second), float(rng.beta(MIXUP_BETA, MIXUP_BETA)))
        return plans

    def _draw_layers(self, inputs: _LayerInputs, run_epochs: int) -> list[Layer]:
        """Draws the layers: their images, the images' places on the canvas, and the parameters of pixel operations."""
        mosaic_uniforms = inputs.uniforms_of(self._mosaic)
        members = self._mosaic.members(
            mosaic_uniforms, inputs.keys, indices=inputs.images, allow_mosaic=inputs.allow_mosaic, pool=self._pool
        )
        canvas_hw = np.array([key.canvas_hw for key in inputs.keys])
        placed = self._place(
            inputs,
            members,
            mosaic_uniforms=mosaic_uniforms,
            canvas_wh=canvas_hw[:, ::-1].astype(np.float64),
            run_epochs=run_epochs,
        )
        patches = [
            Patch(image, (x1, y1, x2, y2), matrix)
            for image, (x1, y1, x2, y2), matrix in zip(
                chain.from_iterable(members), placed.region.tolist(), placed.matrix
            )
        ]
        is_seen = placed.is_seen.tolist()
        parameters = [operation.parameters(inputs.uniforms_of(operation), canvas_hw) for operation in self._operations]
        layers = []
        start = 0
        for number, images in enumerate(members):
            end = start + len(images)
            visible = tuple(compress(patches[start:end], is_seen[start:end]))
            operations = tuple((operation, rows[number]) for operation, rows in zip(self._operations, parameters))
            layers.append(Layer(visible, operations))
            start = end
        return layers

    def _place(
        self,
        inputs: _LayerInputs,
        members: Sequence[Sequence[int]],
        *,
        mosaic_uniforms: np.ndarray,
        canvas_wh: np.ndarray,
        run_epochs: int,
    ) -> Placement:
        """Places all patches of the L layers, whose images are ``members``, in order."""
        counts = np.array([len(images) for images in members])
        frame_wh = np.where((counts > 1)[:, None], 2 * canvas_wh, canvas_wh)
        frame_to_canvas = self._compose(inputs, frame_wh, canvas_wh, run_epochs)
        layer = np.repeat(np.arange(len(members)), counts)  # of each patch
        source_hw = self._source_hw[list(chain.from_iterable(members))]
        patch_canvas_wh = canvas_wh[layer]
        sizes = fitted_sizes(source_hw, patch_canvas_wh)
        corners = self._mosaic.corners(
            mosaic_uniforms[layer],
            quadrants=np.concatenate([np.arange(count) for count in counts]),
            is_mosaic=counts[layer] > 1,
            sizes=sizes,
            canvas_wh=patch_canvas_wh,
        )
        return place_patches(
            source_hw,
            corners=corners,
            sizes=sizes,
            frame_wh=frame_wh[layer],
            frame_to_canvas=frame_to_canvas[layer],
            canvas_wh=patch_canvas_wh,
        )

    def _compose(
        self, inputs: _LayerInputs, frame_wh: np.ndarray, canvas_wh: np.ndarray, run_epochs: int
    ) -> np.ndarray:
        """Returns the product of the transforms' matrices for each layer, (L, 3, 3), from its frame to its canvas."""
        closing = closing_epochs(self._hyp.close_scale, run_epochs)
        scale_range = np.array([min((run_epochs - key.epoch) / (closing + 1), 1.0) for key in inputs.keys])
        product = np.tile(np.eye(3), (len(frame_wh), 1, 1))
        from_wh = frame_wh
        for transform in self._transforms:
            uniforms = transform.anneal(inputs.uniforms_of(transform), scale_range)
            # Not `@`, whose rounding may depend on the number of layers.
            after = transform.matrices(uniforms, from_wh, canvas_wh)[:, :, :, None]
            before = product[:, None, :, :]
            product = (
                after[:, :, 0] * before[:, :, 0] + after[:, :, 1] * before[:, :, 1] + after[:, :, 2] * before[:, :, 2]
            )
            from_wh = canvas_wh
        return product


class _LayerInputs(NamedTuple):
    """Inputs that determine L layers: the first layers of all samples, then the second layers of mixed samples."""

    keys: list[SampleKey]
    images: list[int]  # main image of each layer
    allow_mosaic: np.ndarray  # bool (L,)
    streams: RandomStreams
    mixed: list[int]  # positions of the samples with a second layer

    def uniforms_of(self, augmentation: Augmentation) -> np.ndarray:
        """Returns the random numbers of an augmentation; see `RandomStreams.layer_uniforms`."""
        return self.streams.layer_uniforms(augmentation, self.mixed)
