"""Samples from tiles of large images (`TiledIndex`): `TiledImages`, and `AugmentedTiles` for training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data.cache.decoding import Decoding
from data.cache.ram import RamCache, open_full_cache, open_ram_cache
from data.index.index import DatasetIndex
from data.render.letterbox import CanvasRule
from data.samples.augmented import AugmentedImages
from data.samples.batch_request import BatchRequest
from data.samples.dataset import LoadImagesAndLabels
from data.samples.tiled_index import TiledIndex
from utils.config.settings import Hyperparameters
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import UserError
from utils.structures import SampleKey


class TiledImages(LoadImagesAndLabels):
    """Renders the tiles of a split, letterboxed."""

    tiles: TiledIndex
    image_cache: RamCache  # the images at full size

    def __init__(self, tiles: TiledIndex, *, imgsz: int | None, image_cache: RamCache) -> None:
        """
        Args:
            imgsz: side of letterboxed tiles, pixels; None to keep the side of the tile.
            image_cache: ``tiles.images`` at full size.
        """
        super().__init__(tiles.index, imgsz=imgsz, image_cache=image_cache, tiles=tiles)

    def requests(
        self, batch_size: int, canvases: CanvasRule, *, rank: int = 0, world_size: int = 1
    ) -> list[BatchRequest]:
        """Returns batches of at most ``batch_size`` tiles of one image, for images rank, rank + world_size, ..."""
        canvas_hw = replace(canvases, is_square=True).canvas_hw((self.tiles.side, self.tiles.side))
        bounds = np.searchsorted(self.tiles.image, np.arange(len(self.split_index) + 1)).tolist()
        requests = []
        for image in range(rank, len(self.split_index), world_size):
            keys = [SampleKey(i, 0, i, canvas_hw) for i in range(*bounds[image : image + 2])]
            batches = (keys[start : start + batch_size] for start in range(0, len(keys), batch_size))
            requests += [BatchRequest(tuple(batch), canvas_hw) for batch in batches]
        return requests

    def source_image(self, i: int, epoch: int = 0) -> np.ndarray:
        """Cuts tile i as it is in ``epoch``: (side, side, C), possibly read-only."""
        return self.tiles.pixels(self.image_cache[int(self.tiles.image[i])], i, epoch)

    def labels_of(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tiles.labels_of(indices, epoch)

    def part_of(self, i: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the size of the whole image, to which detections then refer, and the place of tile i in it."""
        height, width = self.split_index.image_hw[self.tiles.image[i]].tolist()
        left, top = self.tiles.windows[i, :2].tolist()
        return (height, width), (left, top)


class AugmentedTiles(TiledImages, AugmentedImages):
    """Renders augmented tiles of a training split, which move from epoch to epoch."""

    def __init__(
        self,
        tiles: TiledIndex,
        *,
        imgsz: int,
        image_cache: RamCache,
        hyp: Hyperparameters | None = None,
        seed: int = 0,
        epochs: int = 1,
        rect: bool = False,
    ) -> None:
        """Takes the arguments of `TiledImages` and `AugmentedImages`."""
        AugmentedImages.__init__(
            self,
            tiles.index,
            imgsz=imgsz,
            image_cache=image_cache,
            hyp=hyp,
            seed=seed,
            epochs=epochs,
            rect=rect,
            tiles=tiles,
        )

    def repeats(self) -> np.ndarray:
        return self.tiles.repeats(self.hyp.tile_backgrounds)

    def without_augmentation(self) -> TiledImages:
        grid = TiledIndex(self.split_index, self.tiles.side, hyp=self.hyp)
        return TiledImages(grid, imgsz=self.imgsz, image_cache=self.image_cache)


def open_image_cache(
    ctx: DistributedContext, images: DatasetIndex, cache: str, cache_dir: str, decoding: Decoding
) -> RamCache:
    """Opens the cache that tiles are cut from: images decoded once at full size.

    They are in memory with ``cache`` "ram", otherwise in a file on the disk. Every process of the run must call this.
    Raises UserError for ``cache`` "device".
    """
    if cache == "device":
        raise UserError("--cache device: cannot keep tiles ('tile' in the data set's YAML); use --cache ram or none")
    with torch_distributed_zero_first(ctx):
        if cache == "ram":
            return open_ram_cache(images, 0, decoding, ctx)
        return open_full_cache(images, cache_dir, decoding)
