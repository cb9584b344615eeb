"""`LoadImagesAndLabels` renders the sample of a key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from data.image_io.decode import read_source, reduced_sizes
from data.index.index import DatasetIndex
from data.render.letterbox import fit_letterbox, letterbox
from utils.structures import Sample, SampleKey

if TYPE_CHECKING:
    from data.cache.open import ImageCache
    from data.index.tiles import TiledIndex


class LoadImagesAndLabels:
    """The samples of a split. The same key gives the same sample in any process and any order.

    They are letterboxed, their longer side scaled to ``imgsz``, up or down, or, without ``imgsz``, their size
    unchanged; `data.loading.augmented` has those of training. With ``tiles``, tiles take the place of images.
    """

    epochs = 0  # of the whole run, in training

    def __init__(
        self,
        index: DatasetIndex,
        *,
        imgsz: int | None,
        image_cache: ImageCache | None = None,
        tiles: TiledIndex | None = None,
    ) -> None:
        """
        Args:
            index: the scanned split.
            imgsz: longer side of source images, and of letterboxed ones, pixels; None: that of each image file.
            image_cache: of the same index and imgsz; with tiles, images of full size.
            tiles: of the images of the index.
        """
        self.index = index if tiles is None else tiles.index
        self.tiles = tiles
        self.imgsz = imgsz
        self.image_cache = image_cache
        is_full_size = imgsz is None or tiles is not None
        self.source_hw = self.index.image_hw if is_full_size else reduced_sizes(index.image_hw, imgsz)

    def __len__(self) -> int:
        return len(self.index)

    def source_image(self, i: int, epoch: int = 0) -> np.ndarray:
        """(h, w, C), longer side at most imgsz, or a tile of full size as it is in ``epoch``; perhaps read-only.
        UserError if the file is unreadable."""
        if self.tiles is not None:
            return self.tiles.pixels(self.image_cache[int(self.tiles.image[i])], i, epoch)
        if self.image_cache is not None:
            return self.image_cache[i]
        index = self.index
        return read_source(index.path(i), index.image_hw[i], self.source_hw[i], index.pixels)

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
        return [self._letterboxed(key, out) for key, out in zip(keys, outs)]

    def _letterboxed(self, key: SampleKey, out: np.ndarray | None) -> Sample:
        i, (canvas_h, canvas_w) = key.index, key.canvas_hw
        fit = fit_letterbox(self.index.image_hw[i], key.canvas_hw, self.imgsz or int(self.index.image_hw[i].max()))
        image = letterbox(self.source_image(i), key.canvas_hw, fit, out)
        labels = self.index.labels(i).astype(np.float32, copy=True)
        labels[:, 1:] *= np.array([fit.width, fit.height] * 2, np.float32)
        labels[:, 1:3] += (fit.pad_x, fit.pad_y)
        labels[:, 1:] /= np.array([canvas_w, canvas_h] * 2, np.float32)
        return self.sample(key, image, labels, (fit.gain_x, fit.gain_y), (float(fit.pad_x), float(fit.pad_y)))

    def sample(
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
