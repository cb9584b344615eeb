"""Maps' boxes to detections: by threshold and non-maximum suppression (the only one in the project), or by rank alone.

Greedy suppression is a chain: a box falls to any better box of its class that stands. Here the chain is solved for all
images at once, in blocks of candidates from the best down. Within a block, "a box stands unless a better standing one
overlaps it" is repeated until nothing changes, which takes as many rounds as the longest chain is long and ends in the
greedy answer (Cluster-NMS, Zheng et al. 2021). Images and classes are told apart by index and never by shifting
coordinates, which costs precision with every image and class: an image's result is the same alone and in any batch.

Legend: B images, N boxes, C classes, Q candidates an image (padded), T candidates in a block, K = ``max_det`` slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.branches import BranchedHead
from utils.boxes import area_xyxy
from utils.errors import UserError
from utils.structures import Detections

# By kind of head, as published for YOLOv5, YOLOv8 and YOLOX.
VALIDATION_IOU = {"anchor": 0.6, "anchor_free": 0.7, "objectness": 0.65}
DETECTION_IOU = 0.45  # fewer boxes an object than in validation, as in YOLOv5's and YOLOv8's detection
MAX_CANDIDATES = 30_000  # an image, the best by score
_BLOCK = 256  # candidates examined together; changes speed and memory only


class _Candidates(NamedTuple):
    """Descending scores; equal scores in the order of (box, class). Slots past an image's candidates have score -1."""

    boxes: Tensor  # float32 (B, Q, 4)
    scores: Tensor  # float32 (B, Q)
    classes: Tensor  # int64 (B, Q)

    def block(self, start: int) -> _Candidates:
        return _Candidates(*(t[:, start : start + _BLOCK] for t in self))


def _allowed_scores(scores: Tensor, conf_thres: float, multi_label: bool, classes: Sequence[int] | None) -> Tensor:
    """Which (box, class) pairs are candidates: bool (B, N, C)."""
    num_classes = scores.shape[-1]
    allowed = scores > conf_thres
    if not multi_label:
        best = scores.argmax(-1, keepdim=True)
        allowed &= best == torch.arange(num_classes, device=scores.device)
    if classes is not None:
        if wrong := [c for c in classes if not 0 <= c < num_classes]:
            raise UserError(f"class {wrong[0]}: the model has classes 0 to {num_classes - 1}")
        wanted = torch.zeros(num_classes, dtype=torch.bool)
        wanted[list(classes)] = True
        allowed &= wanted.to(scores.device)
    return allowed


def _collect_candidates(boxes: Tensor, scores: Tensor, allowed: Tensor) -> _Candidates:
    """The allowed pairs of each image, best first, padded to the image that has most."""
    batch = boxes.shape[0]
    image, box, label = allowed.nonzero(as_tuple=True)
    score = scores[image, box, label]
    order = score.argsort(descending=True, stable=True)
    order = order[image[order].argsort(stable=True)]  # by image, in it by score, then by (box, class)
    image, box, label, score = image[order], box[order], label[order], score[order]
    per_image = torch.bincount(image, minlength=batch)
    rank = torch.arange(len(image), device=image.device) - (per_image.cumsum(0) - per_image)[image]
    longest = min(int(per_image.max()), MAX_CANDIDATES) if batch else 0
    kept = rank < longest
    image, box, label, score, rank = image[kept], box[kept], label[kept], score[kept], rank[kept]
    padded = _Candidates(
        boxes.new_zeros((batch, longest, 4)), scores.new_full((batch, longest), -1.0), label.new_zeros((batch, longest))
    )
    padded.boxes[image, rank], padded.scores[image, rank], padded.classes[image, rank] = boxes[image, box], score, label
    return padded


def _overlaps(
    boxes_a: Tensor, classes_a: Tensor, boxes_b: Tensor, classes_b: Tensor, iou_thres: float, agnostic: bool
) -> Tensor:
    """Whether each box of a and each of b are of one class and have an IoU above the threshold: bool (B, |a|, |b|).

    Without a division, so that boxes without area overlap nothing.
    """
    low = torch.maximum(boxes_a[:, :, None, :2], boxes_b[:, None, :, :2])
    high = torch.minimum(boxes_a[:, :, None, 2:], boxes_b[:, None, :, 2:])
    width, height = (high - low).clamp_(min=0).unbind(-1)
    overlap = width * height
    union = area_xyxy(boxes_a)[:, :, None] + area_xyxy(boxes_b)[:, None] - overlap
    above = overlap > iou_thres * union
    return above if agnostic else above & (classes_a[:, :, None] == classes_b[:, None])


def _stand_in_block(standing: Tensor, suppresses: Tensor) -> Tensor:
    """Greedy suppression in a block: ``standing`` bool (B, T) before it, ``suppresses`` (B, T, T) row on column."""
    suppresses = suppresses.triu(1)
    kept = standing
    while True:
        fallen = (suppresses & kept[:, :, None]).any(1)
        settled = standing & ~fallen
        if torch.equal(settled, kept):
            return kept
        kept = settled


def suppression_iou(head: BranchedHead, given: float | None = None, default: float | None = None) -> float | None:
    """At which IoU boxes suppress each other: ``given``; else None for an end-to-end head, whose detections are not to
    be suppressed; else ``default`` or, without one, the value for validation."""
    if given is not None or head.is_end_to_end:
        return given
    return VALIDATION_IOU[head.kind] if default is None else default


def select_detections(
    boxes_xyxy: Tensor,
    scores: Tensor,
    *,
    conf_thres: float,
    iou_thres: float | None,
    max_det: int,
    agnostic: bool = False,
    multi_label: bool = True,
    classes: Sequence[int] | None = None,
) -> Detections:
    """`non_max_suppression`, or with ``iou_thres`` None `best_detections`.

    A box whose sides have changed places (distances without bins may be negative) becomes one without area.
    """
    low, high = boxes_xyxy.split(2, -1)
    boxes_xyxy = torch.cat((low, torch.maximum(low, high)), -1)
    common = {"conf_thres": conf_thres, "max_det": max_det, "multi_label": multi_label, "classes": classes}
    if iou_thres is None:
        return best_detections(boxes_xyxy, scores, **common)
    return non_max_suppression(boxes_xyxy, scores, iou_thres=iou_thres, agnostic=agnostic, **common)


def _ranked(scores: Tensor, places: Tensor, count: int) -> Tensor:
    """Positions (B, count) of the highest scores (B, M), of equal ones those with the lowest ``places`` (B, M) first.

    A positive float32 and its bits read as an integer sort alike, so one int64 key holds both.
    """
    keys = (scores.view(torch.int32).long() << 32) - places
    return keys.topk(count, dim=1).indices


@torch.no_grad()
def best_detections(
    boxes_xyxy: Tensor,
    scores: Tensor,
    *,
    conf_thres: float,
    max_det: int,
    multi_label: bool = True,
    classes: Sequence[int] | None = None,
) -> Detections:
    """The ``max_det`` best (box, class) pairs of each image, none suppressed: for end-to-end heads.

    Arguments and the order of equal scores are those of `non_max_suppression`. Shapes depend on no values, and nothing
    waits for the device.
    """
    boxes_xyxy, scores = boxes_xyxy.float(), scores.float()
    batch, count, num_classes = scores.shape
    scores = torch.where(_allowed_scores(scores, conf_thres, multi_label, classes), scores, -1.0)
    # A box of one of the best pairs is one of the best boxes by best pair: the others' pairs need no ranking.
    places = torch.arange(count, device=scores.device).expand(batch, -1)
    best = _ranked(scores.amax(-1), places, min(max_det, count))
    pairs = scores.gather(1, best[..., None].expand(-1, -1, num_classes)).flatten(1)
    places = (best[..., None] * num_classes + torch.arange(num_classes, device=scores.device)).flatten(1)
    chosen = _ranked(pairs, places, min(max_det, pairs.shape[1]))
    found, place = pairs.gather(1, chosen), places.gather(1, chosen)
    box = place.div(num_classes, rounding_mode="floor")
    kept = found >= 0
    columns = (
        torch.where(kept[..., None], boxes_xyxy.gather(1, box[..., None].expand(-1, -1, 4)), 0.0),
        found * kept,
        place.remainder(num_classes) * kept,
    )
    missing = max_det - found.shape[1]
    padded = [torch.cat((t, t.new_zeros((batch, missing, *t.shape[2:]))), 1) for t in columns]
    return Detections(*padded, kept.sum(1))


@torch.no_grad()
def non_max_suppression(
    boxes_xyxy: Tensor,
    scores: Tensor,
    *,
    conf_thres: float,
    iou_thres: float,
    max_det: int,
    agnostic: bool = False,
    multi_label: bool = True,
    classes: Sequence[int] | None = None,
) -> Detections:
    """Keeps, of each image and class, the best boxes that overlap no better kept one by more than ``iou_thres``.

    Args:
        boxes_xyxy: (B, N, 4) canvas pixels.
        scores: (B, N, C); NaN is below any threshold.
        conf_thres: a score must be above it.
        max_det: K, detections an image; the best are kept.
        agnostic: boxes of different classes suppress each other too.
        multi_label: every class above the threshold is a detection; otherwise only a box's best class may be one.
        classes: only these. A box whose best class is another isn't kept without ``multi_label``.

    Equal scores keep the order of (box, class), so a box listed earlier wins.
    """
    boxes_xyxy, scores = boxes_xyxy.float(), scores.float()
    allowed = _allowed_scores(scores, conf_thres, multi_label, classes)
    candidates = _collect_candidates(boxes_xyxy, scores, allowed)
    batch = boxes_xyxy.shape[0]
    # One slot more than asked for: whatever is past the last slot lands there and is cut off.
    kept_boxes = boxes_xyxy.new_zeros((batch, max_det + 1, 4))
    kept_scores = scores.new_zeros((batch, max_det + 1))
    kept_classes = torch.zeros((batch, max_det + 1), dtype=torch.long, device=scores.device)
    counts = torch.zeros(batch, dtype=torch.long, device=scores.device)
    most = 0  # kept so far in the fullest image
    for start in range(0, candidates.scores.shape[1], _BLOCK):
        block = candidates.block(start)
        standing = block.scores >= 0
        if most:
            earlier = (kept_boxes[:, :most], kept_classes[:, :most])
            standing &= ~_overlaps(*earlier, block.boxes, block.classes, iou_thres, agnostic).any(1)
        within = _overlaps(block.boxes, block.classes, block.boxes, block.classes, iou_thres, agnostic)
        standing = _stand_in_block(standing, within)
        slot = counts[:, None] + standing.cumsum(1) - 1
        slot = torch.where(standing, slot.clamp(max=max_det), max_det)
        kept_boxes.scatter_(1, slot[..., None].expand(-1, -1, 4), block.boxes)
        kept_scores.scatter_(1, slot, block.scores)
        kept_classes.scatter_(1, slot, block.classes)
        counts = (counts + standing.sum(1)).clamp(max=max_det)
        most, least = int(counts.max()), int(counts.min())
        if least == max_det:
            break
    return Detections(kept_boxes[:, :max_det], kept_scores[:, :max_det], kept_classes[:, :max_det], counts)
