"""The samples of a split: letterboxed (`LoadImagesAndLabels`), or augmented for training (`AugmentedImages`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from data.augment.labels import images_of, place_labels
from data.augment.mosaic import PartnerPool
from data.augment.plan import SamplePlanner
from data.index import DatasetIndex
from data.render.letterbox import CanvasRule, Letterbox, fit_letterbox, letterbox
from data.render.opencv import render_plan
from data.render.user_transforms import UserTransforms
from data.samples.readers import RecentImages, SampleReader
from data.samples.tiles import TiledIndex
from utils.batches import BatchRequest, Sample, SampleKey
from utils.config.settings import Hyperparameters


class LoadImagesAndLabels:
    """Loads the images of a split (or tiles of them) with their labels, letterboxed, as validation samples.

    The longer side is scaled, up or down, to the reader's ``imgsz``; if that is None, samples keep their size. The same
    key gives the same sample in any process and any order.
    """

    def __init__(self, reader: SampleReader) -> None:
        """``reader``: reads whole images or tiles."""
        self.reader = reader

    def __len__(self) -> int:
        return len(self.sample_index)

    @property
    def sample_index(self) -> DatasetIndex:
        """Index of the samples; see `SampleReader`."""
        return self.reader.sample_index

    @property
    def tiles(self) -> TiledIndex | None:
        """The tiles that are the samples; None if the samples are whole images."""
        return self.reader.tiles

    def requests(
        self, batch_size: int, canvases: CanvasRule, *, rank: int = 0, world_size: int = 1
    ) -> list[BatchRequest]:
        """Returns a rank's validation batches; each sample occurs once over all ranks."""
        groups = self.reader.validation_batches(batch_size, canvases)
        return [request for group in groups[rank::world_size] for request in group]

    def render(self, request: BatchRequest, outs: Sequence[np.ndarray | None] | None = None) -> list[Sample]:
        """Renders the samples of ``request``, each independently of the others.

        ``outs``: an array (H, W, C) per sample to render into, which saves a copy. Its content is undefined if the
        sample returns another array. Raises UserError for a file that cannot be decoded.
        """
        samples = []
        for key, out in zip(request.keys, outs or [None] * len(request.keys)):
            image_hw = self.sample_index.image_hw[key.index]
            fit = fit_letterbox(image_hw, key.canvas_hw, self.reader.imgsz or int(image_hw.max()))
            image = letterbox(self.reader.read(key.index, key.epoch), key.canvas_hw, fit, out)
            labels = _letterboxed_labels(self.sample_index.labels(key.index), key.canvas_hw, fit)
            samples.append(self._sample(key, image, labels, fit))
        return samples

    def _sample(self, key: SampleKey, image: np.ndarray, labels: np.ndarray, fit: Letterbox | None = None) -> Sample:
        """Packs a rendered image and its labels. ``fit``: None if the image is augmented."""
        original_hw, (left, top) = self.reader.origin_of(key.index)
        gain_xy = (1.0, 1.0) if fit is None else (fit.gain_x, fit.gain_y)
        pad_x, pad_y = (0.0, 0.0) if fit is None else (float(fit.pad_x), float(fit.pad_y))
        return Sample(
            image=image,
            labels=labels,
            index=key.index,
            path=self.sample_index.path(key.index),
            original_hw=original_hw,
            gain_xy=gain_xy,
            pad_xy=(pad_x - gain_xy[0] * left, pad_y - gain_xy[1] * top),
        )


def _letterboxed_labels(labels: np.ndarray, canvas_hw: tuple[int, int], fit: Letterbox) -> np.ndarray:
    """Returns the labels of an image, float32 (n, 5) of class, cx, cy, w, h, normalized to the canvas."""
    canvas_h, canvas_w = canvas_hw
    rows = labels.astype(np.float32, copy=True)
    rows[:, 1:] *= np.array([fit.width, fit.height] * 2, np.float32)  # pixels of the resized image
    rows[:, 1:3] += (fit.pad_x, fit.pad_y)  # pixels of the canvas
    rows[:, 1:] /= np.array([canvas_w, canvas_h] * 2, np.float32)
    return rows


class AugmentedImages(LoadImagesAndLabels):
    """The same images and labels as augmented training samples."""

    def __init__(
        self,
        reader: SampleReader,
        *,
        hyp: Hyperparameters | None = None,
        seed: int = 0,
        rect: bool = False,
        weights: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            reader: reads whole images or tiles.
            hyp: strengths and probabilities of the augmentations; None for the defaults.
            rect: whether canvases fit the images' aspect, which disables mosaic and mixup.
            weights: result of `data.samples.weights.sample_weights`, by which the sampler, mosaic and mixup draw; None
                to draw each sample once per epoch.

        Raises UserError if ``hyp.albumentations`` is wrong.
        """
        super().__init__(reader)
        hyp = hyp or Hyperparameters()
        self._options: dict[str, Any] = {"seed": seed, "rect": rect, "weights": weights}
        self.weights = np.ones(len(self)) if weights is None else weights
        is_rgb = self.sample_index.pixels.channels == 3
        self.planner = SamplePlanner(
            reader.source_hw, hyp, seed=seed, single_image=rect, is_rgb=is_rgb, pool=PartnerPool(self.weights)
        )
        self._read = reader.read
        if reader.image_cache is None and hyp.mosaic_block and not rect:  # cached images need no second copy
            # Blocks come in order, so the oldest image goes first. An epoch's last block may be twice as long.
            self._read = RecentImages(reader, max_images=2 * hyp.mosaic_block).read
        self._transforms = UserTransforms(hyp.albumentations, seed) if hyp.albumentations else None

    @property
    def per_epoch(self) -> int:
        """Number of samples in an epoch, in which one may occur several times or not at all."""
        return round(self.weights.sum())

    def render(self, request: BatchRequest, outs: Sequence[np.ndarray | None] | None = None) -> list[Sample]:
        """Renders augmented samples; see `LoadImagesAndLabels.render`."""
        plans = self.planner.draw(request.keys, request.run_epochs)
        source_labels, patch = self.reader.labels_of(images_of(plans), request.epoch)
        labels_by_plan = place_labels(plans, self.reader.source_hw, source_labels, patch)
        load = partial(self._read, epoch=request.epoch)
        samples = []
        for key, plan, labels, out in zip(request.keys, plans, labels_by_plan, outs or [None] * len(request.keys)):
            image = render_plan(plan, load, out, self.sample_index.pixels)
            if self._transforms is not None:
                image, labels = self._transforms(image, labels, key)
            samples.append(self._sample(key, image, labels))
        return samples

    def check_transforms(self, canvases_hw: Iterable[tuple[int, int]]) -> None:
        """Raises UserError if a transform of ``hyp.albumentations`` fails on a canvas of these sizes."""
        if self._transforms is not None:
            self._transforms.check(canvases_hw, self.sample_index.pixels)

    def with_hyp(self, hyp: Hyperparameters) -> AugmentedImages:
        """Returns the same samples, augmented as ``hyp`` says."""
        return AugmentedImages(self.reader, hyp=hyp, **self._options)

    def without_augmentation(self) -> LoadImagesAndLabels:
        """Returns the same samples, letterboxed instead of augmented."""
        return LoadImagesAndLabels(self.reader.without_jitter())
