"""Detections by non-maximum suppression: candidates of all images, NMS within groups of them, and box voting.

Legend: B images, N boxes, C classes, L classes with which a box may be detected (its labels), M candidates of all
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from models.postprocess.box_voting import MIN_VOTING_SCORE, VOTERS, BoxGroups, vote
from models.postprocess.nms import nms_keep
from models.postprocess.selection import PostprocessSettings
from utils.config.settings import MAX_CANDIDATES
from utils.detections import Detections
from utils.errors import UserError

_MAX_VOTED = 300  # kept boxes per image that voting may move, the best before voting; independent of max_det
_FIRST_CANDIDATES = 4096  # candidates per image in the first pass; a second one runs only if slots stay empty


def suppress(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings, iou_thres: float) -> NmsResult:
    """Runs NMS with ``iou_thres``, so that box voting can follow if ``settings`` enable it. See `select_detections`."""
    batch, _, num_classes = scores.shape
    wanted = None if settings.classes is None else class_mask(settings.classes, scores)
    label_scores, classes = eligible_labels(scores.float(), settings.multi_label)
    threshold = _candidate_threshold(settings)
    candidates = _collect_candidates(order_sides(boxes_xyxy.float()), label_scores, classes, threshold)
    if wanted is not None and not settings.agnostic:
        candidates = candidates.take(_needed_for_classes(candidates, wanted, settings.box_voting))
    groups = _Groups(batch, 1 if settings.agnostic else num_classes, iou_thres)
    keep = _keep(candidates, groups, settings)
    return NmsResult(candidates=candidates, keep=keep, groups=groups, settings=settings, wanted=wanted)


def _candidate_threshold(settings: PostprocessSettings) -> float:
    """Returns the score above which a pair is a candidate: box voting also needs some below the threshold."""
    return min(settings.conf_thres, MIN_VOTING_SCORE) if settings.box_voting else settings.conf_thres


@dataclass(frozen=True, kw_only=True)
class NmsResult:
    """Candidates after NMS, from which detections are taken with or without box voting."""

    candidates: _CandidateSet
    keep: Tensor  # bool (M,) what NMS keeps; may be more than ``max_det`` per image
    groups: _Groups
    settings: PostprocessSettings
    wanted: Tensor | None  # bool (C,) classes to return; None: all

    def detections(self, *, voted: bool) -> Detections:
        """Returns the best kept candidates; with ``voted``, suppressed ones have moved them."""
        if voted and self.candidates.max_per_image > 1:
            kept = _vote(self.candidates, self.keep, self.groups)
        else:
            kept = self.candidates.take(self.keep)
        if self.wanted is not None:
            kept = kept.take(self.wanted[kept.classes])
        return _fill_slots(kept, self.groups.batch, self.settings)


@dataclass(frozen=True, kw_only=True)
class _CandidateSet:
    """Candidates of all images, sorted by image, then by descending score; equal scores by (box, class)."""

    image: Tensor  # int64 (M,)
    rank: Tensor  # int64 (M,) in the image, from 0
    boxes: Tensor  # float32 (M, 4)
    scores: Tensor  # float32 (M,)
    classes: Tensor  # int64 (M,)
    candidates_per_image: Tensor  # int64 (B,) pairs above the threshold; only `MAX_CANDIDATES` are in this set
    max_per_image: int  # the largest of these numbers, on the host

    def take(self, rows: Tensor) -> _CandidateSet:
        """Selects ``rows``: a mask, bool (M,), or indices."""
        index = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        return replace(
            self,
            image=self.image.index_select(0, index),
            rank=self.rank.index_select(0, index),
            boxes=self.boxes.index_select(0, index),
            scores=self.scores.index_select(0, index),
            classes=self.classes.index_select(0, index),
        )


class _Groups(NamedTuple):
    """Groups of candidates that suppress each other: all of one image, or all of one class in an image."""

    batch: int
    per_image: int  # number of classes, or 1 if all classes form one group
    iou_thres: float  # IoU above which a box suppresses a worse one of its group

    def of(self, candidates: _CandidateSet) -> Tensor:
        """Returns each candidate's group, from 0: int64 (M,)."""
        if self.per_image == 1:
            return candidates.image
        return candidates.image * self.per_image + candidates.classes

    def nms(self, candidates: _CandidateSet, max_kept: int) -> Tensor:
        """Returns which candidates NMS keeps: bool (M,). ``max_kept``: as ``max_det`` of `nms_keep`."""
        groups = self.batch * self.per_image
        return nms_keep(candidates.boxes, self.of(candidates), groups, self.iou_thres, max_kept)


def order_sides(boxes_xyxy: Tensor) -> Tensor:
    """Collapses boxes (B, N, 4) with swapped sides to zero area: moves the right and lower sides to the opposite
    ones."""
    low, high = boxes_xyxy.split(2, -1)
    return torch.cat((low, torch.maximum(low, high)), -1)


def eligible_labels(scores: Tensor, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Returns the scores and the classes with which boxes may be detected, both (B, N, L): L is C with ``multi_label``,
    else 1, the best class of each box. ``scores``: (B, N, C)."""
    if multi_label:
        return scores, torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    best = scores.max(-1, keepdim=True)
    return best.values, best.indices


def class_mask(classes: Sequence[int], scores: Tensor) -> Tensor:
    """Returns which of the model's classes are in ``classes``: bool (C,)."""
    known = range(scores.shape[-1])
    unknown = set(classes).difference(known)
    if unknown:
        raise UserError(f"class {min(unknown)}: the model has classes 0 to {known[-1]}")
    return torch.tensor([c in classes for c in known], device=scores.device)


def _collect_candidates(boxes: Tensor, scores: Tensor, classes: Tensor, lowest_score: float) -> _CandidateSet:
    """Collects the (box, label) pairs with ``scores`` above ``lowest_score``, at most the `MAX_CANDIDATES` best of each
    image, and counts all of them. ``scores``, ``classes``: (B, N, L)."""
    batch = boxes.shape[0]
    allowed = scores > lowest_score
    image, box, label = allowed.nonzero(as_tuple=True)
    candidates_per_image = _starts(image, batch).diff()
    max_per_image = max(candidates_per_image.tolist(), default=0)
    is_crowded = max_per_image > MAX_CANDIDATES
    if is_crowded:  # sorting millions takes seconds, finding the worst score to keep does not
        last = torch.where(allowed, scores, -1.0).flatten(1).topk(MAX_CANDIDATES).values[:, -1]
        image, box, label = (allowed & (scores >= last[:, None, None])).nonzero(as_tuple=True)
    score = scores[image, box, label]
    order = _best_first(image, score)  # equal scores in the order of (box, label)
    image = image[order]
    box = box[order]
    rank = _numbers_in_image(image, batch)
    candidates = _CandidateSet(
        image=image,
        rank=rank,
        boxes=boxes[image, box],
        scores=score[order],
        classes=classes[image, box, label[order]],
        candidates_per_image=candidates_per_image,
        max_per_image=max_per_image,
    )
    return candidates.take(rank < MAX_CANDIDATES) if is_crowded else candidates


def _needed_for_classes(candidates: _CandidateSet, wanted: Tensor, box_voting: bool) -> Tensor:
    """Returns which candidates the result for ``wanted`` classes depends on, if NMS is by class: bool (M,).

    Other classes matter only to voting, in crowded images: their boxes count among the `_MAX_VOTED` that may move.
    """
    is_wanted = wanted[candidates.classes]
    if not box_voting:
        return is_wanted
    is_crowded = (candidates.candidates_per_image > _MAX_VOTED)[candidates.image]
    return is_wanted | (is_crowded & (candidates.rank < VOTERS))


def _keep(candidates: _CandidateSet, groups: _Groups, settings: PostprocessSettings) -> Tensor:
    """Returns which candidates NMS keeps: bool (M,). In crowded images, the best candidates are tried first, and all
    only if fewer of these are kept than detections may be needed."""
    needed = settings.max_det if settings.classes is None else MAX_CANDIDATES  # other classes are dropped afterwards
    max_kept = max(needed, _MAX_VOTED) if settings.box_voting else needed
    if candidates.max_per_image <= _FIRST_CANDIDATES:
        return groups.nms(candidates, max_kept)
    # NMS keeps a box among the best candidates exactly if it keeps it among all.
    is_first = candidates.rank < _FIRST_CANDIDATES
    keep = is_first.masked_scatter(is_first, groups.nms(candidates.take(is_first), max_kept))
    kept_per_image = torch.zeros_like(candidates.candidates_per_image).index_add_(0, candidates.image, keep.long())
    is_crowded = candidates.candidates_per_image > _FIRST_CANDIDATES
    needs_all = (is_crowded & (kept_per_image < needed))[candidates.image]
    if needs_all.any():
        keep = keep.masked_scatter(needs_all, groups.nms(candidates.take(needs_all), max_kept))
    return keep


def _vote(candidates: _CandidateSet, keep: Tensor, groups: _Groups) -> _CandidateSet:
    """Lets suppressed candidates vote on those to ``keep``, bool (M,). Returns these, sorted by their new scores."""
    kept = candidates.take(keep)
    others = candidates.take(~keep & (candidates.rank < VOTERS) & (candidates.scores > MIN_VOTING_SCORE))
    moves = (kept.rank < VOTERS) & (_numbers_in_image(kept.image, groups.batch) < _MAX_VOTED)
    kept_boxes = BoxGroups(kept.boxes, kept.scores, groups.of(kept))
    other_boxes = BoxGroups(others.boxes, others.scores, groups.of(others))
    boxes, scores = vote(kept_boxes, other_boxes, moves, groups.iou_thres)
    return replace(kept, boxes=boxes, scores=scores).take(_best_first(kept.image, scores))


def _fill_slots(kept: _CandidateSet, batch: int, settings: PostprocessSettings) -> Detections:
    """Pads to `Detections` the first ``max_det`` candidates of each image with scores above ``conf_thres``."""
    max_det = settings.max_det
    slot = _numbers_in_image(kept.image, batch)
    is_returned = (kept.scores > settings.conf_thres) & (slot < max_det)
    row = torch.where(is_returned, kept.image * max_det + slot, batch * max_det)  # the last row is dropped

    def padded(values: Tensor) -> Tensor:
        rows = values.new_zeros((batch * max_det + 1, *values.shape[1:]))
        rows[row] = values
        return rows[:-1].view(batch, max_det, *values.shape[1:])

    counts = kept.image.new_zeros(batch).index_add_(0, kept.image, is_returned.long())
    return Detections(padded(kept.boxes), padded(kept.scores), padded(kept.classes), counts)


def _starts(image: Tensor, batch: int) -> Tensor:
    """Returns where each image starts in ascending ``image`` (M,): int64 (batch + 1,), the last one M. Unlike
    bincount, this does not make the host wait."""
    return torch.searchsorted(image, torch.arange(batch + 1, device=image.device))


def _numbers_in_image(image: Tensor, batch: int) -> Tensor:
    """Numbers the elements of each image from 0, in ascending ``image`` (M,): int64 (M,)."""
    return torch.arange(len(image), device=image.device) - _starts(image, batch)[image]


def _best_first(image: Tensor, score: Tensor) -> Tensor:
    """Returns the order (M,) by image, then by descending score. The sort is stable."""
    order = score.argsort(descending=True, stable=True)
    return order[image[order].argsort(stable=True)]
