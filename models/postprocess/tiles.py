"""Detection in large images: a detector sees overlapping tiles at full resolution, and perhaps the whole image scaled
down; the detections of all these views are joined, so that each object has one box.

Two boxes of different views belong to one object if they agree where both views see it: clipped to the views' common
area, their IoU is high. This holds for two boxes of the whole object, for a whole box and a part cut off by the border
of a tile, and for two parts of an object that no tile sees whole. All boxes linked in this way become one box, and each
of its sides comes from the best box that sees the side. A box does not see a side where the border of its view cuts the
object. A box that is still cut after that, but lies in a larger box of another view, is a part of it and is dropped,
even if its score is higher. NMS comes last.

Boxes are xyxy pixels of the canvas, which is the image, padded right and below where it is smaller than a tile.

Legend: T views of an image, K detections a view, N detections of all views, G clusters of boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from models.detector import CPU_CHUNK
from models.postprocess.nms import nms_keep
from models.postprocess.selection import PostprocessSettings
from utils.boxes import TILE_OVERLAP, area_xyxy, tile_windows
from utils.config.image_size import check_image_size
from utils.config.settings import MAX_CANDIDATES, DetectConfig, ValConfig
from utils.detections import Detections, DetectionTable
from utils.errors import UserError
from utils.pixels import GRAY
from utils.schema import Bounds, checked_value, hints_of

# Maps raw maps (float32) of a detector to detections in pixels of its input: one or several selections of its boxes.
Select: TypeAlias = Callable[[list[Tensor]], Sequence[Detections]]
# Chosen by measurement (benchmarks/LOG.md); AP changes little from 0.3 to 0.6, 0.4 to 0.8 and 0.5 to 3 %.
LINK_IOU = 0.5  # IoU from which two boxes, clipped to the common area of their views, are linked
PART_FRACTION = 0.5  # a cut box is a part of a larger one that contains at least this fraction of it,
PART_SCORE = 0.1  # and whose score is at least this fraction of its own, so that the larger one is not noise
CUT_MARGIN = 0.01  # fraction of the view's side: a box side this close to the border counts as cut
CROSS_VIEW_IOU = 0.7  # NMS threshold for boxes of an end-to-end head, which need no NMS within a view


@dataclass(frozen=True)
class Tiles:
    """Settings for cutting large images into tiles. Raises UserError for values that no model takes."""

    size: Annotated[int, Bounds(1)]  # side, pixels
    overlap: Annotated[float, Bounds(0, 0.9)] = TILE_OVERLAP  # overlap of neighbors, as a fraction of a tile
    full_image: bool = True  # whether the detector also runs on the whole image, scaled down
    scaled: bool = False  # whether tiles are scaled to the detector's image size, as in training

    def __post_init__(self) -> None:
        for name, hint in hints_of(Tiles).items():
            # The dataclass is frozen.
            object.__setattr__(self, name, checked_value(f"Tiles: {name}", getattr(self, name), hint))

    @classmethod
    def as_trained(cls, size: int, overlap: float = TILE_OVERLAP) -> Tiles:
        """Returns the tiles of a model that was trained on tiles of this size."""
        return cls(size, overlap, full_image=False, scaled=True)

    @classmethod
    def from_config(cls, config: DetectConfig | ValConfig, trained_size: int) -> Tiles | None:
        """Returns the tiles that the flags choose; without ``--tile``, the tiles on which the model was trained.

        ``trained_size``: side of those tiles in pixels, or 0 for training on whole images. Returns None for detection
        in whole images.
        """
        overlap = TILE_OVERLAP if config.overlap is None else config.overlap
        if config.tile:
            return cls(config.tile, overlap, config.tile_full_image)
        return cls.as_trained(trained_size, overlap) if config.tile is None and trained_size else None

    def check(self, stride: int, input_hw: tuple[int, int] | None) -> None:
        """Raises UserError unless a model of this ``stride`` accepts the tiles. ``input_hw``: the only canvas size that
        it accepts; None: any."""
        if not self.scaled:
            check_image_size(self.size, stride, flag="--tile")
        if input_hw is None:
            return
        height, width = input_hw
        fits = height == width if self.scaled else input_hw == (self.size, self.size)
        if not fits:
            tiles = "it was trained on square tiles" if self.scaled else f"--tile is {self.size}"
            raise UserError(
                f"the exported model takes only {height}x{width} pixels (height x width), but {tiles}; detect in whole "
                "images with --tile 0 (in Python: tiles=False)"
            )


class TiledDetector(nn.Module):
    """Wraps a detector to find the objects of one large image at a time. It is called like the detector, and `stitch`
    selects from what it returns.

    Args:
        select: of ``detector``; makes a selection for each of ``settings``.
        stride: the sides of what the detector sees are multiples of it, pixels.
        imgsz: longer side to which a whole image is scaled down, pixels.
        only_hw: the only size that the detector accepts, pixels; None: any.
        batch: views per call; on a CPU, `CPU_CHUNK`.
    """

    def __init__(
        self,
        detector: nn.Module,
        select: Select,
        settings: Sequence[PostprocessSettings],
        *,
        tiles: Tiles,
        stride: int,
        imgsz: int,
        only_hw: tuple[int, int] | None,
        batch: int,
    ) -> None:
        super().__init__()
        self.detector = detector
        self._select = select
        self._settings = settings
        self._tiles = tiles
        self._stride = stride
        self._imgsz = imgsz
        self._only_hw = only_hw
        self._batch = batch

    def forward(self, images: Tensor) -> list[Tensor]:
        """Runs detection on all views of an image.

        Args:
            images: float (1, channels, H, W) in [0, 1].

        Returns the input of `stitch`: the windows of all views (T, 4), then for each selection their boxes (T, K, 4),
        scores (T, K), classes (T, K) and counts (T,).
        """
        tile = self._tiles.size
        height, width = images.shape[2:]
        images = pad(images, (0, max(tile - width, 0), 0, max(tile - height, 0)), value=GRAY / 255)
        height, width = images.shape[2:]
        windows = tile_windows((height, width), tile, self._tiles.overlap)
        corners = torch.tensor(windows, dtype=torch.float32, device=images.device)
        side = self._imgsz if self._tiles.scaled else tile
        batch = CPU_CHUNK if images.device.type == "cpu" else self._batch
        views = []
        for chunk, window in zip(_chunks(windows, batch), corners.split(batch)):
            tiles = torch.cat([images[:, :, y1:y2, x1:x2] for x1, y1, x2, y2 in chunk])
            if side != tile:
                tiles = interpolate(tiles, (side, side), mode="bilinear")
            views.append(self._detect(tiles, gain=tile / side, origin=window[:, None, :2].repeat(1, 1, 2)))
        if self._tiles.full_image and len(windows) > 1:
            views.append(self._detect_reduced(images))
            corners = torch.cat((corners, corners.new_tensor([[0, 0, width, height]])))
        columns = [torch.cat(column) for selection in zip(*views) for column in zip(*selection)]
        return [corners, *columns]

    def stitch(self, raw: list[Tensor]) -> list[Detections]:
        """Joins the outputs of `forward`, which may have been converted to float, to the image's detections.

        Returns them on the host, B = 1, for each selection.
        """
        windows, *columns = (t.cpu().numpy() for t in raw)
        stitched = []
        for (boxes, scores, classes, counts), settings in zip(_chunks(columns, 4), self._settings):
            view, slot = np.nonzero(np.arange(scores.shape[1]) < counts[:, None])
            table = DetectionTable(view, boxes[view, slot], scores[view, slot], classes[view, slot].astype(np.int64))
            joined = stitch_views(table, windows, settings)
            stitched.append(
                Detections(
                    boxes_xyxy=torch.from_numpy(joined.boxes_xyxy_px)[None],
                    scores=torch.from_numpy(joined.scores)[None],
                    classes=torch.from_numpy(joined.classes)[None],
                    counts=torch.tensor([len(joined.scores)]),
                )
            )
        return stitched

    def _detect(self, inputs: Tensor, *, gain: float | Tensor, origin: float | Tensor = 0.0) -> list[Detections]:
        """Detects in views. Returns boxes in canvas pixels: those of ``inputs`` times ``gain`` plus ``origin``."""
        raw = self.detector(inputs)
        with torch.autocast(inputs.device.type, enabled=False):
            selections = self._select([level.float() for level in raw])
        return [d._replace(boxes_xyxy=d.boxes_xyxy * gain + origin) for d in selections]

    def _detect_reduced(self, images: Tensor) -> list[Detections]:
        """Detects in the whole image, scaled down."""
        height, width = images.shape[2:]
        limit_hw = self._only_hw or (self._imgsz, self._imgsz)
        gain = min(limit_hw[0] / height, limit_hw[1] / width, 1.0)
        small_hw = (max(round(height * gain), 1), max(round(width * gain), 1))
        small = interpolate(images, small_hw, mode="bilinear", antialias=gain < 1)
        input_hw = self._only_hw or tuple(-(-side // self._stride) * self._stride for side in small_hw)
        padding = (0, input_hw[1] - small_hw[1], 0, input_hw[0] - small_hw[0])
        gains = images.new_tensor([width / small_hw[1], height / small_hw[0]]).repeat(2)
        return self._detect(pad(small, padding, value=GRAY / 255), gain=gains)


def _chunks(values: Sequence, size: int) -> Iterator[Sequence]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


@dataclass(frozen=True)
class TileStitcher:
    """Joins the detections in the tiles of many images.

    Attributes:
        image: int64 (N,), the image of each of N tiles, ascending.
        windows: float32 (N, 4), xyxy pixels of the tile's image.
        settings: of each selection of a validation, see `stitch_views`.
    """

    image: np.ndarray
    windows: np.ndarray
    settings: Sequence[PostprocessSettings]

    def images_of(self, seen: np.ndarray) -> np.ndarray:
        """Returns the images of ``seen`` tiles, int64 (n,). Raises RuntimeError unless each tile of these images is
        there once."""
        images = np.unique(self.image[seen])
        expected = np.flatnonzero(np.isin(self.image, images))
        if not np.array_equal(np.sort(seen), expected):
            raise RuntimeError(f"expected each of {len(expected)} tiles exactly once, got {len(seen)} tiles")
        return images

    def stitch(self, detections: DetectionTable, settings: PostprocessSettings) -> DetectionTable:
        """Joins the detections in tiles, in pixels of the images, to detections in images."""
        by_tile = detections.take(np.argsort(detections.image_index, kind="stable"))
        tables = []
        for image in np.unique(self.image[by_tile.image_index]).tolist():
            first, end = np.searchsorted(self.image, [image, image + 1]).tolist()
            views = by_tile.take(slice(*np.searchsorted(by_tile.image_index, [first, end])))
            views = replace(views, image_index=views.image_index - first)
            joined = stitch_views(views, self.windows[first:end], settings)
            tables.append(replace(joined, image_index=np.full_like(joined.image_index, image)))
        return DetectionTable.concatenate(tables)


def stitch_views(detections: DetectionTable, windows: np.ndarray, settings: PostprocessSettings) -> DetectionTable:
    """Joins the detections in an image's views to detections in the image, the best first.

    Args:
        detections: N detections in canvas pixels, sorted by view; ``image_index`` is the view.
        windows: float (T, 4), xyxy, which together cover the canvas.
        settings: settings with which the views' detections were selected, so ``max_det`` limits those of a view. At
            most T times as many are returned, and never more than `MAX_CANDIDATES`. Without ``iou_thres``,
            `CROSS_VIEW_IOU` is the NMS threshold for the joined boxes.

    The ``image_index`` of the result has no meaning.
    """
    if len(windows) == 1 or not len(detections.scores):
        return detections
    view = detections.image_index
    scores = detections.scores
    clipped = replace(detections, boxes_xyxy_px=_clipped(detections.boxes_xyxy_px, windows[view]))
    canvas = np.concatenate([windows[:, :2].min(0), windows[:, 2:].max(0)])
    margin = CUT_MARGIN * np.tile(windows[:, 2:] - windows[:, :2], 2)
    # bool (N, 4), the sides that a box does not see: those at a border of its view inside the canvas.
    is_cut = (np.abs(clipped.boxes_xyxy_px - windows[view]) <= margin[view]) & (windows != canvas)[view]
    links, parts = _links_and_parts(clipped, windows, is_cut)
    surest_first = sorted(links, key=lambda link: -min(scores[link[0]], scores[link[1]]))
    cluster = _clusters(surest_first, view)
    is_part = np.zeros(len(view), bool)
    is_part[[part for part, whole in parts if cluster[part] != cluster[whole]]] = True
    # Each cluster becomes its best box, with other sides; the best cluster comes first.
    order = np.lexsort((-scores, cluster))
    starts = np.flatnonzero(np.diff(cluster[order], prepend=-1))
    boxes, sees_all = _joined(clipped.boxes_xyxy_px[order], is_cut[order], starts)
    merged = replace(clipped.take(order[starts]), boxes_xyxy_px=boxes)
    kept = np.flatnonzero(sees_all | ~np.logical_and.reduceat(is_part[order], starts))
    ranked = merged.take(kept[np.argsort(-merged.scores[kept], kind="stable")])
    group = torch.from_numpy(np.zeros_like(ranked.classes) if settings.agnostic else ranked.classes)
    threshold = CROSS_VIEW_IOU if settings.iou_thres is None else settings.iou_thres
    max_det = min(settings.max_det * len(windows), MAX_CANDIDATES)
    keep = nms_keep(torch.from_numpy(ranked.boxes_xyxy_px), group, threshold, groups_per_image=int(group.max()) + 1)
    return ranked.take(np.flatnonzero(keep.numpy())[:max_det])


def _links_and_parts(
    detections: DetectionTable, windows: np.ndarray, is_cut: np.ndarray
) -> tuple[list[list[int]], list[list[int]]]:
    """Compares the boxes of each pair of overlapping views by class, in the area that both see.

    Returns links [box, box] that show one object, as each is the other's best match, and pairs [part, whole]: a cut box
    and a larger one of the other view in which it lies.
    """
    boxes, scores, classes = detections.boxes_xyxy_px, detections.scores, detections.classes
    area = area_xyxy(boxes)
    starts = np.searchsorted(detections.image_index, np.arange(len(windows) + 1))
    links: list[list[int]] = []
    parts: list[list[int]] = []
    for first, second, common in _overlapping_views(windows, np.unique(detections.image_index)):
        rows = np.arange(starts[first], starts[first + 1])
        others = np.arange(starts[second], starts[second + 1])
        seen = _clipped(boxes[rows], common)
        other_seen = _clipped(boxes[others], common)
        low = np.maximum(seen[:, None, :2], other_seen[:, :2])
        high = np.minimum(seen[:, None, 2:], other_seen[:, 2:])
        overlap = (high - low).clip(0).prod(-1) * (classes[rows, None] == classes[others])
        union = area_xyxy(seen)[:, None] + area_xyxy(other_seen) - overlap
        iou = np.divide(overlap, union, out=np.zeros_like(overlap), where=overlap > 0)
        is_mutual_best = (iou == iou.max(1, keepdims=True)) & (iou == iou.max(0))
        row, column = np.nonzero(is_mutual_best & (iou >= LINK_IOU))
        links += np.stack((rows[row], others[column]), 1).tolist()
        for small, large, shared in ((rows, others, overlap), (others, rows, overlap.T)):
            small_area = area[small, None]
            is_part = (shared > 0) & (shared >= PART_FRACTION * small_area) & (area[large] > small_area)
            is_part &= np.any(is_cut[small], axis=1, keepdims=True)
            is_part &= scores[large] >= PART_SCORE * scores[small, None]
            row, column = np.nonzero(is_part)
            parts += np.stack((small[row], large[column]), 1).tolist()
    return links, parts


def _overlapping_views(windows: np.ndarray, views: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields pairs of ``views`` that overlap, the first before the second, and their common area, xyxy.

    Diagonal neighbors are left out: an object in both is also in the two tiles between them, and two large objects may
    both cover the small common area, which then cannot tell them apart.
    """
    for number, first in enumerate(views.tolist()):
        window = windows[first]
        others = windows[views[number + 1 :]]
        common = np.concatenate([np.maximum(window[:2], others[:, :2]), np.minimum(window[2:], others[:, 2:])], 1)
        is_inside = (common == others).all(1) | (common == window).all(1)
        is_aligned = (window[:2] == others[:, :2]).any(1)
        overlaps = (common[:, 2:] > common[:, :2]).all(1) & (is_inside | is_aligned)
        for other in np.flatnonzero(overlaps).tolist():
            yield first, int(views[number + 1 + other]), common[other]


def _clusters(links: Sequence[Sequence[int]], view: np.ndarray) -> np.ndarray:
    """Joins linked boxes to clusters, unless a cluster would then have two boxes of one view, which are two objects.

    Args:
        links: the best first.
        view: int64 (N,), of each box.

    Returns the first box of each box's cluster: int64 (N,).
    """
    clusters = [{box_view: box} for box, box_view in enumerate(view.tolist())]  # each box's cluster: boxes by view
    for a, b in links:
        if clusters[a].keys().isdisjoint(clusters[b]):
            union = clusters[a] | clusters[b]
            for box in union.values():
                clusters[box] = union
    return np.array([min(cluster.values()) for cluster in clusters])


def _joined(boxes: np.ndarray, is_cut: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges each cluster into one box.

    Args:
        boxes: (N, 4), cluster by cluster, the best first.
        is_cut: bool (N, 4), the sides that they do not see.
        starts: (G,), the first box of each cluster.

    Returns boxes (G, 4), and whether all sides are seen, bool (G,).
    """
    count = len(boxes)
    # The lowest number of a cluster is the best box that sees a side; numbers from ``count`` on do not see it.
    best = np.minimum.reduceat(np.arange(count)[:, None] + count * is_cut, starts)
    is_seen = best < count
    low = np.minimum.reduceat(boxes[:, :2], starts)
    high = np.maximum.reduceat(boxes[:, 2:], starts)
    outermost = np.concatenate([low, high], 1)  # for sides that no box sees
    joined = np.where(is_seen, np.take_along_axis(boxes, best % count, 0), outermost)
    joined[:, 2:] = np.maximum(joined[:, 2:], joined[:, :2])
    return joined, np.all(is_seen, axis=1)


def _clipped(boxes: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Clips boxes (N, 4) to a window (4,), or to one each (N, 4)."""
    low, high = window[..., :2], window[..., 2:]
    return np.concatenate([boxes[:, :2].clip(low, high), boxes[:, 2:].clip(low, high)], 1)
