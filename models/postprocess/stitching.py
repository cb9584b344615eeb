"""Joins the detections of overlapping views of one image, so that each object has one box.

Two boxes of different views are of one object if they agree where both views see it: clipped to the views' common
area, their IoU is high. This holds for two boxes of the whole object, for a whole box and a part cut off by the border
of a tile, and for two parts of an object that no tile sees whole. All boxes that are linked in this way become one, of
which each side is that of the best box that sees it. A box does not see a side where its view's border cuts the object.

What is still cut after that but lies in a larger box of another view is a part of it and is left out, even if its score
is higher. Last comes NMS.

Legend: T views, K slots a view, N = T * K boxes, P pairs of views that overlap, E links between boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.postprocess.nms import nms_keep
from utils.config.settings import MOST_DETECTIONS
from utils.structures import Detections, DetectionTable

# Chosen by measurement (benchmarks/LOG.md); AP changes little from 0.3 to 0.6, 0.4 to 0.8 and 0.5 to 3 %.
LINK_IOU = 0.5  # of two boxes in the common area of their views
PART_OF = 0.5  # fraction of a cut box inside a larger one from which it is a part of it
PART_SCORE = 0.1  # the larger box has at least this fraction of the cut one's score: it is not noise
CUT_MARGIN = 0.01  # of the view: a side that is so close to the border counts as cut off
CROSS_VIEW_IOU = 0.7  # for boxes of an end-to-end head, which need no suppression within a view
_CELLS = 1 << 22  # pairs of boxes that are compared at a time


class _Boxes(NamedTuple):
    """Boxes of all views, padded."""

    boxes: Tensor  # float32 (T, K, 4) canvas pixels, inside their views
    scores: Tensor  # float32 (T, K), -1 in empty slots
    classes: Tensor  # int64 (T, K), -1 in empty slots
    cut: Tensor  # bool (T, K, 4): the side is at a border of the view inside the canvas


@torch.no_grad()
def stitch_views(
    views: Detections, windows: Tensor, *, iou_thres: float | None, max_det: int, agnostic: bool = False
) -> Detections:
    """The detections of an image, B = 1, from those of its views.

    Args:
        views: T views with at most K detections each, canvas pixels.
        windows: float32 (T, 4), xyxy, which together cover the canvas.
        iou_thres: of the NMS of the joined boxes; None: `CROSS_VIEW_IOU`.
        max_det: the most detections.
        agnostic: whether boxes of different classes suppress each other too.
    """
    if len(windows) == 1:
        return views
    found = _clipped(views, windows)
    pairs = _overlapping_pairs(windows)
    links, parts = _compare(found, windows, pairs)
    count = found.scores.numel()
    cluster = _clusters(links, found.scores.shape[1], count)
    boxes, scores, is_whole = _join(found, cluster)
    kept = (scores >= 0) & (is_whole | ~_has_only_parts(parts, cluster))
    order = scores.masked_fill(~kept, -1).argsort(descending=True, stable=True)[: int(kept.sum())]
    boxes, scores, classes = boxes[order], scores[order], found.classes.flatten()[order]
    group = torch.zeros_like(classes) if agnostic else classes
    groups = int(group.max()) + 1 if len(group) else 1
    keep = nms_keep(boxes, group, groups, CROSS_VIEW_IOU if iou_thres is None else iou_thres, max_det)
    index = keep.nonzero()[:max_det, 0]
    columns = (boxes[index], scores[index], classes[index])
    padded = [torch.cat((t, t.new_zeros((max_det - len(index), *t.shape[1:]))))[None] for t in columns]
    return Detections(*padded, torch.tensor([len(index)], device=index.device))


@dataclass(frozen=True)
class TileStitcher:
    """Joins the detections in the tiles of many images.

    Attributes:
        image: int64 (N,), the image of each tile, ascending.
        windows: float32 (N, 4), xyxy pixels of the tile's image.
        iou_thres: see `stitch_views`.
        max_det: the most detections of an image, for each of its tiles.
    """

    image: np.ndarray
    windows: np.ndarray
    iou_thres: float | None
    max_det: int

    def __call__(
        self, found: DetectionTable, seen: np.ndarray, device: torch.device
    ) -> tuple[DetectionTable, np.ndarray]:
        """The detections in images, and the images.

        Args:
            found: detections by tile, in pixels of the images.
            seen: int64 (n,), tiles; all of an image, or none.
            device: to compute on.
        """
        images = np.unique(self.image[seen])
        if not np.array_equal(np.sort(seen), np.flatnonzero(np.isin(self.image, images))):
            raise RuntimeError("each tile of an image was to be seen once")
        found = found.take(np.argsort(found.image_index, kind="stable"))
        starts = np.searchsorted(found.image_index, np.arange(len(self.image) + 1)).tolist()
        columns = found.boxes_xyxy_px.astype(np.float32), found.scores.astype(np.float32), found.classes
        tables = []
        for image in images.tolist():
            first, end = np.searchsorted(self.image, [image, image + 1]).tolist()
            rows = [slice(*pair) for pair in pairwise(starts[first : end + 1])]
            counts = torch.tensor([row.stop - row.start for row in rows])
            if not counts.any():
                continue
            views = [pad_sequence([torch.from_numpy(c[row]) for row in rows], batch_first=True) for c in columns]
            joined = stitch_views(
                Detections(*(t.to(device) for t in (*views, counts))),
                torch.from_numpy(self.windows[first:end]).to(device),
                iou_thres=self.iou_thres,
                max_det=min(self.max_det * len(rows), MOST_DETECTIONS),
            )
            boxes, scores, classes = (t[0, : int(joined.counts[0])].cpu().numpy() for t in joined[:3])
            tables.append(
                DetectionTable(np.full(len(boxes), image), boxes.astype(float), scores.astype(float), classes)
            )
        return DetectionTable.concatenate(tables), images


def _clipped(views: Detections, windows: Tensor) -> _Boxes:
    boxes, scores, classes, counts = views
    slots = max(int(counts.max()), 1)
    is_box = torch.arange(slots, device=counts.device) < counts[:, None]
    corners = windows[:, None]
    low = torch.maximum(boxes[:, :slots, :2], corners[..., :2])
    high = torch.minimum(boxes[:, :slots, 2:], corners[..., 2:])
    inside = torch.cat((torch.minimum(low, corners[..., 2:]), torch.maximum(high, corners[..., :2])), 2)
    border = torch.cat((windows[:, :2].amin(0), windows[:, 2:].amax(0)))  # of the canvas
    is_inner = windows != border
    margin = CUT_MARGIN * (windows[:, 2:] - windows[:, :2]).repeat(1, 2)
    cut = ((inside - corners).abs() <= margin[:, None]) & is_inner[:, None]
    return _Boxes(
        inside, torch.where(is_box, scores[:, :slots], -1.0), torch.where(is_box, classes[:, :slots], -1), cut
    )


def _overlapping_pairs(windows: Tensor) -> Tensor:
    """int64 (P, 2), the first view before the second.

    Diagonal neighbors are left out: an object in both is also in the two tiles between them, and two large objects may
    both cover the small common area, so that it cannot tell them apart.
    """
    found, start = [], 0
    for first in windows.split(max(_CELLS // len(windows), 1)):  # all at once, 20,000 views would take 30 GB
        low = torch.maximum(first[:, None, :2], windows[None, :, :2])
        high = torch.minimum(first[:, None, 2:], windows[None, :, 2:])
        common = torch.cat((low, high), 2)
        is_inside = (common == windows[None]).all(2) | (common == first[:, None]).all(2)
        is_aligned = (first[:, None, :2] == windows[None, :, :2]).any(2)
        pairs = ((high > low).all(2) & (is_inside | is_aligned)).triu(1 + start).nonzero()
        found.append(pairs + pairs.new_tensor([start, 0]))
        start += len(first)
    return torch.cat(found)


def _compare(found: _Boxes, windows: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Links between boxes of one object, int64 (2, E), and pairs (part, whole), int64 (2, F). Boxes are numbered view
    by view; links are in descending order of the lower of their two scores."""
    slots = found.scores.shape[1]
    links, parts, strengths = [], [], []
    for views in pairs.split(max(_CELLS // slots**2, 1)):
        first, second = (_Boxes(*(t[views[:, side]] for t in found)) for side in (0, 1))
        common = [_clip_to_common(view.boxes, windows[views]) for view in (first, second)]
        overlap = _intersections(*common)
        comparable = (first.classes[:, :, None] == second.classes[:, None]) & (first.classes >= 0)[:, :, None]
        comparable &= overlap > 0
        union = _area(common[0])[:, :, None] + _area(common[1])[:, None] - overlap
        iou = torch.where(comparable, overlap / union, 0.0)
        is_linked = (iou == iou.amax(2, keepdim=True)) & (iou == iou.amax(1, keepdim=True)) & (iou >= LINK_IOU)
        pair, a, b = is_linked.nonzero(as_tuple=True)
        links.append(views[pair].T * slots + torch.stack((a, b)))
        strengths.append(torch.minimum(first.scores[pair, a], second.scores[pair, b]))
        pair, a, b = _is_part(first, second, comparable, overlap).nonzero(as_tuple=True)
        parts.append(views[pair].T * slots + torch.stack((a, b)))
        turned = _is_part(second, first, comparable.transpose(1, 2), overlap.transpose(1, 2))
        pair, b, a = turned.nonzero(as_tuple=True)
        parts.append(views[pair].flip(1).T * slots + torch.stack((b, a)))
    order = torch.cat(strengths).argsort(descending=True, stable=True)
    return torch.cat(links, 1)[:, order], torch.cat(parts, 1)


def _clip_to_common(boxes: Tensor, windows: Tensor) -> Tensor:
    """Boxes (P, K, 4) of one of two views, clipped to the common area of the views' ``windows`` (P, 2, 4)."""
    low = torch.maximum(boxes[..., :2], windows[:, None, :, :2].amax(2))
    high = torch.minimum(boxes[..., 2:], windows[:, None, :, 2:].amin(2))
    return torch.cat((low, torch.maximum(low, high)), 2)


def _is_part(boxes: _Boxes, others: _Boxes, comparable: Tensor, overlap: Tensor) -> Tensor:
    """Which of ``boxes`` are cut and lie in which larger ones of ``others``: bool (P, K, K), as their ``overlap``."""
    area, other_area = _area(boxes.boxes)[:, :, None], _area(others.boxes)[:, None]
    is_inside = comparable & (overlap >= PART_OF * area) & (other_area > area)
    is_sure = others.scores[:, None] >= PART_SCORE * boxes.scores[:, :, None]
    return is_inside & is_sure & boxes.cut.any(2)[:, :, None]


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def _intersections(a: Tensor, b: Tensor) -> Tensor:
    """Areas (P, K, L) of the intersections of boxes (P, K, 4) with boxes (P, L, 4)."""
    low = torch.maximum(a[:, :, None, :2], b[:, None, :, :2])
    high = torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:])
    return (high - low).clamp_(min=0).prod(-1)


def _clusters(links: Tensor, slots: int, count: int) -> Tensor:
    """The smallest number of a box of the cluster that each box belongs to: int64 (N,).

    Clusters grow by their best link, unless they would then have two boxes of a view, which are two objects.

    Args:
        links: int64 (2, E), the best first.
        slots: K; box n is of view n // K.
        count: N.
    """
    first, views = list(range(count)), {}

    def first_of(box: int) -> int:
        while first[box] != box:
            first[box] = box = first[first[box]]
        return box

    for link in links.T.tolist():
        low, high = sorted(map(first_of, link))
        seen = views.get(low, {low // slots}), views.get(high, {high // slots})
        if low != high and seen[0].isdisjoint(seen[1]):
            first[high], views[low] = low, seen[0] | seen[1]
    return torch.tensor([first_of(box) for box in range(count)], device=links.device)


def _join(found: _Boxes, cluster: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The clusters' boxes (N, 4), scores (N,), and whether all sides are seen, bool (N,). Each cluster is at the number
    of its first box; the other scores are -1."""
    boxes, scores, cut = found.boxes.flatten(0, 1), found.scores.flatten(), found.cut.flatten(0, 1)
    count = len(scores)
    by_score = scores.argsort(descending=True, stable=True)
    rank = torch.empty_like(by_score).scatter_(0, by_score, torch.arange(count, device=scores.device))
    index = cluster[:, None].expand(-1, 4)
    seen = rank[:, None] + count * cut  # boxes that see a side come first
    best = torch.full_like(seen, 2 * count).scatter_reduce(0, index, seen, "amin")
    sees = best < count
    chosen = boxes[by_score].gather(0, torch.where(sees, best, 0))
    signs = boxes.new_tensor([1, 1, -1, -1])  # of several cut sides, the outermost
    outermost = torch.full_like(boxes, torch.inf).scatter_reduce(0, index, boxes * signs, "amin") * signs
    joined = torch.where(sees, chosen, outermost)
    joined = torch.cat((joined[:, :2], torch.maximum(joined[:, 2:], joined[:, :2])), 1)
    best_score = torch.full_like(scores, -1).scatter_reduce(0, cluster, scores, "amax")
    is_first = cluster == torch.arange(count, device=scores.device)
    return joined, torch.where(is_first, best_score, -1.0), sees.all(1)


def _has_only_parts(parts: Tensor, cluster: Tensor) -> Tensor:
    """Which clusters consist of parts of other clusters: bool (N,)."""
    part, whole = parts
    is_part = torch.zeros_like(cluster, dtype=torch.bool)
    is_part[part[cluster[part] != cluster[whole]]] = True
    return torch.ones_like(cluster).scatter_reduce(0, cluster, is_part.long(), "amin").bool()
