"""`AugmentedImages`: the training samples of a split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from data.augment.mosaic import PartnerPool
from data.augment.plan import SamplePlan, draw_plans, plan_labels
from data.index.index import DatasetIndex
from data.render.opencv import render_plan
from data.samples.batch_request import epoch_of
from data.samples.dataset import LoadImagesAndLabels
from utils.config.settings import Hyperparameters
from utils.structures import Sample, SampleKey

if TYPE_CHECKING:
    from data.cache.disk import DiskCache
    from data.cache.ram import RamCache
    from data.samples.tiled_index import TiledIndex


class AugmentedImages(LoadImagesAndLabels):
    """Renders augmented training samples of whole images."""

    def __init__(
        self,
        index: DatasetIndex,
        *,
        imgsz: int,
        image_cache: RamCache | DiskCache | None = None,
        hyp: Hyperparameters | None = None,
        seed: int = 0,
        epochs: int = 1,
        rect: bool = False,
        tiles: TiledIndex | None = None,
    ) -> None:
        """
        Args:
            imgsz, image_cache, tiles: see `LoadImagesAndLabels`.
            hyp: strengths and probabilities of the augmentations; None for the defaults.
            epochs: length of the whole run, for ``hyp.close_mosaic``.
            rect: whether canvases fit the images' aspect, which disables mosaic and mixup.

        Raises UserError if ``hyp.albumentations`` is wrong.
        """
        super().__init__(index, imgsz=imgsz, image_cache=image_cache, tiles=tiles)
        hyp = hyp or Hyperparameters()
        if index.pixels.channels != 3:  # jitter of colors needs RGB
            hyp = replace(hyp, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0)
        self.hyp = hyp
        self.seed = seed
        self.epochs = epochs
        self.rect = rect
        self._pool: PartnerPool | None = None
        self._recent: dict[int, np.ndarray] = {}  # source images of the current block of samples
        self._transforms = None
        if hyp.albumentations:
            from data.render.user_transforms import UserTransforms

            self._transforms = UserTransforms(hyp.albumentations, seed)

    def source_image(self, i: int, epoch: int = 0) -> np.ndarray:
        """Reads an image as `LoadImagesAndLabels` does, but keeps one from a file for other samples of its block."""
        image = self._recent.get(i)
        if image is None:
            image = super().source_image(i, epoch)
            if self.hyp.mosaic_block and self.image_cache is None:
                self._recent[i] = image
                # Blocks come in order, so the oldest image goes first. An epoch's last block may be twice as long.
                while len(self._recent) > 2 * self.hyp.mosaic_block:
                    self._recent.pop(next(iter(self._recent)), None)
        return image

    def samples(
        self, keys: Sequence[SampleKey], outs: Iterable[np.ndarray | None] = repeat(None), *, epochs: int | None = None
    ) -> list[Sample]:
        plans = self.plans(keys, epochs=epochs)
        read_image = partial(self.source_image, epoch=epoch_of(keys))
        samples = []
        for key, plan, labels, out in zip(keys, plans, self.plan_labels(keys, plans), outs):
            image = render_plan(plan, read_image, out, self.index.pixels)
            if self._transforms is not None:
                image, labels = self._transforms(image, labels, key)
            samples.append(self.sample(key, image, labels))
        return samples

    def plans(self, keys: Sequence[SampleKey], *, epochs: int | None = None) -> list[SamplePlan]:
        """Draws the plans by which the samples of ``keys`` are rendered. ``epochs``: see `samples`."""
        return draw_plans(
            keys,
            source_hw=self.source_hw,
            hyp=self.hyp,
            seed=self.seed,
            epochs=epochs or self.epochs,
            single_image=self.rect,
            pool=self._pool,
        )

    def planned(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[Sample]:
        """Returns the samples of ``keys`` with empty images, (0, 0, C)."""
        empty = np.zeros((0, 0, self.index.pixels.channels), self.index.pixels.dtype)
        return [self.sample(key, empty, rows) for key, rows in zip(keys, self.plan_labels(keys, plans))]

    def plan_labels(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[np.ndarray]:
        """Returns the labels of each plan; see `data.augment.plan.plan_labels`."""
        return plan_labels(plans, self.source_hw, partial(self.labels_of, epoch=epoch_of(keys)))

    def repeats(self) -> np.ndarray | None:
        """Returns how often each sample comes in an epoch, as `EpochOrder` expects it; None for once."""
        return None

    def limit_partners(self, repeats: np.ndarray | None) -> None:
        """Makes mosaic and mixup draw images as often as they come in an epoch, also without blocks. ``repeats``: see
        `repeats`."""
        self._pool = PartnerPool(len(self), repeats)

    def without_augmentation(self) -> LoadImagesAndLabels:
        """Returns the same images, letterboxed instead of augmented."""
        return LoadImagesAndLabels(self.index, imgsz=self.imgsz, image_cache=self.image_cache)
