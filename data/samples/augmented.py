"""Training samples: augmented images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np

from data.augment.plan import SamplePlan, draw_plans, plan_labels
from data.index.index import DatasetIndex
from data.render.opencv import render_plan
from data.samples.dataset import LoadImagesAndLabels
from utils.config.settings import Hyperparameters
from utils.structures import Sample, SampleKey


class AugmentedImages(LoadImagesAndLabels):
    """The training samples of a split."""

    def __init__(
        self,
        index: DatasetIndex,
        *,
        hyp: Hyperparameters | None = None,
        seed: int = 0,
        epochs: int = 1,
        rect: bool = False,
        **options: Any,
    ) -> None:
        """``epochs``: of the whole run, for ``hyp.close_mosaic``. ``rect``: canvases fit the images' aspect; disables
        mosaic and mixup. ``options``: of `LoadImagesAndLabels`. Raises UserError for ``hyp.albumentations``."""
        super().__init__(index, **options)
        hyp = hyp or Hyperparameters()
        if index.pixels.channels != 3:  # there is no color to change
            hyp = replace(hyp, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0)
        self.hyp, self.seed, self.epochs, self.rect = hyp, seed, epochs, rect
        self._recent: dict[int, np.ndarray] = {}  # source images of the block that is being rendered
        self._transforms = None
        if hyp.albumentations:
            from data.render.user_transforms import UserTransforms

            self._transforms = UserTransforms(hyp.albumentations, seed)

    def source_image(self, i: int) -> np.ndarray:
        """As in `LoadImagesAndLabels`; images from files are kept for the other samples of their block."""
        image = self._recent.get(i)
        if image is None:
            image = super().source_image(i)
            if self.hyp.mosaic_block and self.image_cache is None:
                self._recent[i] = image
                # Blocks are in order: the oldest goes first. An epoch's last block may be almost twice as long.
                while len(self._recent) > 2 * self.hyp.mosaic_block:
                    self._recent.pop(next(iter(self._recent)), None)
        return image

    def samples(self, keys: Sequence[SampleKey], outs: Iterable[np.ndarray | None] = repeat(None)) -> list[Sample]:
        plans = self.plans(keys)
        samples = []
        for key, plan, labels, out in zip(keys, plans, self.plan_labels(keys, plans), outs):
            image = render_plan(plan, self.source_images(keys), out, self.index.pixels)
            if self._transforms is not None:
                image, labels = self._transforms(image, labels, key)
            samples.append(self.sample(key, image, labels))
        return samples

    def plans(self, keys: Sequence[SampleKey]) -> list[SamplePlan]:
        """How the samples of ``keys`` are rendered."""
        settings = {"hyp": self.hyp, "seed": self.seed, "epochs": self.epochs, "single_image": self.rect}
        return draw_plans(keys, source_hw=self.source_hw, **settings)

    def planned(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[Sample]:
        """The samples of ``keys`` without their images, which are (0, 0, C)."""
        empty = np.zeros((0, 0, self.index.pixels.channels), self.index.pixels.dtype)
        return [self.sample(key, empty, rows) for key, rows in zip(keys, self.plan_labels(keys, plans))]

    def plan_labels(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[np.ndarray]:
        """`data.augment.plan.plan_labels` of the samples of ``keys``."""
        return plan_labels(plans, self.source_hw, self.index.labels_of)

    def source_images(self, keys: Sequence[SampleKey]) -> Callable[[int], np.ndarray]:
        """`source_image` in the epoch of ``keys``."""
        return self.source_image

    def repeats(self) -> np.ndarray | None:
        """How often an epoch has each sample, as `EpochOrder` takes it."""
        return None

    def without_augmentation(self) -> LoadImagesAndLabels:
        return LoadImagesAndLabels(self.index, imgsz=self.imgsz, image_cache=self.image_cache)
