"""`AugmentedImages`: the training samples of a split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from data.augment.labels import images_of, place_labels
from data.augment.mosaic import PartnerPool
from data.augment.plan import SamplePlan, SamplePlanner
from data.render.opencv import render_plan
from data.render.user_transforms import UserTransforms
from data.samples.batch_request import epoch_of
from data.samples.dataset import LoadImagesAndLabels
from data.samples.readers import RecentImages, SampleReader
from data.samples.samples import Samples
from utils.batches import Sample, SampleKey
from utils.config.settings import Hyperparameters


class AugmentedImages(Samples):
    """Renders augmented training samples."""

    def __init__(
        self,
        reader: SampleReader,
        *,
        hyp: Hyperparameters | None = None,
        seed: int = 0,
        run_epochs: int = 1,
        rect: bool = False,
        weights: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            reader: reads whole images or tiles.
            hyp: strengths and probabilities of the augmentations; None for the defaults.
            run_epochs: length of the whole run, for ``hyp.close_mosaic`` and ``hyp.close_scale``.
            rect: whether canvases fit the images' aspect, which disables mosaic and mixup.
            weights: result of `data.samples.sample_weights.sample_weights`, by which the sampler, mosaic and mixup
                draw; None to draw each sample once per epoch.

        Raises UserError if ``hyp.albumentations`` is wrong.
        """
        super().__init__(reader)
        hyp = hyp or Hyperparameters()
        if self.sample_index.pixels.channels != 3:  # color jitter needs RGB
            hyp = replace(hyp, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0)
        self.run_epochs = run_epochs
        self.weights = np.ones(len(self)) if weights is None else weights
        pool = PartnerPool(self.weights)
        self._planner = SamplePlanner(reader.source_hw, hyp, seed=seed, single_image=rect, pool=pool)
        self._read = reader.read
        if reader.image_cache is None and hyp.mosaic_block:  # cached images need no second copy
            # Blocks come in order, so the oldest image goes first. An epoch's last block may be twice as long.
            self._read = RecentImages(reader, max_images=2 * hyp.mosaic_block).read
        self._transforms = UserTransforms(hyp.albumentations, seed) if hyp.albumentations else None

    def render(
        self,
        keys: Sequence[SampleKey],
        outs: Sequence[np.ndarray | None] | None = None,
        *,
        run_epochs: int | None = None,
    ) -> list[Sample]:
        """See `Samples`."""
        plans = self.plans(keys, run_epochs=run_epochs)
        labels = self._plan_labels(keys, plans)
        read = self.source_images(epoch_of(keys))
        samples = []
        for key, plan, rows, out in zip(keys, plans, labels, outs or [None] * len(keys)):
            image = render_plan(plan, read, out, self.sample_index.pixels)
            if self._transforms is not None:
                image, rows = self._transforms(image, rows, key)
            samples.append(self.pack(key, image, rows))
        return samples

    def plans(self, keys: Sequence[SampleKey], *, run_epochs: int | None = None) -> list[SamplePlan]:
        """Draws the plans by which the samples of ``keys`` are rendered. ``run_epochs``: see `render`."""
        return self._planner.draw(keys, run_epochs or self.run_epochs)

    def without_pixels(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[Sample]:
        """Returns the samples that ``plans`` would render for ``keys``, with empty images, (0, 0, C)."""
        pixels = self.sample_index.pixels
        empty = np.zeros((0, 0, pixels.channels), pixels.dtype)
        return [self.pack(key, empty, rows) for key, rows in zip(keys, self._plan_labels(keys, plans))]

    def source_images(self, epoch: int) -> Callable[[int], np.ndarray]:
        """Returns a function that reads the source image of a sample in ``epoch``: (h, w, C)."""
        return partial(self._read, epoch=epoch)

    def _plan_labels(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[np.ndarray]:
        """Returns the labels of each plan; see `place_labels`."""
        labels, patch = self.reader.labels_of(images_of(plans), epoch_of(keys))
        return place_labels(plans, self.reader.source_hw, labels, patch)

    def without_augmentation(self) -> LoadImagesAndLabels:
        """Returns the same samples, letterboxed instead of augmented."""
        return LoadImagesAndLabels(self.reader.without_jitter())
