"""Tiles of large images as samples: ``tile`` in the data set's YAML, or as a checkpoint was trained.

A grid of overlapping tiles covers each image, and each tile is a sample, as an image is elsewhere. In training a tile
moves from epoch to epoch by at most half of the overlap, so that objects are not cut at the same places, and neighbors
still touch. Its position is a function of (seed, epoch, tile) alone.

Labels are clipped to the tile. Where less than ``tile_visibility`` of an object is left, it is ignored: neither an
object nor background. (The development kit of DOTA, Xia et al. 2018, marks such parts as difficult; SAHI, Akyon et al.
2022, leaves out parts below 0.1, which makes them background.)

Legend: N tiles of all images of a split, n of them requested. Corners are x, y of the upper left one, image pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from data.augment.plan import SamplePlan, plan_labels
from data.cache.decoding import Decoding
from data.cache.ram import RamCache, open_full_cache, open_ram_cache
from data.index.index import DatasetIndex
from data.render.letterbox import CanvasRule
from data.samples.augmented import AugmentedImages
from data.samples.batch_request import BatchRequest
from data.samples.dataset import LoadImagesAndLabels
from utils.boxes import TILE_OVERLAP, tile_windows
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.errors import UserError
from utils.logger import get_logger
from utils.rng import keyed_uniforms, named_stream
from utils.strings import counted
from utils.structures import Sample, SampleKey, padding_value


class TiledIndex:
    """The tiles of a split's images.

    Attributes:
        images: the split.
        index: the tiles as images, with the labels that they have on the grid.
        side: of a tile, pixels. A smaller image is padded on the right and below.
        image: int64 (N,), the image of each tile, ascending.
        windows: float32 (N, 4), x1, y1, x2, y2 of each tile on the grid, pixels of its image.
    """

    def __init__(
        self,
        images: DatasetIndex,
        side: int,
        *,
        hyp: Hyperparameters,
        seed: int | None = None,
        overlap: float = TILE_OVERLAP,
    ) -> None:
        """``seed``: to move the tiles; None: they stay on the grid. ``overlap``: of neighbors, fraction of a tile."""
        self.images, self.side, self.seed, self._visibility = images, side, seed, hyp.tile_visibility
        sizes = np.maximum(images.image_hw, side).tolist()
        grids = [tile_windows((height, width), side, overlap) for height, width in sizes]
        self.image = np.repeat(np.arange(len(images)), [len(grid) for grid in grids])
        self.windows = np.array([window for grid in grids for window in grid], np.float32).reshape(-1, 4)
        self._grid = self.windows[:, :2].astype(np.int64)
        self._reach = 0 if seed is None else round(side * overlap / 2)
        near = images.take(self.image)
        low = near.boxes_xywh_px[:, :2] - self._grid[near.image_of_box]
        high = low + near.boxes_xywh_px[:, 2:]
        self._near = near.with_boxes(((low < side + self._reach) & (high > -self._reach)).all(1))
        name = f"{images.fingerprint}-tile{side}-{self._visibility:g}"
        self.index = replace(self._clipped(self._near, self._grid), fingerprint=name)

    def corners(self, tiles: np.ndarray, epoch: int) -> np.ndarray:
        """Corners int64 (n, 2) of ``tiles`` int64 (n,) in an epoch."""
        corners = self._grid[tiles]
        if self.seed is None:
            return corners
        u = keyed_uniforms(self.seed, named_stream("tiles"), [(epoch, tile) for tile in tiles.tolist()], 2)
        room = np.maximum(self.images.image_hw[self.image[tiles], ::-1] - self.side, 0)
        return (corners + np.rint((2 * u - 1) * self._reach).astype(np.int64)).clip(0, room)

    def labels_of(self, tiles: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """As `DatasetIndex.labels_of`, of ``tiles`` where they are in an epoch."""
        return self._clipped(self._near.take(tiles), self.corners(tiles, epoch)).labels_of(np.arange(len(tiles)))

    def pixels(self, image: np.ndarray, tile: int, epoch: int) -> np.ndarray:
        """The part (side, side, C) of ``image`` (H, W, C) that a tile shows in an epoch; perhaps a view."""
        left, top = self.corners(np.array([tile]), epoch)[0].tolist()
        part = image[top : top + self.side, left : left + self.side]
        height, width = part.shape[:2]
        if (height, width) == (self.side, self.side):
            return part
        padded = np.full((self.side, self.side, *part.shape[2:]), padding_value(part.dtype), part.dtype)
        padded[:height, :width] = part
        return padded

    def repeats(self, backgrounds: float) -> np.ndarray:
        """How often an epoch has each tile, float64 (N,): once, but tiles without an object at most ``backgrounds``
        times as often as tiles with one, and not at all if the labels of their image are incomplete. Raises UserError
        if no tile has an object; warns if some objects are larger than tiles show."""
        objects = self.images.boxes_xywh_px[~self.images.crowd, 2:]
        hidden = int((np.minimum(objects, self.side).prod(1) < self._visibility * objects.prod(1)).sum())
        has_object = np.bincount(self.index.image_of_box[~self.index.crowd], minlength=len(self.index)) > 0
        with_object, without = int(has_object.sum()), int((~has_object).sum())
        if not with_object:
            raise UserError(f"tile {self.side}: no tile shows {self._visibility:.0%} of an object; use larger tiles")
        if hidden:
            get_logger().warning(
                "tile %d: %d of %s are so large that no tile shows %.0f %% of them; they are not learned: use larger "
                "tiles", self.side, hidden, counted(len(objects), "object"), 100 * self._visibility,
            )  # fmt: skip
        is_unknown = ~has_object & self.index.incomplete  # an object that could not be read may be in these
        without -= int(is_unknown.sum())
        times = min(backgrounds * with_object / max(without, 1), 1.0)
        get_logger().info(
            "tile %d: %s of %s, %d with objects; an epoch has %d without objects",
            self.side, counted(len(self.index), "tile"), counted(len(self.images), "image"), with_object,
            round(times * without),
        )  # fmt: skip
        return np.where(has_object, 1.0, np.where(is_unknown, 0.0, times))

    def _clipped(self, index: DatasetIndex, corners: np.ndarray) -> DatasetIndex:
        """``index``, of n tiles with boxes in image pixels, with the boxes as the tiles at ``corners`` show them."""
        boxes = index.boxes_xywh_px
        low = boxes[:, :2] - corners[index.image_of_box]
        start, end = low.clip(0, self.side), (low + boxes[:, 2:]).clip(0, self.side)
        seen = (end - start).prod(1) / boxes[:, 2:].prod(1)
        result = replace(
            index,
            image_hw=np.full((len(index), 2), self.side, np.int32),
            boxes_xywh_px=np.concatenate([start, end - start], 1),
            crowd=index.crowd | (seen < self._visibility - 1e-9),
            area_px=index.area_px * seen,
        )
        return result.with_boxes(seen > 0)


class TiledImages(LoadImagesAndLabels):
    """The tiles of a split, letterboxed."""

    tiles: TiledIndex

    def __init__(self, tiles: TiledIndex, *, image_cache: RamCache, **options: Any) -> None:
        """``image_cache``: of ``tiles.images`` at full size. ``options``: of the other base class."""
        super().__init__(tiles.index, image_cache=image_cache, **options)
        self.tiles, self.images = tiles, tiles.images
        self.source_hw = tiles.index.image_hw

    def requests(
        self, batch_size: int, canvases: CanvasRule, *, rank: int = 0, world_size: int = 1
    ) -> list[BatchRequest]:
        """Batches of at most ``batch_size`` tiles of one image, of the images numbered rank, rank + world_size, ..."""
        canvas_hw = replace(canvases, is_square=True).canvas_hw((self.tiles.side, self.tiles.side))
        bounds = np.searchsorted(self.tiles.image, np.arange(len(self.images) + 1)).tolist()
        requests = []
        for image in range(rank, len(self.images), world_size):
            keys = [SampleKey(i, 0, i, canvas_hw) for i in range(*bounds[image : image + 2])]
            batches = (keys[start : start + batch_size] for start in range(0, len(keys), batch_size))
            requests += [BatchRequest(tuple(batch), canvas_hw) for batch in batches]
        return requests

    def source_image(self, i: int, epoch: int = 0) -> np.ndarray:
        """(side, side, C), the tile as it is in ``epoch``; perhaps read-only."""
        return self.tiles.pixels(self.image_cache[int(self.tiles.image[i])], i, epoch)

    def sample(
        self,
        key: SampleKey,
        image: np.ndarray,
        labels: np.ndarray,
        gain_xy: tuple[float, float] = (1.0, 1.0),
        pad_xy: tuple[float, float] = (0.0, 0.0),
    ) -> Sample:
        """Size and letterbox are those of the tile's image: detections in the tile become those in the image."""
        left, top = self.tiles.windows[key.index, :2].tolist()
        pad_xy = (pad_xy[0] - gain_xy[0] * left, pad_xy[1] - gain_xy[1] * top)
        height, width = self.images.image_hw[self.tiles.image[key.index]].tolist()
        return replace(super().sample(key, image, labels, gain_xy, pad_xy), original_hw=(height, width))


class AugmentedTiles(TiledImages, AugmentedImages):
    """The tiles of a training split, which move from epoch to epoch, augmented. All keys of a batch have one epoch."""

    def source_images(self, keys: Sequence[SampleKey]) -> Callable[[int], np.ndarray]:
        return partial(self.source_image, epoch=_epoch_of(keys))

    def plan_labels(self, keys: Sequence[SampleKey], plans: Sequence[SamplePlan]) -> list[np.ndarray]:
        return plan_labels(plans, self.source_hw, partial(self.tiles.labels_of, epoch=_epoch_of(keys)))

    def repeats(self) -> np.ndarray:
        return self.tiles.repeats(self.hyp.tile_backgrounds)

    def without_augmentation(self) -> TiledImages:
        grid = TiledIndex(self.images, self.tiles.side, hyp=self.hyp)
        return TiledImages(grid, imgsz=self.imgsz, image_cache=self.image_cache)


def _epoch_of(keys: Sequence[SampleKey]) -> int:
    return keys[0].epoch if keys else 0


def open_tiles(
    ctx: DistributedContext,
    config: TrainConfig | ValConfig,
    images: DatasetIndex,
    hyp: Hyperparameters,
    threads: int,
    options: dict[str, Any],
) -> TiledImages:
    """The tiles of a split, of the side ``images.tile``. Its images are decoded once, into a file on the disk or, with
    ``--cache ram``, into memory. Every process of the run must call this. ``options``: of `AugmentedImages`, for a
    training split, or of `LoadImagesAndLabels`."""
    cache = config.cache if isinstance(config, TrainConfig) else "none"
    if cache == "device":
        raise UserError("--cache device: cannot keep tiles ('tile' in the data set's YAML); use --cache ram or none")
    is_training = "hyp" in options
    seed = config.seed if is_training else None
    overlap = (isinstance(config, ValConfig) and config.overlap) or TILE_OVERLAP
    decoding = Decoding(threads, ctx.is_main)
    with torch_distributed_zero_first(ctx):
        if cache == "ram":
            image_cache = open_ram_cache(images, 0, decoding, ctx)
        else:
            image_cache = open_full_cache(images, config.cache_dir, decoding)
    tiles = TiledIndex(images, images.tile, hyp=hyp, seed=seed, overlap=overlap)
    return (AugmentedTiles if is_training else TiledImages)(tiles, image_cache=image_cache, **options)
