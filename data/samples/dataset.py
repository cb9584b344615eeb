"""`LoadImagesAndLabels`: the letterboxed samples of a split, rendered by key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from data.image_io.decode import read_source, reduced_sizes
from data.index.index import DatasetIndex
from data.render.letterbox import CanvasRule, Letterbox, fit_letterbox, letterbox
from data.samples.batch_request import BatchRequest
from utils.structures import Sample, SampleKey

if TYPE_CHECKING:
    from data.cache.disk import DiskCache
    from data.cache.ram import RamCache
    from data.samples.tiled_index import TiledIndex


class LoadImagesAndLabels:
    """Renders letterboxed samples of a split. The same key gives the same sample in any process and any order.

    The longer side is scaled, up or down, to ``imgsz``; without ``imgsz`` images keep their size. Subclasses render
    training samples (`data.samples.augmented`) and tiles of large images (`data.samples.tiles`).
    """

    def __init__(
        self,
        index: DatasetIndex,
        *,
        imgsz: int | None,
        image_cache: RamCache | DiskCache | None = None,
        reduces: bool = True,
        tiles: TiledIndex | None = None,
    ) -> None:
        """
        Args:
            imgsz: longer side of source images and of letterboxed images, pixels; None for that of each image file.
            image_cache: made for the same index and imgsz.
            reduces: whether source images are reduced to ``imgsz`` when they are decoded, as for training; otherwise
                letterboxing resizes whole images, as detection does.
            tiles: the tiles that serve as samples, with ``index`` describing them; None if whole images do.
        """
        self.index = index
        self.tiles = tiles
        self.split_index = index if tiles is None else tiles.images  # the images that the samples are taken from
        self.imgsz = imgsz
        self.image_cache = image_cache
        if imgsz is None or tiles is not None or (image_cache is None and not reduces):
            self.source_hw = index.image_hw
        else:
            self.source_hw = reduced_sizes(index.image_hw, imgsz)

    def __len__(self) -> int:
        return len(self.index)

    def requests(
        self, batch_size: int, canvases: CanvasRule, *, rank: int = 0, world_size: int = 1
    ) -> list[BatchRequest]:
        """Returns a rank's batches for a validation, in which each sample comes once over all ranks.

        The images of a batch share a canvas, and the most frequent canvas comes first. Without ``imgsz`` each batch is
        one image at full size.
        """
        if self.imgsz is None:
            batches = [([i], (height, width)) for i, (height, width) in enumerate(self.index.image_hw.tolist())]
        else:
            batches = self._batches_by_canvas(batch_size, canvases)
        requests = [BatchRequest(tuple(SampleKey(i, 0, i, size) for i in members), size) for members, size in batches]
        return requests[rank::world_size]

    def _batches_by_canvas(self, batch_size: int, canvases: CanvasRule) -> list[tuple[list[int], tuple[int, int]]]:
        """Groups images, in the order of the data set, into batches that share a canvas, with the canvas of each."""
        sizes, size_of_image = np.unique(self.index.image_hw, axis=0, return_inverse=True)
        canvas_of_size = np.array([canvases.canvas_hw(size) for size in sizes.tolist()], np.int64).reshape(-1, 2)
        canvas_of_image = canvas_of_size[size_of_image.reshape(-1)]
        distinct, number, counts = np.unique(canvas_of_image, axis=0, return_inverse=True, return_counts=True)
        batches = []
        for canvas in np.argsort(-counts, kind="stable"):  # by descending frequency
            images = np.flatnonzero(number.reshape(-1) == canvas).tolist()
            height, width = distinct[canvas].tolist()
            for start in range(0, len(images), batch_size):
                batches.append((images[start : start + batch_size], (height, width)))
        return batches

    def source_image(self, i: int, epoch: int = 0) -> np.ndarray:
        """Reads image i as it is in ``epoch``: (h, w, C), longer side at most imgsz, possibly read-only.

        Raises UserError if the file is unreadable.
        """
        if self.image_cache is not None:
            return self.image_cache[i]
        index = self.index
        return read_source(index.path(i), index.image_hw[i], self.source_hw[i], index.pixels)

    def labels_of(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of source images as they are in ``epoch``; see `DatasetIndex.labels_of`."""
        return self.index.labels_of(indices)

    def __getitem__(self, key: SampleKey) -> Sample:
        """Renders the sample of ``key``. Raises UserError for a file that cannot be decoded."""
        return self.samples([key])[0]

    def samples(
        self, keys: Sequence[SampleKey], outs: Iterable[np.ndarray | None] = repeat(None), *, epochs: int | None = None
    ) -> list[Sample]:
        """Renders the samples of ``keys``, all of one epoch, each independently of the others.

        Args:
            outs: an array (H, W, C) per sample to render into, which saves a copy. Its content is undefined if the
                sample returns another array.
            epochs: length of the whole run, if it has changed since this data set was made; used by augmentation.
        """
        return [self._letterboxed(key, out) for key, out in zip(keys, outs)]

    def _letterboxed(self, key: SampleKey, out: np.ndarray | None) -> Sample:
        i = key.index
        canvas_h, canvas_w = key.canvas_hw
        fit = fit_letterbox(self.index.image_hw[i], key.canvas_hw, self.imgsz or int(self.index.image_hw[i].max()))
        image = letterbox(self.source_image(i), key.canvas_hw, fit, out)
        labels = self.index.labels(i).astype(np.float32, copy=True)
        labels[:, 1:] *= np.array([fit.width, fit.height] * 2, np.float32)
        labels[:, 1:3] += (fit.pad_x, fit.pad_y)
        labels[:, 1:] /= np.array([canvas_w, canvas_h] * 2, np.float32)
        return self.sample(key, image, labels, fit)

    def sample(self, key: SampleKey, image: np.ndarray, labels: np.ndarray, fit: Letterbox | None = None) -> Sample:
        """Packs a rendered image and its labels into a `Sample`. ``fit``: None if the image is augmented."""
        (height, width), (left, top) = self.part_of(key.index)
        gain_xy = (1.0, 1.0) if fit is None else (fit.gain_x, fit.gain_y)
        pad_x, pad_y = (0.0, 0.0) if fit is None else (float(fit.pad_x), float(fit.pad_y))
        return Sample(
            image=image,
            labels=labels,
            index=key.index,
            path=self.index.path(key.index),
            original_hw=(height, width),
            gain_xy=gain_xy,
            pad_xy=(pad_x - gain_xy[0] * left, pad_y - gain_xy[1] * top),
        )

    def part_of(self, i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the size of the image that sample i is a part of, height and width, and the left and top of the
        sample in it; in pixels."""
        height, width = self.index.image_hw[i].tolist()
        return (height, width), (0, 0)
