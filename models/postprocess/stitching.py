"""Joins the detections of overlapping views of one image, so that each object has one box.

Two boxes of different views are of one object if they agree where both views see it: clipped to the views' common
area, their IoU is high. This holds for two boxes of the whole object, for a whole box and a part cut off by the border
of a tile, and for two parts of an object that no tile sees whole. All boxes that are linked in this way become one, of
which each side is that of the best box that sees it. A box does not see a side where its view's border cuts the object.

What is still cut after that but lies in a larger box of another view is a part of it and is left out, even if its score
is higher. Last comes NMS.

Legend: T views, N boxes of all views, G clusters of boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.postprocess.detections import PostprocessSettings
from models.postprocess.nms import nms_keep
from utils.config.settings import MOST_DETECTIONS
from utils.structures import DetectionTable

# Chosen by measurement (benchmarks/LOG.md); AP changes little from 0.3 to 0.6, 0.4 to 0.8 and 0.5 to 3 %.
LINK_IOU = 0.5  # of two boxes in the common area of their views
PART_OF = 0.5  # fraction of a cut box inside a larger one from which it is a part of it
PART_SCORE = 0.1  # the larger box has at least this fraction of the cut one's score: it is not noise
CUT_MARGIN = 0.01  # of the view: a side that is so close to the border counts as cut off
CROSS_VIEW_IOU = 0.7  # for boxes of an end-to-end head, which need no suppression within a view

Pair = tuple[int, int]  # boxes


def stitch_views(found: DetectionTable, windows: np.ndarray, settings: PostprocessSettings) -> DetectionTable:
    """The detections of an image, the best first, from those of its views. ``image_index`` is then without meaning.

    Args:
        found: N detections in canvas pixels, with the view of each in ascending order as ``image_index``.
        windows: float (T, 4), xyxy, which together cover the canvas.
        settings: of the views; with ``iou_thres`` None, `CROSS_VIEW_IOU` is that of the NMS of the joined boxes.
    """
    if len(windows) == 1 or not len(found.scores):
        return found
    view = found.image_index
    found = replace(found, boxes_xyxy_px=_clipped(found.boxes_xyxy_px, windows[view]))
    border = np.concatenate([windows[:, :2].min(0), windows[:, 2:].max(0)])  # of the canvas
    margin = CUT_MARGIN * np.tile(windows[:, 2:] - windows[:, :2], 2)
    cut = (np.abs(found.boxes_xyxy_px - windows[view]) <= margin[view]) & (windows != border)[view]
    links, parts = _compare(found, cut, windows)
    first_box = _clusters(links, view)
    is_part = np.zeros(len(view), bool)
    is_part[[part for part, whole in parts if first_box[part] != first_box[whole]]] = True

    _, cluster = np.unique(first_box, return_inverse=True)
    order = np.lexsort((-found.scores, cluster))  # within a cluster the best first
    found, is_part, starts = found.take(order), is_part[order], np.flatnonzero(np.diff(cluster[order], prepend=-1))
    boxes, sees_all = _joined(found.boxes_xyxy_px, cut[order], starts)
    found = replace(found.take(starts), boxes_xyxy_px=boxes)
    kept = np.flatnonzero(sees_all | ~np.logical_and.reduceat(is_part, starts))
    found = found.take(kept[np.argsort(-found.scores[kept], kind="stable")])
    group = torch.from_numpy(np.zeros_like(found.classes) if settings.agnostic else found.classes)
    threshold = CROSS_VIEW_IOU if settings.iou_thres is None else settings.iou_thres
    max_det = settings.max_det
    keep = nms_keep(torch.from_numpy(found.boxes_xyxy_px), group, int(group.max()) + 1, threshold, max_det)
    return found.take(np.flatnonzero(keep.numpy())[:max_det])


@dataclass(frozen=True)
class TileStitcher:
    """Joins the detections in the tiles of many images.

    Attributes:
        image: int64 (N,), the image of each tile, ascending.
        windows: float32 (N, 4), xyxy pixels of the tile's image.
        settings: see `stitch_views`; ``max_det`` is that of an image, for each of its tiles.
    """

    image: np.ndarray
    windows: np.ndarray
    settings: PostprocessSettings

    def __call__(self, found: DetectionTable, seen: np.ndarray) -> tuple[DetectionTable, np.ndarray]:
        """The detections in images, and the images.

        Args:
            found: detections by tile, in pixels of the images.
            seen: int64 (n,), tiles; all of an image, or none.
        """
        images = np.unique(self.image[seen])
        if not np.array_equal(np.sort(seen), np.flatnonzero(np.isin(self.image, images))):
            raise RuntimeError("each tile of an image was to be seen once")
        found = found.take(np.argsort(found.image_index, kind="stable"))
        tables = []
        for image in images.tolist():
            first, end = np.searchsorted(self.image, [image, image + 1]).tolist()
            views = found.take(slice(*np.searchsorted(found.image_index, [first, end])))
            views = replace(views, image_index=views.image_index - first)
            max_det = min(self.settings.max_det * (end - first), MOST_DETECTIONS)
            joined = stitch_views(views, self.windows[first:end], replace(self.settings, max_det=max_det))
            tables.append(replace(joined, image_index=np.full_like(joined.image_index, image)))
        return DetectionTable.concatenate(tables), images


def _compare(found: DetectionTable, cut: np.ndarray, windows: np.ndarray) -> tuple[list[Pair], list[Pair]]:
    """Links between boxes of one object, those with the highest scores (the lower of a link's two) first; and pairs
    (part, whole). ``cut``: bool (N, 4), the side is at a border of the view inside the canvas."""
    links, parts, scores, area = [], [], found.scores, _area(found.boxes_xyxy_px)
    starts = np.searchsorted(found.image_index, np.arange(len(windows) + 1))
    for first, second, common in _overlapping_views(windows, np.unique(found.image_index)):
        rows, others = (np.arange(starts[v], starts[v + 1]) for v in (first, second))
        a, b = (_clipped(found.boxes_xyxy_px[boxes], common) for boxes in (rows, others))
        low, high = np.maximum(a[:, None, :2], b[:, :2]), np.minimum(a[:, None, 2:], b[:, 2:])
        overlap = (high - low).clip(0).prod(-1) * (found.classes[rows, None] == found.classes[others])
        union = _area(a)[:, None] + _area(b) - overlap
        iou = np.divide(overlap, union, out=np.zeros_like(overlap), where=overlap > 0)
        links += _pairs((iou == iou.max(1, keepdims=True)) & (iou == iou.max(0)) & (iou >= LINK_IOU), rows, others)
        for small, large, shared in ((rows, others, overlap), (others, rows, overlap.T)):
            is_inside = (shared > 0) & (shared >= PART_OF * area[small, None]) & (area[large] > area[small, None])
            is_sure = scores[large] >= PART_SCORE * scores[small, None]
            parts += _pairs(is_inside & is_sure & cut[small].any(1)[:, None], small, large)
    return sorted(links, key=lambda link: -min(scores[link[0]], scores[link[1]])), parts


def _overlapping_views(windows: np.ndarray, views: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Pairs of ``views`` that overlap, the first before the second, and their common area, xyxy.

    Diagonal neighbors are left out: an object in both is also in the two tiles between them, and two large objects may
    both cover the small common area, so that it cannot tell them apart.
    """
    for number, first in enumerate(views.tolist()):
        window, others = windows[first], windows[views[number + 1 :]]
        common = np.concatenate([np.maximum(window[:2], others[:, :2]), np.minimum(window[2:], others[:, 2:])], 1)
        is_inside = (common == others).all(1) | (common == window).all(1)
        is_aligned = (window[:2] == others[:, :2]).any(1)
        overlaps = (common[:, 2:] > common[:, :2]).all(1) & (is_inside | is_aligned)
        for other in np.flatnonzero(overlaps).tolist():
            yield first, int(views[number + 1 + other]), common[other]


def _pairs(chosen: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Iterable[Pair]:
    """The boxes of ``rows`` (K,) and ``columns`` (L,) that ``chosen``, bool (K, L), is true for."""
    row, column = np.nonzero(chosen)
    return zip(rows[row].tolist(), columns[column].tolist())


def _clipped(boxes: np.ndarray, window: np.ndarray) -> np.ndarray:
    low, high = window[..., :2], window[..., 2:]
    return np.concatenate([boxes[:, :2].clip(low, high), boxes[:, 2:].clip(low, high)], 1)


def _area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def _clusters(links: Iterable[Pair], view: np.ndarray) -> np.ndarray:
    """The first box of the cluster that each box belongs to: int64 (N,).

    Clusters grow by their best link, unless they would then have two boxes of a view, which are two objects.

    Args:
        links: the best first.
        view: int64 (N,), of each box.
    """
    members = [{v: box} for box, v in enumerate(view.tolist())]  # of each box's cluster, by view
    for a, b in links:
        if members[a].keys().isdisjoint(members[b]):
            union = members[a] | members[b]
            for box in union.values():
                members[box] = union
    return np.array([min(cluster.values()) for cluster in members])


def _joined(boxes: np.ndarray, cut: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The clusters' boxes (G, 4), and whether all sides are seen, bool (G,); from their boxes (N, 4), the best first,
    the sides that these do not see, bool (N, 4), and where each cluster starts, (G,)."""
    count = len(boxes)
    best = np.minimum.reduceat(np.arange(count)[:, None] + count * cut, starts)  # boxes that see a side come first
    sees = best < count
    low, high = np.minimum.reduceat(boxes[:, :2], starts), np.maximum.reduceat(boxes[:, 2:], starts)
    outermost = np.concatenate([low, high], 1)  # of several cut sides
    joined = np.where(sees, np.take_along_axis(boxes, best % count, 0), outermost)
    joined[:, 2:] = np.maximum(joined[:, 2:], joined[:, :2])
    return joined, sees.all(1)
