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

from dataclasses import replace

import numpy as np

from data.index.index import DatasetIndex
from utils.boxes import TILE_OVERLAP, tile_windows
from utils.config.settings import Hyperparameters
from utils.errors import UserError
from utils.logger import get_logger
from utils.rng import keyed_uniforms, named_stream
from utils.strings import counted
from utils.structures import padding_value


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
