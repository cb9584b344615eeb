"""Joins the detections of overlapping views of one image, so that each object has one box.

Two boxes of different views belong to one object if they agree where both views see it: clipped to the views' common
area, their IoU is high. This holds for two boxes of the whole object, for a whole box and a part cut off by the border
of a tile, and for two parts of an object that no tile sees whole. All boxes linked in this way become one box, and each
of its sides comes from the best box that sees the side. A box does not see a side where the border of its view cuts the
object.

A box that is still cut after that, but lies in a larger box of another view, is a part of it and is dropped, even if
its score is higher. NMS comes last.

Legend: T views, N boxes of all views, G clusters of boxes, K and L boxes of two views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from models.postprocess.nms import nms_keep
from models.postprocess.selection import PostprocessSettings
from utils.config.settings import MAX_CANDIDATES
from utils.detections import DetectionTable

# Chosen by measurement (benchmarks/LOG.md); AP changes little from 0.3 to 0.6, 0.4 to 0.8 and 0.5 to 3 %.
LINK_IOU = 0.5  # IoU from which two boxes, clipped to the common area of their views, are linked
PART_FRACTION = 0.5  # a cut box is a part of a larger one that contains at least this fraction of it,
PART_SCORE = 0.1  # and whose score is at least this fraction of its own, so that the larger one is not noise
CUT_MARGIN = 0.01  # fraction of the view's side: a box side this close to the border counts as cut
CROSS_VIEW_IOU = 0.7  # NMS threshold for boxes of an end-to-end head, which need no NMS within a view

Pair = tuple[int, int]  # indices of two boxes


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
    clipped = replace(detections, boxes_xyxy_px=_clipped(detections.boxes_xyxy_px, windows[view]))
    is_cut = _cut_sides(clipped, windows)
    links: list[Pair] = []
    parts: list[Pair] = []
    for pair in _view_pairs(clipped, windows):
        links += _links_between(pair)
        parts += _parts_between(pair, clipped, is_cut)
    first_box = _clusters(_surest_first(links, clipped.scores), view)
    is_part = np.zeros(len(view), bool)
    is_part[[part for part, whole in parts if first_box[part] != first_box[whole]]] = True
    merged = _merge_clusters(clipped, is_cut, is_part, first_box)
    max_det = min(settings.max_det * len(windows), MAX_CANDIDATES)
    return _suppress_joined(merged, replace(settings, max_det=max_det))


def _cut_sides(detections: DetectionTable, windows: np.ndarray) -> np.ndarray:
    """Returns which sides of the boxes, clipped to their views, are at a border of the view inside the canvas: bool
    (N, 4)."""
    view = detections.image_index
    canvas = np.concatenate([windows[:, :2].min(0), windows[:, 2:].max(0)])
    margin = CUT_MARGIN * np.tile(windows[:, 2:] - windows[:, :2], 2)
    is_at_border = np.abs(detections.boxes_xyxy_px - windows[view]) <= margin[view]
    return is_at_border & (windows != canvas)[view]


def _merge_clusters(
    detections: DetectionTable, is_cut: np.ndarray, is_part: np.ndarray, first_box: np.ndarray
) -> DetectionTable:
    """Creates one detection for each cluster, and drops those that are only parts of others.

    Args:
        is_cut: bool (N, 4), the sides that a box does not see.
        is_part: bool (N,), whether a box lies in a larger one of another cluster.
        first_box: int64 (N,), see `_clusters`.

    Returns the best first.
    """
    _, cluster = np.unique(first_box, return_inverse=True)
    order = np.lexsort((-detections.scores, cluster))  # within a cluster the best first
    starts = np.flatnonzero(np.diff(cluster[order], prepend=-1))
    boxes, sees_all = _joined(detections.boxes_xyxy_px[order], is_cut[order], starts)
    merged = replace(detections.take(order[starts]), boxes_xyxy_px=boxes)
    is_part_only = np.logical_and.reduceat(is_part[order], starts)
    kept = np.flatnonzero(sees_all | ~is_part_only)
    return merged.take(kept[np.argsort(-merged.scores[kept], kind="stable")])


def _suppress_joined(ranked: DetectionTable, settings: PostprocessSettings) -> DetectionTable:
    """Runs NMS over the boxes of all views, the best first; at most ``settings.max_det`` remain."""
    group = torch.from_numpy(np.zeros_like(ranked.classes) if settings.agnostic else ranked.classes)
    threshold = CROSS_VIEW_IOU if settings.iou_thres is None else settings.iou_thres
    max_det = settings.max_det
    keep = nms_keep(torch.from_numpy(ranked.boxes_xyxy_px), group, int(group.max()) + 1, threshold, max_det)
    return ranked.take(np.flatnonzero(keep.numpy())[:max_det])


@dataclass(frozen=True)
class TileStitcher:
    """Joins the detections in the tiles of many images.

    Attributes:
        image: int64 (N,), the image of each of N tiles, ascending.
        windows: float32 (N, 4), xyxy pixels of the tile's image.
        settings: see `stitch_views`.
    """

    image: np.ndarray
    windows: np.ndarray
    settings: PostprocessSettings

    def __call__(self, detections: DetectionTable, seen: np.ndarray) -> tuple[DetectionTable, np.ndarray]:
        """Joins the detections in tiles to detections in images.

        Args:
            detections: detections by tile, in pixels of the images.
            seen: int64 (n,), the tiles that have been evaluated: all tiles of an image, or none.

        Returns detections by image, and the images. Raises RuntimeError unless each tile of these images is there once.
        """
        images = np.unique(self.image[seen])
        expected = np.flatnonzero(np.isin(self.image, images))
        if not np.array_equal(np.sort(seen), expected):
            raise RuntimeError(f"expected each of {len(expected)} tiles exactly once, got {len(seen)} tiles")
        by_tile = detections.take(np.argsort(detections.image_index, kind="stable"))
        tables = []
        for image in images.tolist():
            first, end = np.searchsorted(self.image, [image, image + 1]).tolist()
            views = by_tile.take(slice(*np.searchsorted(by_tile.image_index, [first, end])))
            views = replace(views, image_index=views.image_index - first)
            joined = stitch_views(views, self.windows[first:end], self.settings)
            tables.append(replace(joined, image_index=np.full_like(joined.image_index, image)))
        return DetectionTable.concatenate(tables), images


class _ViewPair(NamedTuple):
    """The boxes of two overlapping views, compared in the area that both see."""

    rows: np.ndarray  # int64 (K,), boxes of the first view
    others: np.ndarray  # int64 (L,), boxes of the second one
    overlap: np.ndarray  # (K, L), areas of intersection in the common area; 0 for boxes of different classes
    iou: np.ndarray  # (K, L), IoUs in the common area; 0 for boxes of different classes


def _view_pairs(detections: DetectionTable, windows: np.ndarray) -> Iterator[_ViewPair]:
    """Compares the boxes of each pair of views that overlap. ``detections``: sorted by view."""
    starts = np.searchsorted(detections.image_index, np.arange(len(windows) + 1))
    for first, second, common in _overlapping_views(windows, np.unique(detections.image_index)):
        rows = np.arange(starts[first], starts[first + 1])
        others = np.arange(starts[second], starts[second + 1])
        yield _ViewPair(rows, others, *_overlaps_in(common, detections, rows, others))


def _links_between(pair: _ViewPair) -> Iterable[Pair]:
    """Links boxes of two views that show one object: each is the other's best match."""
    is_mutual_best = (pair.iou == pair.iou.max(1, keepdims=True)) & (pair.iou == pair.iou.max(0))
    return _pairs(is_mutual_best & (pair.iou >= LINK_IOU), pair.rows, pair.others)


def _surest_first(links: list[Pair], scores: np.ndarray) -> list[Pair]:
    """Sorts links by the lower score of their two boxes, the highest first. ``scores``: (N,)."""
    return sorted(links, key=lambda link: -min(scores[link[0]], scores[link[1]]))


def _parts_between(pair: _ViewPair, detections: DetectionTable, is_cut: np.ndarray) -> list[Pair]:
    """Finds boxes of either view that are parts of larger ones of the other: pairs (part, whole).

    ``is_cut``: bool (N, 4), whether a side is at a border of the view inside the canvas.
    """
    swapped = _ViewPair(pair.others, pair.rows, pair.overlap.T, pair.iou.T)
    return [
        *_pairs(_is_part(pair, detections, is_cut), pair.rows, pair.others),
        *_pairs(_is_part(swapped, detections, is_cut), pair.others, pair.rows),
    ]


def _is_part(pair: _ViewPair, detections: DetectionTable, is_cut: np.ndarray) -> np.ndarray:
    """Returns which boxes of the first view are parts of which boxes of the second one: bool (K, L)."""
    small_is_cut = np.any(is_cut[pair.rows], axis=1, keepdims=True)
    area = _area(detections.boxes_xyxy_px[pair.rows])[:, None]
    larger = _area(detections.boxes_xyxy_px[pair.others]) > area
    is_inside = (pair.overlap > 0) & (pair.overlap >= PART_FRACTION * area)
    is_sure = detections.scores[pair.others] >= PART_SCORE * detections.scores[pair.rows, None]
    return small_is_cut & is_inside & larger & is_sure


def _overlaps_in(
    common: np.ndarray, detections: DetectionTable, rows: np.ndarray, others: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compares boxes ``rows`` (K,) and ``others`` (L,), clipped to the area ``common`` (4,) of their views.

    Returns areas of intersection and IoUs (K, L), both 0 for boxes of different classes.
    """
    boxes = _clipped(detections.boxes_xyxy_px[rows], common)
    other_boxes = _clipped(detections.boxes_xyxy_px[others], common)
    low = np.maximum(boxes[:, None, :2], other_boxes[:, :2])
    high = np.minimum(boxes[:, None, 2:], other_boxes[:, 2:])
    is_same_class = detections.classes[rows, None] == detections.classes[others]
    overlap = (high - low).clip(0).prod(-1) * is_same_class
    union = _area(boxes)[:, None] + _area(other_boxes) - overlap
    return overlap, np.divide(overlap, union, out=np.zeros_like(overlap), where=overlap > 0)


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


def _pairs(is_pair: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Iterable[Pair]:
    """Lists the pairs of boxes ``rows`` (K,) and ``columns`` (L,) for which ``is_pair``, bool (K, L), is true."""
    row, column = np.nonzero(is_pair)
    return zip(rows[row].tolist(), columns[column].tolist())


def _clipped(boxes: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Clips boxes (N, 4) to a window (4,), or to one each (N, 4)."""
    low, high = window[..., :2], window[..., 2:]
    return np.concatenate([boxes[:, :2].clip(low, high), boxes[:, 2:].clip(low, high)], 1)


def _area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def _clusters(links: Iterable[Pair], view: np.ndarray) -> np.ndarray:
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
