"""`TiledIndex`: tiles of large images as samples, for ``tile`` in a data set's YAML or in a checkpoint.

A grid of overlapping tiles covers each image, and each tile is a sample of its own. In training a tile moves from epoch
to epoch by at most half of the overlap, so that objects are cut at varying places while neighbors still touch. Its
position is a function of (seed, epoch, tile) alone.

Labels are clipped to the tile. An object of which less than ``tile_visibility`` is left is ignored: it is neither an
object nor background. (The development kit of DOTA, Xia et al. 2018, marks such fragments as difficult; SAHI, Akyon et
al. 2022, leaves out fragments below 0.1, which makes them background.)

Legend: N tiles of all images of a split, n of them requested. A corner is x, y of a tile's upper left, image pixels.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np

from data.index.index import DatasetIndex
from utils.boxes import TILE_OVERLAP, tile_windows
from utils.config.settings import Hyperparameters
from utils.errors import UserError
from utils.logger import get_logger
from utils.pixels import padding_value
from utils.rng import keyed_uniforms, named_stream
from utils.strings import counted


class TiledIndex:
    """The tiles of a split's images.

    Attributes:
        image_index: index of the split's images.
        tile_index: index of the tiles as if they were images, with their labels on the grid.
        side: side of a tile, pixels. A smaller image is padded on the right and at the bottom.
        image: int64 (N,), the image of each tile, ascending.
        windows: float32 (N, 4), x1, y1, x2, y2 of each tile on the grid, pixels of its image.
    """

    def __init__(
        self,
        image_index: DatasetIndex,
        side: int,
        *,
        hyp: Hyperparameters,
        seed: int | None = None,
        overlap: float = TILE_OVERLAP,
    ) -> None:
        """
        Args:
            seed: determines how the tiles move; None if they stay on the grid.
            overlap: overlap of neighbors, as a fraction of a tile.
        """
        self.image_index = image_index
        self.side = side
        self.seed = seed
        self._visibility = hyp.tile_visibility
        sizes = np.maximum(image_index.image_hw, side).tolist()
        grids = [tile_windows((height, width), side, overlap) for height, width in sizes]
        self.image = np.repeat(np.arange(len(image_index)), [len(grid) for grid in grids])
        self.windows = np.array([window for grid in grids for window in grid], np.float32).reshape(-1, 4)
        self._grid = self.windows[:, :2].astype(np.int64)
        self._reach = 0 if seed is None else round(side * overlap / 2)
        self._reachable = self._reachable_boxes()
        name = f"{image_index.fingerprint}-tile{side}-{self._visibility:g}"
        self.tile_index = replace(self._clipped(self._reachable, self._grid), fingerprint=name)

    def _reachable_boxes(self) -> DatasetIndex:
        """Returns the whole boxes that each tile may show in some epoch, in pixels of its image."""
        of_image = self.image_index.take(self.image)
        low = of_image.boxes_xywh_px[:, :2] - self._grid[of_image.image_of_box]
        high = low + of_image.boxes_xywh_px[:, 2:]
        return of_image.with_boxes(((low < self.side + self._reach) & (high > -self._reach)).all(1))

    def corners(self, tiles: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the corners int64 (n, 2) of ``tiles`` int64 (n,) in an epoch."""
        corners = self._grid[tiles]
        if self.seed is None:
            return corners
        u = keyed_uniforms(self.seed, named_stream("tiles"), [(epoch, tile) for tile in tiles.tolist()], 2)
        last_corners = np.maximum(self.image_index.image_hw[self.image[tiles], ::-1] - self.side, 0)
        shifts = np.rint((2 * u - 1) * self._reach).astype(np.int64)
        return (corners + shifts).clip(0, last_corners)

    def labels_of(self, tiles: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of ``tiles`` at their positions in an epoch; see `DatasetIndex.labels_of`."""
        return self._clipped(self._reachable.take(tiles), self.corners(tiles, epoch)).labels_of(np.arange(len(tiles)))

    def at_rest(self) -> TiledIndex:
        """Returns the same tiles, which stay on the grid."""
        grid = copy(self)
        grid.seed = None
        return grid

    def pixels(self, image: np.ndarray, tile: int, epoch: int) -> np.ndarray:
        """Cuts a tile, as it is in an epoch, from ``image`` (H, W, C): (side, side, C), possibly a view."""
        left, top = self.corners(np.array([tile]), epoch)[0].tolist()
        crop = image[top : top + self.side, left : left + self.side]
        height, width = crop.shape[:2]
        if (height, width) == (self.side, self.side):
            return crop
        padded = np.full((self.side, self.side, *crop.shape[2:]), padding_value(crop.dtype), crop.dtype)
        padded[:height, :width] = crop
        return padded

    def weights(self, backgrounds: float) -> np.ndarray:
        """Returns how often each tile comes in an epoch, on average: float64 (N,).

        A tile with an object comes once. Tiles without one come, all together, at most ``backgrounds`` times as often
        as those with one, and not at all if the labels of their image are incomplete. Raises UserError if no tile has
        an object; warns if some objects are too large for any tile.
        """
        is_object = ~self.tile_index.crowd
        has_object = np.bincount(self.tile_index.image_of_box[is_object], minlength=len(self.tile_index)) > 0
        with_object = int(has_object.sum())
        if not with_object:
            raise UserError(f"tile {self.side}: no tile shows {self._visibility:.0%} of an object; use larger tiles")
        self._warn_about_large_objects()
        is_background = ~has_object & ~self.tile_index.incomplete  # others may show an object that could not be read
        without_object = int(is_background.sum())
        times = min(backgrounds * with_object / max(without_object, 1), 1.0)
        get_logger().info(
            "tile %d: %s of %s, %d with objects; an epoch has %d without objects",
            self.side,
            counted(len(self.tile_index), "tile"),
            counted(len(self.image_index), "image"),
            with_object,
            round(times * without_object),
        )
        return np.where(has_object, 1.0, np.where(is_background, times, 0.0))

    def _warn_about_large_objects(self) -> None:
        """Warns if some objects are too large for any tile."""
        objects_wh = self.image_index.boxes_xywh_px[~self.image_index.crowd, 2:]
        largest_shown = np.minimum(objects_wh, self.side).prod(1)
        hidden = int((largest_shown < self._visibility * objects_wh.prod(1)).sum())
        if hidden:
            get_logger().warning(
                "tile %d: %d of %s are so large that no tile shows %.0f %% of them; they are not learned: use larger "
                "tiles",
                self.side,
                hidden,
                counted(len(objects_wh), "object"),
                100 * self._visibility,
            )

    def _clipped(self, index: DatasetIndex, corners: np.ndarray) -> DatasetIndex:
        """Clips the boxes of ``index``, n tiles with boxes in image pixels, to the tiles at ``corners`` (n, 2)."""
        boxes = index.boxes_xywh_px
        low = boxes[:, :2] - corners[index.image_of_box]
        start = low.clip(0, self.side)
        end = (low + boxes[:, 2:]).clip(0, self.side)
        visible = (end - start).prod(1) / boxes[:, 2:].prod(1)
        result = replace(
            index,
            image_hw=np.full((len(index), 2), self.side, np.int32),
            boxes_xywh_px=np.concatenate([start, end - start], 1),
            crowd=index.crowd | (visible < self._visibility - 1e-9),
            area_px=index.area_px * visible,
        )
        return result.with_boxes(visible > 0)
