"""`LoadImagesAndLabels`: a sample key to a rendered sample."""

from __future__ import annotations

import numpy as np

from data.augment import SamplePlan, draw_plan
from data.image_cache import ImageCache
from data.index import DatasetIndex
from data.pixel_transforms import PixelTransforms
from data.render import fit_letterbox, letterbox, plan_labels, render_plan
from data.source_images import read_source, reduced_sizes
from utils.config import Hyperparameters
from utils.structures import Sample, SampleKey


class LoadImagesAndLabels:
    """A split as samples. Without state that shows: the same key gives the same sample in any process, in any order.

    Training samples (``augment``) are rendered as `data.augment` says; others are letterboxed, their longer side
    scaled to ``imgsz``, up or down.
    """

    def __init__(
        self,
        index: DatasetIndex,
        *,
        imgsz: int,
        stride: int = 32,
        hyp: Hyperparameters,
        augment: bool,
        seed: int = 0,
        epochs: int = 1,
        rect: bool = False,
        image_cache: ImageCache | None = None,
    ) -> None:
        """
        Args:
            index: the scanned split.
            imgsz: longer side of source images, and of letterboxed ones, pixels.
            stride: of the model; canvas sides are its multiples.
            hyp: augmentation settings.
            augment: render training samples.
            seed: of the run.
            epochs: of the whole run, for ``hyp.close_mosaic``.
            rect: canvases fit the images' aspect; this rules mosaic and mixup out.
            image_cache: of the same index and imgsz.

        Raises:
            UserError: a mistake in ``hyp.albumentations``.
        """
        self.index = index
        self.imgsz = imgsz
        self.stride = stride
        self.hyp = hyp
        self.augment = augment
        self.seed = seed
        self.epochs = epochs
        self.rect = rect
        self.image_cache = image_cache
        self.source_hw = reduced_sizes(index.image_hw, imgsz)
        self._recent: dict[int, np.ndarray] = {}  # source images of the block that is being rendered
        self._transforms = PixelTransforms(hyp.albumentations, seed) if augment and hyp.albumentations else None

    def __len__(self) -> int:
        return len(self.index)

    def source_image(self, i: int) -> np.ndarray:
        """uint8 (h, w, 3) RGB, longer side at most imgsz; perhaps read-only. UserError if the file is unreadable."""
        if self.image_cache is not None:
            return self.image_cache[i]
        image = self._recent.get(i)
        if image is None:
            image = read_source(self.index.path(i), self.index.image_hw[i], self.source_hw[i])
            if self.augment and self.hyp.mosaic_block:
                self._remember(i, image)
        return image

    def _remember(self, i: int, image: np.ndarray) -> None:
        """Keeps an image for the other pictures of its block. Blocks follow one another, so the oldest goes first."""
        self._recent[i] = image
        while len(self._recent) > 2 * self.hyp.mosaic_block:  # an epoch's last block may be almost twice as long
            self._recent.pop(next(iter(self._recent)), None)

    def __getitem__(self, key: SampleKey) -> Sample:
        """The sample of ``key``. UserError names a file that cannot be decoded (any more)."""
        return self.sample(key)

    def sample(self, key: SampleKey, place: np.ndarray | None = None) -> Sample:
        """The sample of ``key``. Its image may be ``place``, uint8 (H, W, 3) of the key's size, to save a copy;
        otherwise ``place`` holds nothing of use afterwards."""
        return self._augmented(key, place) if self.augment else self._letterboxed(key)

    def plan(self, key: SampleKey) -> SamplePlan:
        """How the training sample of ``key`` is drawn."""
        return draw_plan(
            key,
            source_hw=self.source_hw,
            hyp=self.hyp,
            seed=self.seed,
            epochs=self.epochs,
            single_image=self.rect,
        )

    def undrawn(self, key: SampleKey, plan: SamplePlan) -> Sample:
        """The training sample of ``key`` but for its picture, which is uint8 (0, 0, 3)."""
        labels = plan_labels(plan, self.source_hw, self.index.labels)
        return self._sample(key, np.zeros((0, 0, 3), np.uint8), labels, (1.0, 1.0), (0.0, 0.0))

    def _augmented(self, key: SampleKey, place: np.ndarray | None) -> Sample:
        plan = self.plan(key)
        image, labels = render_plan(plan, self.source_image, self.index.labels, place)
        if self._transforms is not None:
            image, labels = self._transforms(image, labels, key)
        return self._sample(key, image, labels, (1.0, 1.0), (0.0, 0.0))

    def _letterboxed(self, key: SampleKey) -> Sample:
        i, (canvas_h, canvas_w) = key.index, key.canvas_hw
        fit = fit_letterbox(self.index.image_hw[i], key.canvas_hw, self.imgsz)
        image = letterbox(self.source_image(i), key.canvas_hw, fit)
        labels = self.index.labels(i).astype(np.float32, copy=True)
        labels[:, 1:] *= np.array([fit.width, fit.height] * 2, np.float32)
        labels[:, 1:3] += (fit.pad_x, fit.pad_y)
        labels[:, 1:] /= np.array([canvas_w, canvas_h] * 2, np.float32)
        return self._sample(key, image, labels, (fit.gain_x, fit.gain_y), (float(fit.pad_x), float(fit.pad_y)))

    def _sample(
        self,
        key: SampleKey,
        image: np.ndarray,
        labels: np.ndarray,
        gain_xy: tuple[float, float],
        pad_xy: tuple[float, float],
    ) -> Sample:
        original = (int(self.index.image_hw[key.index, 0]), int(self.index.image_hw[key.index, 1]))
        return Sample(image, labels, key.index, self.index.path(key.index), original, gain_xy, pad_xy)
