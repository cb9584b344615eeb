"""Decoded boxes to detections: by threshold and non-maximum suppression or, for end-to-end heads, by rank alone.

A validation selects detections from the same boxes in three ways (`ValidationSettings.selections`). Each has a
confidence threshold with the best F1; a checkpoint stores them, and an `InferenceModel` and an `EvalResult` have them:

    SCORED          what AP needs: nearly all boxes, every class of a box      scored_confidence
    SHOWN           what detect.py shows: one class of a box, NMS at 0.45      confidence (`EvalResult.threshold`)
    SHOWN_UNVOTED   the same without box voting                                plain_confidence

detect.py shows what scores above ``confidence`` or, without box voting, above ``plain_confidence``, unless the user
chooses another threshold (`InferenceModel.threshold`). An exported file states the one that fits its output
(engine/export/thresholds.py).

Legend: B images, N boxes, C classes, L classes with which a box may be detected (its labels), M candidates of all
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from models.postprocess.box_voting import MIN_VOTING_SCORE, VOTERS, BoxGroups, vote
from models.postprocess.nms import nms_keep
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS
from utils.detections import Detections
from utils.errors import UserError

DETECTION_IOU = 0.45  # NMS threshold of detect.py, lower than in validation, as in YOLOv5 and YOLOv8
DEFAULT_CONFIDENCE = 0.25  # confidence threshold of detect.py if validation has found none
SCORED = "scored"
SHOWN = "shown"
SHOWN_UNVOTED = "shown_unvoted"
SELECTIONS = (SCORED, SHOWN, SHOWN_UNVOTED)
_MAX_VOTED = 300  # kept boxes per image that voting may move, the best before voting; independent of max_det
_FIRST_CANDIDATES = 4096  # candidates per image in the first pass; a second one runs only if slots stay empty


class BoxDecoder(Protocol):
    """The part of a model that postprocessing needs; a `Detector` has it."""

    @property
    def nms_iou(self) -> float | None:
        """IoU threshold of NMS in validation; None if the detections need no NMS."""
        ...

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw maps to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        ...


@dataclass(frozen=True, kw_only=True)
class PostprocessSettings:
    """Settings of the selection of detections from decoded boxes and scores."""

    conf_thres: float  # only detections with a higher score (after box voting) are returned
    iou_thres: float | None  # NMS suppresses a box if its IoU with a better one of its class is higher; None: no NMS
    max_det: int = MAX_DETECTIONS  # maximum number of detections per image, counted after filtering by ``classes``
    agnostic: bool = False  # boxes of different classes suppress each other too
    multi_label: bool = True  # every class above the threshold makes a detection of a box; False: only its best class
    # Classes to return; None: all. They are filtered after NMS over all classes, which therefore does not depend on
    # this. Without ``multi_label``, a box whose best class is another one is dropped.
    classes: Sequence[int] | None = None
    box_voting: bool = True  # suppressed boxes move the box that suppresses them and raise its score, see `vote`


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Settings with which a validation selects detections. The default confidence keeps nearly the whole PR curve."""

    conf_thres: float = 0.001
    iou_thres: float | None = None  # None: the model's for `SCORED`, `detection_iou` for the other selections
    max_det: int = MAX_DETECTIONS
    single_cls: bool = False  # treat all classes as one
    classes: Sequence[int] | None = None  # the model's classes to detect, renumbered in this order; None: all
    box_voting: bool = True

    def selections(self, nms_iou: float | None) -> dict[str, PostprocessSettings]:
        """Returns the settings of each of `SELECTIONS`. ``nms_iou``: see `BoxDecoder`."""
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
        return {SCORED: scored, SHOWN: shown, SHOWN_UNVOTED: replace(shown, box_voting=False)}


@torch.no_grad()
def select_detections(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings) -> Detections:
    """Selects the best boxes of each image. Among equal scores, the first (box, class) pair ranks first.

    A box with swapped sides (regressed distances may be negative) becomes a box without area. Without NMS, no shape
    depends on values, and the host does not wait for the device.

    Args:
        boxes_xyxy: (B, N, 4) canvas pixels.
        scores: (B, N, C); NaN is below any threshold.

    Raises UserError for classes that the model does not have.
    """
    if settings.iou_thres is None:
        return _select_by_rank(boxes_xyxy, scores, settings)
    return _suppress(boxes_xyxy, scores, settings, settings.iou_thres).detections(voted=settings.box_voting)


@torch.no_grad()
def select_with_and_without_voting(
    boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings
) -> tuple[Detections, Detections]:
    """Returns `select_detections` with and without box voting, which share one NMS. If ``settings`` rule voting out, so
    that both would be equal, they are one object."""
    if settings.iou_thres is None or not settings.box_voting:
        detections = select_detections(boxes_xyxy, scores, settings)
        return detections, detections
    # Voting needs candidates below the confidence threshold. They rank last, so without voting they change nothing.
    suppressed = _suppress(boxes_xyxy, scores, settings, settings.iou_thres)
    return suppressed.detections(voted=True), suppressed.detections(voted=False)


def detections_to_score(
    model: nn.Module, raw: list[Tensor], settings: ValidationSettings = ValidationSettings()
) -> Detections:
    """Selects the detections whose AP is computed, from the raw maps of ``model``, a `BoxDecoder`."""
    decoder = _as_decoder(model)
    boxes, scores = _decode(decoder, raw, settings)
    selection = settings.selections(decoder.nms_iou)[SCORED]
    return _renumber_classes(select_detections(boxes, scores, selection), selection.classes)


def select_for_validation(
    model: nn.Module, raw: list[Tensor], settings: ValidationSettings = ValidationSettings()
) -> dict[str, Detections]:
    """Selects detections for validation from the raw maps of ``model``, a `BoxDecoder`. Returns them by name:

    - `SCORED`: see `detections_to_score`.
    - `SHOWN`: what detect.py would find, for its best threshold, the confusion matrix and pictures.
    - `SHOWN_UNVOTED`: the same without box voting, for the best threshold of runtimes that have none.
    """
    decoder = _as_decoder(model)
    boxes, scores = _decode(decoder, raw, settings)
    selections = settings.selections(decoder.nms_iou)
    shown, unvoted = select_with_and_without_voting(boxes, scores, selections[SHOWN])
    selected = {SCORED: select_detections(boxes, scores, selections[SCORED]), SHOWN: shown, SHOWN_UNVOTED: unvoted}
    return {name: _renumber_classes(selected[name], selections[name].classes) for name in SELECTIONS}


def _as_decoder(model: nn.Module) -> BoxDecoder:
    return cast(BoxDecoder, model)  # to torch's stubs, any attribute of a module is a Tensor or a Module


def _decode(decoder: BoxDecoder, raw: list[Tensor], settings: ValidationSettings) -> tuple[Tensor, Tensor]:
    """Decodes raw maps as `BoxDecoder.decode` does; with ``single_cls``, a box has the best score of its classes."""
    boxes, scores = decoder.decode(raw)
    if settings.single_cls:
        if settings.classes is not None:
            scores = scores[..., settings.classes]
        scores = scores.amax(-1, keepdim=True)
    return boxes, scores


def detection_iou(nms_iou: float | None) -> float | None:
    """Returns the default NMS threshold of detect.py; None: no NMS. ``nms_iou``: see `BoxDecoder`."""
    return None if nms_iou is None else DETECTION_IOU


def _renumber_classes(detections: Detections, classes: Sequence[int] | None) -> Detections:
    """Replaces each of the model's ``classes`` by its position among them; None: all classes keep their numbers."""
    if classes is None:
        return detections
    position = detections.classes.new_zeros(max(classes, default=0) + 1)
    position[classes] = torch.arange(len(classes), device=position.device)
    return detections._replace(classes=position[detections.classes])


def _order_sides(boxes_xyxy: Tensor) -> Tensor:
    """Gives boxes (B, N, 4) with swapped sides no area: moves the right and the lower side to the opposite one."""
    low, high = boxes_xyxy.split(2, -1)
    return torch.cat((low, torch.maximum(low, high)), -1)


def _eligible_labels(scores: Tensor, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Returns the scores and the classes with which boxes may be detected, both (B, N, L): L is C with ``multi_label``,
    else 1, the best class of each box. ``scores``: (B, N, C)."""
    if multi_label:
        return scores, torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    best = scores.max(-1, keepdim=True)
    return best.values, best.indices


def _class_mask(classes: Sequence[int], scores: Tensor) -> Tensor:
    """Returns which of the model's classes are in ``classes``: bool (C,)."""
    known = range(scores.shape[-1])
    unknown = set(classes).difference(known)
    if unknown:
        raise UserError(f"class {min(unknown)}: the model has classes 0 to {known[-1]}")
    return torch.tensor([c in classes for c in known], device=scores.device)


def _top_positions(scores: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Returns positions (B, count) of the highest scores (B, M); ties are broken by the lowest ``numbers`` (B, M).

    A positive float32 sorts like its bits read as an integer, so one int64 key holds both.
    """
    keys = (scores.view(torch.int32).long() << 32) - numbers
    return keys.topk(count, dim=1).indices


def _select_by_rank(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings) -> Detections:
    """Implements `select_detections` without NMS."""
    label_scores, classes = _eligible_labels(scores.float(), settings.multi_label)
    is_eligible = label_scores > settings.conf_thres
    if settings.classes is not None:
        is_eligible &= _class_mask(settings.classes, scores)[classes]
    label_scores = torch.where(is_eligible, label_scores, -1.0)
    return _best_pairs(_order_sides(boxes_xyxy.float()), label_scores, classes, settings.max_det)


def _best_pairs(boxes_xyxy: Tensor, scores: Tensor, classes: Tensor, max_det: int) -> Detections:
    """Returns the ``max_det`` (box, label) pairs of each image with the highest ``scores``. A negative score excludes a
    pair. ``scores``, ``classes``: (B, N, L)."""
    batch, count, labels = scores.shape
    # The best pairs belong to the boxes with the best highest scores, so only those boxes' pairs are ranked.
    numbers = torch.arange(count, device=scores.device).expand(batch, -1)
    best = _top_positions(scores.amax(-1), numbers, min(max_det, count))[..., None]
    best_labels = best.expand(-1, -1, labels)
    pair_scores = scores.gather(1, best_labels).flatten(1)
    pair_classes = classes.gather(1, best_labels).flatten(1)
    pair_numbers = (best * labels + torch.arange(labels, device=scores.device)).flatten(1)
    chosen = _top_positions(pair_scores, pair_numbers, min(max_det, pair_scores.shape[1]))
    chosen_scores = pair_scores.gather(1, chosen)
    box = pair_numbers.gather(1, chosen).div(labels, rounding_mode="floor")
    kept = chosen_scores >= 0
    boxes = torch.where(kept[..., None], boxes_xyxy.gather(1, box[..., None].expand(-1, -1, 4)), 0.0)
    return Detections(
        boxes_xyxy=_pad_slots(boxes, max_det),
        scores=_pad_slots(chosen_scores * kept, max_det),
        classes=_pad_slots(pair_classes.gather(1, chosen) * kept, max_det),
        counts=kept.sum(1),
    )


def _pad_slots(values: Tensor, max_det: int) -> Tensor:
    """Appends zeros to ``values`` (B, n, ...) up to ``max_det`` slots."""
    batch, count, *rest = values.shape
    return torch.cat((values, values.new_zeros((batch, max_det - count, *rest))), 1)


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
    """Groups of candidates that suppress each other: those of one image, or of one class in an image."""

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


@dataclass(frozen=True, kw_only=True)
class _Suppressed:
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


def _suppress(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings, iou_thres: float) -> _Suppressed:
    """Runs NMS with ``iou_thres``, so that box voting may follow if ``settings`` say so. See `select_detections`."""
    lowest_score = min(settings.conf_thres, MIN_VOTING_SCORE) if settings.box_voting else settings.conf_thres
    label_scores, classes = _eligible_labels(scores.float(), settings.multi_label)
    candidates = _collect_candidates(_order_sides(boxes_xyxy.float()), label_scores, classes, lowest_score)
    batch, _, num_classes = scores.shape
    groups = _Groups(batch, 1 if settings.agnostic else num_classes, iou_thres)
    wanted = None
    needed = settings.max_det
    if settings.classes is not None:
        wanted = _class_mask(settings.classes, scores)
        needed = MAX_CANDIDATES  # other classes are dropped afterwards
        if not settings.agnostic:
            candidates = candidates.take(_needed_for_classes(candidates, wanted, settings.box_voting))
    max_kept = max(needed, _MAX_VOTED) if settings.box_voting else needed
    keep = _keep(candidates, groups, needed=needed, max_kept=max_kept)
    return _Suppressed(candidates=candidates, keep=keep, groups=groups, settings=settings, wanted=wanted)


def _needed_for_classes(candidates: _CandidateSet, wanted: Tensor, box_voting: bool) -> Tensor:
    """Returns which candidates the result for ``wanted`` classes depends on, if NMS is by class: bool (M,).

    Other classes matter only to voting, in crowded images: their boxes count among the `_MAX_VOTED` that may move.
    """
    is_wanted = wanted[candidates.classes]
    if not box_voting:
        return is_wanted
    is_crowded = (candidates.candidates_per_image > _MAX_VOTED)[candidates.image]
    return is_wanted | (is_crowded & (candidates.rank < VOTERS))


def _keep(candidates: _CandidateSet, groups: _Groups, *, needed: int, max_kept: int) -> Tensor:
    """Returns which candidates NMS keeps: bool (M,). In crowded images, the best candidates are tried first, and all
    only if fewer than ``needed`` of these are kept. ``max_kept``: see `_Groups.nms`."""
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
