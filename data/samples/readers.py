"""Readers of the source images and labels of samples.

A sample shows a whole image of a split (`ImageReader`) or a tile of one (`TileReader`); both are rendered in the same
way.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

import numpy as np

from data.images.decode import read_source, reduced_sizes
from data.index import DatasetIndex
from data.render.letterbox import CanvasRule
from data.samples.tiles import TiledIndex, crop_tile
from utils.batches import BatchRequest, SampleKey

# Maximum total size of the images that a worker keeps for the other samples of a block. The 16 images of a default
# block fit if their sides are at most 1600 pixels.
MAX_RECENT_BYTES = 128 << 20


class ImageCache(Protocol):
    """Decoded source images by number, regardless of storage (data/cache)."""

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns an image, (h, w, C), read-only. Raises UserError for damage."""


class SampleReader(ABC):
    """Reads the source images and labels of samples.

    Attributes:
        image_index: index of the split's images.
        sample_index: index of the N samples: the same, or one that describes each tile as if it were an image.
        imgsz: longer side of a letterboxed sample, pixels; None to keep the size of each.
        source_hw: int (N, 2), sizes of the source images that `read` returns.
        tiles: the tiles that are the samples; None if the samples are whole images.
        image_cache: decoded images; None if `read` decodes files.
    """

    tiles: TiledIndex | None
    image_cache: ImageCache | None

    def __init__(
        self, image_index: DatasetIndex, sample_index: DatasetIndex, *, imgsz: int | None, source_hw: np.ndarray
    ) -> None:
        self.image_index = image_index
        self.sample_index = sample_index
        self.imgsz = imgsz
        self.source_hw = source_hw

    @abstractmethod
    def read(self, i: int, epoch: int) -> np.ndarray:
        """Reads the source image of sample i in ``epoch``: (h, w, C), possibly read-only.

        Raises UserError if the file is unreadable.
        """

    @abstractmethod
    def labels_of(self, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of source images in ``epoch``; see `DatasetIndex.labels_of`."""

    @abstractmethod
    def origin_of(self, i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns height and width of the image that contains sample i, and the sample's left and top in it, pixels."""

    @abstractmethod
    def validation_batches(self, batch_size: int, canvases: CanvasRule) -> list[list[BatchRequest]]:
        """Returns lists of batches in which each sample occurs once. One process must read all batches of a list."""

    @abstractmethod
    def without_jitter(self) -> SampleReader:
        """Returns a reader whose samples do not change from epoch to epoch."""


class ImageReader(SampleReader):
    """Reads whole images, from a cache or from their files."""

    def __init__(
        self,
        image_index: DatasetIndex,
        *,
        imgsz: int | None,
        image_cache: ImageCache | None = None,
        antialias: bool = True,
    ) -> None:
        """
        Args:
            imgsz: longer side of source images and of letterboxed images, pixels; None to keep the size of each file.
            image_cache: made for the same index and imgsz; None to decode files.
            antialias: whether images are reduced to ``imgsz`` as for training, see `read_source`; otherwise
                letterboxing resizes whole images, as detection does. A cache contains reduced images.
        """
        if imgsz is None or (image_cache is None and not antialias):
            source_hw = image_index.image_hw
        else:
            source_hw = reduced_sizes(image_index.image_hw, imgsz)
        super().__init__(image_index, image_index, imgsz=imgsz, source_hw=source_hw)
        self.tiles = None
        self.image_cache = image_cache

    def read(self, i: int, epoch: int) -> np.ndarray:
        if self.image_cache is not None:
            return self.image_cache[i]
        return read_source(
            self.image_index.path(i), self.image_index.image_hw[i], self.source_hw[i], self.image_index.pixels
        )

    def labels_of(self, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.image_index.labels_of(samples)

    def origin_of(self, i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        height, width = self.image_index.image_hw[i].tolist()
        return (height, width), (0, 0)

    def validation_batches(self, batch_size: int, canvases: CanvasRule) -> list[list[BatchRequest]]:
        """See `SampleReader`. The images of a batch share a canvas, and the most frequent canvas comes first. If
        ``imgsz`` is None, each batch is one image at full size."""
        if self.imgsz is None:
            batches = [([i], (height, width)) for i, (height, width) in enumerate(self.image_index.image_hw.tolist())]
        else:
            batches = self._batches_by_canvas(batch_size, canvases)
        return [
            [BatchRequest(tuple(SampleKey(i, 0, i, canvas_hw) for i in images), canvas_hw)]
            for images, canvas_hw in batches
        ]

    def _batches_by_canvas(self, batch_size: int, canvases: CanvasRule) -> list[tuple[list[int], tuple[int, int]]]:
        """Groups images, in the order of the data set, into batches that share a canvas; returns images and canvas."""
        sizes, size_of_image = np.unique(self.image_index.image_hw, axis=0, return_inverse=True)
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

    def without_jitter(self) -> ImageReader:
        return self


class TileReader(SampleReader):
    """Cuts tiles from the cached images of a split."""

    tiles: TiledIndex
    image_cache: ImageCache

    def __init__(self, tiles: TiledIndex, *, imgsz: int | None, image_cache: ImageCache) -> None:
        """
        Args:
            imgsz: side of letterboxed tiles, pixels; None to keep the side of the tile.
            image_cache: ``tiles.image_index`` at full size.
        """
        super().__init__(tiles.image_index, tiles.tile_index, imgsz=imgsz, source_hw=tiles.tile_index.image_hw)
        self.tiles = tiles
        self.image_cache = image_cache

    def read(self, i: int, epoch: int) -> np.ndarray:
        left, top = self.tiles.corners(np.array([i]), epoch)[0].tolist()
        return crop_tile(self.image_cache[int(self.tiles.image[i])], (left, top), self.tiles.side)

    def labels_of(self, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tiles.labels_of(samples, epoch)

    def origin_of(self, i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        height, width = self.image_index.image_hw[self.tiles.image[i]].tolist()
        left, top = self.tiles.corners_on_grid[i].tolist()
        return (height, width), (left, top)

    def validation_batches(self, batch_size: int, canvases: CanvasRule) -> list[list[BatchRequest]]:
        """See `SampleReader`. One process reads all tiles of an image, and no batch mixes the tiles of two images."""
        canvas_hw = replace(canvases, is_square=True).canvas_hw((self.tiles.side, self.tiles.side))
        bounds = np.searchsorted(self.tiles.image, np.arange(len(self.image_index) + 1)).tolist()
        batches_of_images = []
        for first, end in itertools.pairwise(bounds):
            keys = tuple(SampleKey(i, 0, i, canvas_hw) for i in range(first, end))
            starts = range(0, len(keys), batch_size)
            batches_of_images.append([BatchRequest(keys[start : start + batch_size], canvas_hw) for start in starts])
        return batches_of_images

    def without_jitter(self) -> TileReader:
        return TileReader(self.tiles.without_jitter(), imgsz=self.imgsz, image_cache=self.image_cache)


class RecentImages:
    """Reads source images, and keeps the most recent ones, which other samples of a block may need."""

    def __init__(self, reader: SampleReader, *, max_images: int) -> None:
        """``reader``: reads files, whose images are the same in all epochs."""
        self._reader = reader
        self._max_images = max_images
        self._images: dict[int, np.ndarray] = {}
        self._nbytes = 0  # total size of the kept images

    def read(self, i: int, epoch: int) -> np.ndarray:
        """Reads the source image of sample i; see `SampleReader.read`."""
        image = self._images.get(i)
        if image is None:
            image = self._reader.read(i, epoch)
            self._keep(i, image)
        return image

    def _keep(self, i: int, image: np.ndarray) -> None:
        """Keeps an image, and drops the oldest ones beyond the limits."""
        self._images[i] = image
        self._nbytes += image.nbytes
        while len(self._images) > self._max_images or self._nbytes > MAX_RECENT_BYTES:
            oldest = self._images.pop(next(iter(self._images)))
            self._nbytes -= oldest.nbytes
