"""`LoadImagesAndLabels` renders the sample of a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from data.augment.plan import SamplePlan, draw_plans, plan_labels
from data.image_io.decode import OnWarning, read_source, reduced_sizes
from data.index.index import DatasetIndex
from data.render.letterbox import fit_letterbox, letterbox
from data.render.opencv import render_plan
from utils.config.settings import Hyperparameters
from utils.structures import Sample, SampleKey

if TYPE_CHECKING:
    from data.cache.open import ImageCache
    from data.index.tiles import TiledIndex


class LoadImagesAndLabels:
    """The samples of a split. The same key gives the same sample in any process and any order.

    Training samples (``augment``) are rendered as `data.augment.plan` says; others are letterboxed, their longer side
    scaled to ``imgsz``, up or down, or, without ``imgsz``, their size unchanged. With ``tiles``, tiles take the place
    of images.
    """

    def __init__(
        self,
        index: DatasetIndex,
        *,
        imgsz: int | None,
        hyp: Hyperparameters | None = None,
        augment: bool = False,
        seed: int = 0,
        epochs: int = 1,
        rect: bool = False,
        image_cache: ImageCache | None = None,
        tiles: TiledIndex | None = None,
        on_warning: OnWarning | None = None,
    ) -> None:
        """
        Args:
            index: the scanned split.
            imgsz: longer side of source images, and of letterboxed ones, pixels; None: that of each image file.
            hyp: augmentation settings; None: the defaults.
            augment: render training samples.
            seed: of the run.
            epochs: of the whole run, for ``hyp.close_mosaic``.
            rect: canvases fit the images' aspect; disables mosaic and mixup.
            image_cache: of the same index and imgsz; with tiles, images of full size.
            tiles: of the images of the index.
            on_warning: called with the path of a damaged image and the decoder's warning; picklable.

        Raises:
            UserError: a mistake in ``hyp.albumentations``.
        """
        self.index = index if tiles is None else tiles.index
        self.tiles = tiles
        self.imgsz = imgsz
        hyp = hyp or Hyperparameters()
        if index.pixels.channels != 3:  # there is no color to change
            hyp = replace(hyp, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0)
        self.hyp = hyp
        self.augment = augment
        self.seed = seed
        self.epochs = epochs
        self.rect = rect
        self.image_cache = image_cache
        self.on_warning = on_warning
        is_full_size = imgsz is None or tiles is not None
        self.source_hw = self.index.image_hw if is_full_size else reduced_sizes(index.image_hw, imgsz)
        self._recent: dict[int, np.ndarray] = {}  # source images of the block that is being rendered
        self._transforms = None
        if augment and hyp.albumentations:
            from data.render.user_transforms import UserTransforms

            self._transforms = UserTransforms(hyp.albumentations, seed)

    def __len__(self) -> int:
        return len(self.index)

    def source_image(self, i: int, epoch: int = 0) -> np.ndarray:
        """(h, w, C), longer side at most imgsz, or a tile of full size as it is in ``epoch``; perhaps read-only.
        UserError if the file is unreadable."""
        if self.tiles is not None:
            return self.tiles.pixels(self.image_cache[int(self.tiles.image[i])], i, epoch)
        if self.image_cache is not None:
            return self.image_cache[i]
        image = self._recent.get(i)
        if image is None:
            index = self.index
            image = read_source(index.path(i), index.image_hw[i], self.source_hw[i], self.on_warning, index.pixels)
            if self.augment and self.hyp.mosaic_block:
                self._remember(i, image)
        return image

    def _remember(self, i: int, image: np.ndarray) -> None:
        """Keeps an image for the other samples of its block. Blocks are in order, so the oldest is removed first."""
        self._recent[i] = image
        while len(self._recent) > 2 * self.hyp.mosaic_block:  # an epoch's last block may be almost twice as long
            self._recent.pop(next(iter(self._recent)), None)

    def __getitem__(self, key: SampleKey) -> Sample:
        """The sample of ``key``. UserError names a file that cannot be decoded (any more)."""
        return self.samples([key])[0]

    def samples(self, keys: Sequence[SampleKey], outs: Sequence[np.ndarray | None] | None = None) -> list[Sample]:
        """The samples of ``keys``, all of one epoch. Each is independent of the others.

        Args:
            outs: an array (H, W, C) per sample to render into, which saves a copy; undefined if the sample has
                another image.
        """
        outs = [None] * len(keys) if outs is None else outs
        if not self.augment:
            return [self._letterboxed(key, out) for key, out in zip(keys, outs)]
        plans = self.plans(keys)
        samples = []
        for key, plan, labels, out in zip(keys, plans, self._plan_labels(keys, plans), outs):
            image = render_plan(plan, self.source_images(keys), out, self.index.pixels)
            if self._transforms is not None:
                image, labels = self._transforms(image, labels, key)
            samples.append(self._sample(key, image, labels))
        return samples

    def plans(self, keys: Sequence[SampleKey]) -> list[SamplePlan]:
        """How the training samples of ``keys`` are rendered."""
        settings = {"hyp": self.hyp, "seed": self.seed, "epochs": self.epochs, "single_image": self.rect}
        return draw_plans(keys, source_hw=self.source_hw, **settings)

    def planned(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[Sample]:
        """The training samples of ``keys`` without their images, which are (0, 0, C)."""
        empty = np.zeros((0, 0, self.index.pixels.channels), self.index.pixels.dtype)
        return [self._sample(key, empty, rows) for key, rows in zip(keys, self._plan_labels(keys, plans))]

    def source_images(self, keys: Sequence[SampleKey]) -> Callable[[int], np.ndarray]:
        """`source_image` in the epoch of ``keys``."""
        return self.source_image if self.tiles is None else partial(self.source_image, epoch=_epoch_of(keys))

    def _plan_labels(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[np.ndarray]:
        tiles = self.tiles
        labels_of = self.index.labels_of if tiles is None else partial(tiles.labels_of, epoch=_epoch_of(keys))
        return plan_labels(plans, self.source_hw, labels_of)

    def _letterboxed(self, key: SampleKey, out: np.ndarray | None) -> Sample:
        i, (canvas_h, canvas_w) = key.index, key.canvas_hw
        fit = fit_letterbox(self.index.image_hw[i], key.canvas_hw, self.imgsz or int(self.index.image_hw[i].max()))
        image = letterbox(self.source_image(i), key.canvas_hw, fit, out)
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
        gain_xy: tuple[float, float] = (1.0, 1.0),
        pad_xy: tuple[float, float] = (0.0, 0.0),
    ) -> Sample:
        index, number = self.index, key.index
        if self.tiles is not None:  # detections in a tile become those in its image
            index, number = self.tiles.images, int(self.tiles.image[number])
            left, top = self.tiles.windows[key.index, :2].tolist()
            pad_xy = (pad_xy[0] - gain_xy[0] * left, pad_xy[1] - gain_xy[1] * top)
        original = (int(index.image_hw[number, 0]), int(index.image_hw[number, 1]))
        return Sample(image, labels, key.index, index.path(number), original, gain_xy, pad_xy)


def _epoch_of(keys: Sequence[SampleKey]) -> int:
    return keys[0].epoch if keys else 0
