"""`TiledIndex`: tiles of large images as samples, for ``tile`` in a data set's YAML or in a checkpoint.

A grid of overlapping tiles covers each image, and each tile is a sample. In training a tile moves from epoch to epoch
by at most half of the overlap, so that objects are cut at varying places while neighbors still touch. Its position is a
function of (seed, epoch, tile) alone.

Labels are clipped to the tile. An object is ignored, as neither object nor background, if less than ``tile_visibility``
of its area is left. (The development kit of DOTA, Xia et al. 2018, marks such fragments as difficult; SAHI, Akyon et
al. 2022, drops fragments below 0.1, which makes them background.)

Legend: N tiles of all images of a split, n requested tiles. A corner is x, y of a tile's upper left, image pixels.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from data.index import DatasetIndex, normalized_labels
from utils.boxes import TILE_OVERLAP, tile_windows
from utils.config.settings import Hyperparameters
from utils.labels import rows_of
from utils.pixels import padding_value
from utils.rng import keyed_uniforms, named_stream

_ROUNDING = 1e-9  # tolerance for rounding errors of a visible fraction
_MAX_PAIRS = 1 << 18  # of a tile and a box that are compared at once, some 25 MB


class TiledIndex:
    """The tiles of a split's images.

    Attributes:
        image_index: index of the split's images.
        tile_index: index of the tiles as if they were images, with their labels on the grid.
        side: side of a tile, pixels. A smaller image is padded on the right and at the bottom.
        visibility: an object is ignored if a tile shows less than this fraction of its area.
        image: int64 (N,), the image of each tile, ascending.
        windows: float32 (N, 4), x1, y1, x2, y2 of each tile on the grid, pixels of its image.
        corners_on_grid: int64 (N, 2), the first two of them, whole pixels.
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
        self.visibility = hyp.tile_visibility
        sizes = np.maximum(image_index.image_hw, side).tolist()
        grids = [tile_windows((height, width), side, overlap) for height, width in sizes]
        self.image = np.repeat(np.arange(len(image_index)), [len(grid) for grid in grids])
        self.windows = np.array([window for grid in grids for window in grid], np.float32).reshape(-1, 4)
        self.corners_on_grid = self.windows[:, :2].astype(np.int64)
        self._max_shift = 0 if seed is None else round(side * overlap) // 2
        self._nearby = self._find_nearby_boxes()
        self.tile_index = self._index_on_grid()

    def _find_nearby_boxes(self) -> _NearbyBoxes:
        """Finds the boxes that each tile may show in some epoch."""
        num_pairs = np.cumsum(np.diff(self.image_index.offsets)[self.image])  # of tiles and boxes of their images
        last_pair = num_pairs[-1] if len(num_pairs) else 0
        group_ends = np.searchsorted(num_pairs, np.arange(_MAX_PAIRS, last_pair, _MAX_PAIRS))
        all_tiles = np.arange(len(self.image))
        nearby = [self._nearby_pairs(tiles) for tiles in np.split(all_tiles, group_ends)]
        counts = np.bincount(np.concatenate([tile for _, tile in nearby]), minlength=len(self.image))
        return _NearbyBoxes(np.concatenate([rows for rows, _ in nearby]), np.r_[0, np.cumsum(counts)])

    def _nearby_pairs(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns pairs of a box and a tile that may show it, for ``tiles`` (n,): rows and tiles, int64 (m,) each."""
        rows, position = rows_of(self.image_index.offsets, self.image[tiles])
        tile = tiles[position]
        boxes = self.image_index.boxes_xywh_px[rows]
        low = boxes[:, :2] - self.corners_on_grid[tile]
        high = low + boxes[:, 2:]
        is_nearby = ((low < self.side + self._max_shift) & (high > -self._max_shift)).all(1)
        return rows[is_nearby], tile[is_nearby]

    def _index_on_grid(self) -> DatasetIndex:
        """Returns the index of the tiles at their places on the grid."""
        rows = self._nearby.rows
        tile = np.repeat(np.arange(len(self.image)), np.diff(self._nearby.offsets))
        boxes, visible = clip_to_tiles(self.image_index.boxes_xywh_px[rows], self.corners_on_grid[tile], self.side)
        is_shown = visible > 0
        counts = np.bincount(tile[is_shown], minlength=len(self.image))
        index = self.image_index.take_with_boxes(self.image, rows[is_shown], counts)
        return replace(
            index,
            image_hw=np.full((len(index), 2), self.side, np.int32),
            boxes_xywh_px=boxes[is_shown],
            crowd=index.crowd | self._is_fragment(visible[is_shown]),
            area_px=index.area_px * visible[is_shown],
        )

    def _is_fragment(self, visible: np.ndarray) -> np.ndarray:
        """Returns which objects are ignored, bool (n,), when tiles show the fractions ``visible`` (n,) of them."""
        return visible < self.visibility - _ROUNDING

    def corners(self, tiles: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the corners int64 (n, 2) of ``tiles`` int64 (n,) in an epoch."""
        corners = self.corners_on_grid[tiles]
        if self.seed is None:
            return corners
        u = keyed_uniforms(self.seed, named_stream("tiles"), [(epoch, tile) for tile in tiles.tolist()], 2)
        last_corners = np.maximum(self.image_index.image_hw[self.image[tiles], ::-1] - self.side, 0)
        shifts = np.rint((2 * u - 1) * self._max_shift).astype(np.int64)
        return (corners + shifts).clip(0, last_corners)

    def labels_of(self, tiles: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of ``tiles`` at their positions in an epoch; see `DatasetIndex.labels_of`."""
        nearby, tile = rows_of(self._nearby.offsets, tiles)
        rows = self._nearby.rows[nearby]
        corners = self.corners(tiles, epoch)[tile]
        boxes, visible = clip_to_tiles(self.image_index.boxes_xywh_px[rows], corners, self.side)
        crowd = self.image_index.crowd[rows] | self._is_fragment(visible)
        labels = normalized_labels(boxes, self.image_index.classes[rows], crowd, self.side)
        is_shown = visible > 0
        return labels[is_shown], tile[is_shown]

    def without_jitter(self) -> TiledIndex:
        """Returns the same tiles, which stay on the grid in every epoch."""
        grid = copy(self)
        grid.seed = None
        return grid

    @property
    def has_object(self) -> np.ndarray:
        """Tiles that show an object at their places on the grid, without regions to ignore: bool (N,)."""
        is_object = ~self.tile_index.crowd
        return np.bincount(self.tile_index.image_of_box[is_object], minlength=len(self.tile_index)) > 0


class _NearbyBoxes(NamedTuple):
    """The boxes that each of N tiles may show, as rows of the image index's arrays."""

    rows: np.ndarray  # int64 (n,)
    offsets: np.ndarray  # int64 (N + 1,): tile i has rows[offsets[i]:offsets[i + 1]]


def clip_to_tiles(boxes_xywh_px: np.ndarray, corners: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Clips boxes, (n, 4) in pixels of their images, each to a tile at the corner in ``corners`` (n, 2).

    Returns the boxes in pixels of the tiles, float64 (n, 4), and the visible fraction of each, float64 (n,).
    """
    low = boxes_xywh_px[:, :2] - corners
    start = low.clip(0, side)
    end = (low + boxes_xywh_px[:, 2:]).clip(0, side)
    visible = (end - start).prod(1) / boxes_xywh_px[:, 2:].prod(1)
    return np.concatenate([start, end - start], 1), visible


def crop_tile(image: np.ndarray, corner: tuple[int, int], side: int) -> np.ndarray:
    """Cuts a tile from ``image`` (H, W, C) at its left and top ``corner``: (side, side, C), possibly a view. Pixels
    outside the image are gray."""
    left, top = corner
    crop = image[top : top + side, left : left + side]
    height, width = crop.shape[:2]
    if (height, width) == (side, side):
        return crop
    padded = np.full((side, side, *crop.shape[2:]), padding_value(crop.dtype), crop.dtype)
    padded[:height, :width] = crop
    return padded
