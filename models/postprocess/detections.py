"""Decoded boxes to detections: by threshold and non-maximum suppression or, for end-to-end heads, by rank alone.

Legend: B images, N boxes, C classes, M candidates of all images, K = ``max_det`` slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.postprocess.box_voting import MIN_VOTING_SCORE, VOTERS, BoxGroups, vote
from models.postprocess.nms import nms_keep
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS
from utils.errors import UserError
from utils.structures import Detections

DETECTION_IOU = 0.45  # leaves fewer boxes an object than in validation, as in YOLOv5's and YOLOv8's detection
DEFAULT_CONFIDENCE = 0.25  # threshold of detection where no better one is known
# The names of what a validation selects from the same boxes, see `select_for_validation`.
SELECTIONS = SCORED, SHOWN, PLAIN = "scored", "shown", "plain"
_VOTED_ON = 300  # kept boxes of an image, the best before voting; later ones stay as they are, whatever max_det is
_FIRST_CANDIDATES = 4096  # an image; the rest is examined only if these do not fill all slots


@dataclass(frozen=True, kw_only=True)
class PostprocessSettings:
    """How detections are selected from decoded boxes and scores."""

    conf_thres: float  # scores of detections are above it; with voting, scores after it
    iou_thres: float | None  # a box that overlaps a better one of its class by more is suppressed; None: no NMS
    max_det: int = MAX_DETECTIONS  # of an image: the best of ``classes``
    agnostic: bool = False  # boxes of different classes suppress each other too
    multi_label: bool = True  # each class of a box above the threshold is a detection; else its best class alone
    # Classes to keep, chosen from the detections of all classes: none of these changes. Without ``multi_label``, a box
    # whose best class is another one is not kept. None: all.
    classes: Sequence[int] | None = None
    box_voting: bool = True  # those that a kept box suppresses move it and raise its score, see `vote`

    @property
    def votes(self) -> bool:
        """Whether there is box voting: only suppressed boxes vote."""
        return self.box_voting and self.iou_thres is not None


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """How a validation selects detections. The default confidence keeps nearly the whole PR curve."""

    conf_thres: float = 0.001
    iou_thres: float | None = None  # None: that of the model to score detections, that of detection to show them
    max_det: int = MAX_DETECTIONS
    single_cls: bool = False  # all classes count as one
    classes: Sequence[int] | None = None  # of the model that are detected, numbered anew in this order; None: all
    box_voting: bool = True

    def selections(self, nms_iou: float | None) -> dict[str, PostprocessSettings]:
        """The settings of each of `SELECTIONS`. ``nms_iou``: of the model in validation; None: it needs no NMS."""
        scored_iou = nms_iou if self.iou_thres is None else self.iou_thres
        shown_iou = detection_iou(nms_iou) if self.iou_thres is None else self.iou_thres
        scored = PostprocessSettings(
            conf_thres=self.conf_thres,
            iou_thres=scored_iou,
            max_det=self.max_det,
            classes=None if self.single_cls else self.classes,
            box_voting=self.box_voting,
        )
        shown = replace(scored, iou_thres=shown_iou, multi_label=False)
        return {SCORED: scored, SHOWN: shown, PLAIN: replace(shown, box_voting=False)}


@torch.no_grad()
def select_detections(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings) -> Detections:
    """The best boxes of each image. Of equal scores the first (box, class) is the best. A box whose sides are swapped
    (distances without bins may be negative) becomes a box without area.

    Without NMS no shape depends on values, and the host does not wait for the device. Raises UserError for classes that
    the model does not have.

    Args:
        boxes_xyxy: (B, N, 4) canvas pixels.
        scores: (B, N, C); NaN is below any threshold.
    """
    boxes_xyxy = boxes_xyxy.float()
    scores = scores.float()
    low, high = boxes_xyxy.split(2, -1)
    boxes_xyxy = torch.cat((low, torch.maximum(low, high)), -1)
    lowest_score = min(settings.conf_thres, MIN_VOTING_SCORE) if settings.votes else settings.conf_thres
    allowed = scores > lowest_score  # the (box, class) pairs that are candidates: bool (B, N, C)
    if not settings.multi_label:
        allowed &= scores.argmax(-1, keepdim=True) == torch.arange(scores.shape[-1], device=scores.device)
    wanted = None if settings.classes is None else _class_mask(settings.classes, scores)
    if settings.iou_thres is None:
        selectable = allowed if wanted is None else allowed & wanted
        return _best_pairs(boxes_xyxy, torch.where(selectable, scores, -1.0), settings.max_det)
    kept = _non_max_suppression(boxes_xyxy, scores, allowed, wanted, settings)
    return _fill_slots(kept, scores.shape[0], settings)


def detections_to_score(
    model: nn.Module, raw: list[Tensor], settings: ValidationSettings = ValidationSettings()
) -> Detections:
    """The detections of a detector's raw maps whose AP is computed. ``model`` has ``decode`` and ``nms_iou``, as a
    `Detector`."""
    boxes, scores = model.decode(raw)
    return _select_classes(boxes, scores, settings.selections(model.nms_iou)[SCORED], settings)


def select_for_validation(
    model: nn.Module, raw: list[Tensor], settings: ValidationSettings = ValidationSettings()
) -> dict[str, Detections]:
    """The detections of a detector's raw maps for validation, by name:

    - `SCORED`: `detections_to_score`.
    - `SHOWN`: those that detection finds in the same boxes, for its threshold and what becomes of its detections.
    - `PLAIN`: the same without box voting, for the threshold of those who have none.

    ``model`` has ``decode`` and ``nms_iou``, as a `Detector`.
    """
    boxes, scores = model.decode(raw)
    selections = settings.selections(model.nms_iou)
    found = {name: _select_classes(boxes, scores, selections[name], settings) for name in (SCORED, SHOWN)}
    if selections[SHOWN].votes:
        found[PLAIN] = _select_classes(boxes, scores, selections[PLAIN], settings)
    else:
        found[PLAIN] = found[SHOWN]
    return found


def detection_iou(nms_iou: float | None) -> float | None:
    """The overlap from which NMS suppresses a box in detection, unless the user sets another one; None: no NMS.
    ``nms_iou``: of the model in validation."""
    return None if nms_iou is None else DETECTION_IOU


def _select_classes(
    boxes: Tensor, scores: Tensor, selection: PostprocessSettings, settings: ValidationSettings
) -> Detections:
    """`select_detections` for one of the selections of ``settings``, with the class numbers of the data set."""
    if settings.single_cls:
        scores = (scores if settings.classes is None else scores[..., settings.classes]).amax(-1, keepdim=True)
    found = select_detections(boxes, scores, selection)
    if selection.classes is None:
        return found
    number = found.classes.new_zeros(scores.shape[-1])
    number[selection.classes] = torch.arange(len(selection.classes), device=number.device)
    return found._replace(classes=number[found.classes])


def _class_mask(classes: Sequence[int], scores: Tensor) -> Tensor:
    """Which classes are among ``classes``: bool (C,)."""
    known = range(scores.shape[-1])
    if wrong := set(classes).difference(known):
        raise UserError(f"class {min(wrong)}: the model has classes 0 to {known[-1]}")
    return torch.tensor([c in classes for c in known], device=scores.device)


def _top_positions(scores: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Positions (B, count) of the highest scores (B, M), of equal ones those with the lowest ``numbers`` (B, M) first.

    A positive float32 sorts like its bits read as an integer, so one int64 key holds both.
    """
    keys = (scores.view(torch.int32).long() << 32) - numbers
    return keys.topk(count, dim=1).indices


def _best_pairs(boxes_xyxy: Tensor, scores: Tensor, max_det: int) -> Detections:
    """The ``max_det`` (box, class) pairs of each image with the highest ``scores``, which are negative where a pair is
    not allowed."""
    batch, count, num_classes = scores.shape
    # The best pairs belong to the boxes with the best highest scores, so only those boxes' pairs are ranked.
    numbers = torch.arange(count, device=scores.device).expand(batch, -1)
    best = _top_positions(scores.amax(-1), numbers, min(max_det, count))
    pair_scores = scores.gather(1, best[..., None].expand(-1, -1, num_classes)).flatten(1)
    pair_numbers = (best[..., None] * num_classes + torch.arange(num_classes, device=scores.device)).flatten(1)
    chosen = _top_positions(pair_scores, pair_numbers, min(max_det, pair_scores.shape[1]))
    found, pair = pair_scores.gather(1, chosen), pair_numbers.gather(1, chosen)
    box = pair.div(num_classes, rounding_mode="floor")
    kept = found >= 0
    columns = (
        torch.where(kept[..., None], boxes_xyxy.gather(1, box[..., None].expand(-1, -1, 4)), 0.0),
        found * kept,
        pair.remainder(num_classes) * kept,
    )
    missing = max_det - found.shape[1]
    padded = [torch.cat((t, t.new_zeros((batch, missing, *t.shape[2:]))), 1) for t in columns]
    return Detections(*padded, kept.sum(1))


class _Candidates(NamedTuple):
    """Sorted by image, then by descending score; equal scores in the order of (box, class)."""

    image: Tensor  # int64 (M,)
    rank: Tensor  # int64 (M,) in the image, from 0
    boxes: Tensor  # float32 (M, 4)
    scores: Tensor  # float32 (M,)
    classes: Tensor  # int64 (M,)

    def where(self, chosen: Tensor) -> _Candidates:
        index = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        return _Candidates(*(t.index_select(0, index) for t in self))


def _starts(image: Tensor, batch: int) -> Tensor:
    """Where each image begins in ascending ``image`` (M,): int64 (batch + 1,), the last one M. Unlike with bincount,
    the host does not wait."""
    return torch.searchsorted(image, torch.arange(batch + 1, device=image.device))


def _numbers_in_image(image: Tensor, batch: int) -> Tensor:
    """How many of the same image come before each of ascending ``image``: int64 (M,)."""
    return torch.arange(len(image), device=image.device) - _starts(image, batch)[image]


def _best_first(image: Tensor, score: Tensor) -> Tensor:
    """The order by image, then descending score, (M,); of equal scores, what came first comes first."""
    order = score.argsort(descending=True, stable=True)
    return order[image[order].argsort(stable=True)]


def _collect_candidates(boxes: Tensor, scores: Tensor, allowed: Tensor) -> tuple[_Candidates, Tensor, int]:
    """The allowed pairs, at most the `MAX_CANDIDATES` best of each image, the number of each image's allowed pairs,
    int64 (B,), and the largest number."""
    batch = boxes.shape[0]
    image, box, label = allowed.nonzero(as_tuple=True)
    counts = _starts(image, batch).diff()
    fullest = max(counts.tolist(), default=0)
    is_crowded = fullest > MAX_CANDIDATES
    if is_crowded:  # sorting millions takes seconds, finding the worst score to keep does not
        last = torch.where(allowed, scores, -1.0).flatten(1).topk(MAX_CANDIDATES).values[:, -1]
        image, box, label = (allowed & (scores >= last[:, None, None])).nonzero(as_tuple=True)
    score = scores[image, box, label]
    order = _best_first(image, score)  # equal scores in the order of (box, class)
    image, box = image[order], box[order]
    rank = _numbers_in_image(image, batch)
    found = _Candidates(image, rank, boxes[image, box], score[order], label[order])
    return found.where(rank < MAX_CANDIDATES) if is_crowded else found, counts, fullest


def _non_max_suppression(
    boxes_xyxy: Tensor, scores: Tensor, allowed: Tensor, wanted: Tensor | None, settings: PostprocessSettings
) -> _Candidates:
    """The candidates of ``wanted`` classes, bool (C,), that are kept, after voting; more than ``max_det`` of an image
    may be among them."""
    batch, _, num_classes = scores.shape
    agnostic = settings.agnostic
    max_det = settings.max_det
    candidates, counts, fullest = _collect_candidates(boxes_xyxy, scores, allowed)
    if wanted is not None:
        max_det = MAX_CANDIDATES  # of all classes
        if not agnostic:  # boxes of other classes only take places among those that are voted on
            counted = (counts > _VOTED_ON)[candidates.image] & (candidates.rank < VOTERS)
            candidates = candidates.where(wanted[candidates.classes] | (counted & settings.box_voting))
    max_kept = max(max_det, _VOTED_ON) if settings.box_voting else max_det

    def group_of(examined: _Candidates) -> Tensor:
        return examined.image if agnostic else examined.image * num_classes + examined.classes

    def suppress(examined: _Candidates) -> Tensor:
        groups = batch if agnostic else batch * num_classes
        return nms_keep(examined.boxes, group_of(examined), groups, settings.iou_thres, max_kept)

    if fullest <= _FIRST_CANDIDATES:
        keep = suppress(candidates)
    else:  # a box that is kept among the best candidates is kept among all
        is_first = candidates.rank < _FIRST_CANDIDATES
        keep = is_first.masked_scatter(is_first, suppress(candidates.where(is_first)))
        kept_counts = torch.zeros_like(counts).index_add_(0, candidates.image, keep.long())
        again = ((counts > _FIRST_CANDIDATES) & (kept_counts < max_det))[candidates.image]
        if again.any():
            keep = keep.masked_scatter(again, suppress(candidates.where(again)))
    kept = candidates.where(keep)
    if settings.box_voting and fullest > 1:
        others = candidates.where(~keep & (candidates.rank < VOTERS) & (candidates.scores > MIN_VOTING_SCORE))
        moves = (kept.rank < VOTERS) & (_numbers_in_image(kept.image, batch) < _VOTED_ON)
        kept_boxes, other_boxes = (BoxGroups(c.boxes, c.scores, group_of(c)) for c in (kept, others))
        boxes, voted = vote(kept_boxes, other_boxes, moves, settings.iou_thres)
        kept = kept._replace(boxes=boxes, scores=voted).where(_best_first(kept.image, voted))
    return kept if wanted is None else kept.where(wanted[kept.classes])


def _fill_slots(kept: _Candidates, batch: int, settings: PostprocessSettings) -> Detections:
    """The first ``max_det`` of each image, as far as their scores are above ``conf_thres``, padded to `Detections`."""
    max_det = settings.max_det
    slot = _numbers_in_image(kept.image, batch)
    shown = (kept.scores > settings.conf_thres) & (slot < max_det)
    row = torch.where(shown, kept.image * max_det + slot, batch * max_det)  # the last row is dropped
    padded = []
    for values in (kept.boxes, kept.scores, kept.classes):
        rows = values.new_zeros((batch * max_det + 1, *values.shape[1:]))
        rows[row] = values
        padded.append(rows[:-1].view(batch, max_det, *values.shape[1:]))
    counts = kept.image.new_zeros(batch).index_add_(0, kept.image, shown.long())
    return Detections(*padded, counts)
