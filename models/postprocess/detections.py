"""Decoded boxes to detections: candidates above a threshold, non-maximum suppression unless the head needs none, box
voting, and the best of what is left.

Legend: B images, N boxes, C classes, L classes with which a box may be detected (its labels), M candidates of all
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from models.postprocess.box_voting import MIN_VOTING_SCORE, VOTERS, BoxGroups, vote
from models.postprocess.nms import nms_keep
from models.postprocess.selection import PostprocessSettings, ValidationSettings
from utils.config.settings import MAX_CANDIDATES
from utils.detections import Detections
from utils.errors import UserError
from utils.machine.torch_threads import torch_threads

_MAX_VOTED = 300  # kept boxes per image that voting may move, the best before voting; independent of max_det
_FIRST_CANDIDATES = 2048  # candidates per image in the first NMS; a second one runs only if slots stay empty


class BoxDecoder(Protocol):
    """The part of a model that postprocessing needs; a `Detector` has it."""

    @property
    def nms_iou(self) -> float | None:
        """IoU threshold of NMS in validation; None if the detections need no NMS."""
        ...

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw maps to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        ...


class Selected(NamedTuple):
    """What a validation selects from the same boxes, see selection.py."""

    for_ap: Detections
    detected: Detections  # as detect.py finds them


class _Candidates(NamedTuple):
    """(Box, label) pairs of all images, sorted by image, then by descending score; equal scores by (box, class)."""

    image: Tensor  # int64 (M,)
    rank: Tensor  # int64 (M,) in the image, from 0
    boxes: Tensor  # float32 (M, 4)
    scores: Tensor  # float32 (M,)
    classes: Tensor  # int64 (M,)
    group: Tensor  # int64 (M,), candidates that suppress each other: image * C, plus the class unless NMS is agnostic

    def take(self, rows: Tensor) -> _Candidates:
        """Selects ``rows``: a mask, bool (M,), or indices."""
        index = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        return _Candidates(*(column.index_select(0, index) for column in self))


@torch.no_grad()
def select_detections(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings) -> Detections:
    """Selects the best boxes of each image. Among equal scores, the first (box, class) pair ranks first.

    A box with swapped sides (regressed distances may be negative) becomes a box without area.

    Args:
        boxes_xyxy: (B, N, 4) canvas pixels.
        scores: (B, N, C). A NaN is below any threshold; without ``multi_label``, its box is left out.

    Raises UserError for classes that the model does not have.
    """
    batch, _, num_classes = scores.shape
    unknown = set(settings.classes or ()).difference(range(num_classes))
    if unknown:
        raise UserError(f"class {min(unknown)}: the model has classes 0 to {num_classes - 1}")
    iou_thres = settings.iou_thres
    votes = settings.box_voting and iou_thres is not None
    lowest_score = min(settings.conf_thres, MIN_VOTING_SCORE) if votes else settings.conf_thres
    candidates, counts = _collect_candidates(boxes_xyxy.float(), scores.float(), settings, lowest_score)
    kept = candidates
    with torch_threads(1):
        if iou_thres is not None:
            needed = settings.max_det if settings.classes is None else MAX_CANDIDATES  # other classes are dropped below
            keep = _keep(candidates, counts, iou_thres=iou_thres, needed=needed, num_classes=num_classes)
            kept = candidates.take(keep)
            if votes:
                kept = _vote(candidates, kept, keep, iou_thres, batch)
        if settings.classes is not None:
            wanted = torch.tensor([c in settings.classes for c in range(num_classes)], device=scores.device)
            kept = kept.take(wanted[kept.classes])
        return _fill_slots(kept, batch, settings)


@torch.no_grad()
def select_for_validation(model: nn.Module, raw: list[Tensor], settings: ValidationSettings | None = None) -> Selected:
    """Selects detections for validation from the raw maps of ``model``, a `BoxDecoder`."""
    settings = settings or ValidationSettings()
    boxes, scores = _decode(model, raw, settings)
    selections = settings.selections(cast(BoxDecoder, model).nms_iou)
    selected = (select_detections(boxes, scores, selection) for selection in selections)
    classes = selections[0].classes
    return Selected(*(_renumber_classes(detections, classes) for detections in selected))


def _decode(model: nn.Module, raw: list[Tensor], settings: ValidationSettings) -> tuple[Tensor, Tensor]:
    """Decodes raw maps as `BoxDecoder.decode` does; with ``single_cls``, a box has the best score of its classes."""
    boxes, scores = cast(BoxDecoder, model).decode(raw)  # to torch's stubs, attributes of a module are no methods
    if settings.single_cls:
        if settings.classes is not None:
            scores = scores[..., list(settings.classes)]
        scores = scores.amax(-1, keepdim=True)
    return boxes, scores


def _renumber_classes(detections: Detections, classes: Sequence[int] | None) -> Detections:
    """Replaces each of the model's ``classes`` by its position among them; None: all classes keep their numbers."""
    if classes is None:
        return detections
    position = detections.classes.new_zeros(max(classes, default=0) + 1)
    position[list(classes)] = torch.arange(len(classes), device=position.device)
    return detections._replace(classes=position[detections.classes])


def _collect_candidates(
    boxes: Tensor, scores: Tensor, settings: PostprocessSettings, lowest_score: float
) -> tuple[_Candidates, Tensor]:
    """Collects the (box, label) pairs with ``scores`` (B, N, C) above ``lowest_score``, at most the `MAX_CANDIDATES`
    best of each image. Without ``multi_label``, the label of a box is its best class. Also returns how many pairs of
    each image are above: int64 (B,)."""
    batch, _, num_classes = scores.shape
    best_class = None
    if not settings.multi_label:
        scores, best_class = scores.max(-1, keepdim=True)  # (B, N, L)
    allowed = scores > lowest_score
    image, box, label = allowed.nonzero(as_tuple=True)
    counts = _starts(image, batch).diff()
    is_crowded = max(counts.tolist(), default=0) > MAX_CANDIDATES
    if is_crowded:  # sorting millions takes seconds, finding the worst score to keep does not
        last = torch.where(allowed, scores, -1.0).flatten(1).topk(MAX_CANDIDATES).values[:, -1]
        image, box, label = (allowed & (scores >= last[:, None, None])).nonzero(as_tuple=True)
    score = scores[image, box, label]
    order = _best_first(image, score)  # equal scores in the order of (box, label)
    image, box, label = image[order], box[order], label[order]
    low, high = boxes[image, box].split(2, -1)
    classes = label if best_class is None else best_class[image, box, 0]
    candidates = _Candidates(
        image=image,
        rank=_numbers_in_image(image, batch),
        boxes=torch.cat((low, torch.maximum(low, high)), -1),  # swapped sides: no area
        scores=score[order],
        classes=classes,
        group=image * num_classes + (0 if settings.agnostic else classes),
    )
    return candidates.take(candidates.rank < MAX_CANDIDATES) if is_crowded else candidates, counts


def _keep(candidates: _Candidates, counts: Tensor, *, iou_thres: float, needed: int, num_classes: int) -> Tensor:
    """Returns which candidates NMS keeps: bool (M,). In crowded images, the best candidates are tried first, and all
    only if fewer than ``needed`` of these are kept. ``counts``: see `_collect_candidates`."""
    if max(counts.tolist(), default=0) <= _FIRST_CANDIDATES:
        return nms_keep(candidates.boxes, candidates.group, iou_thres, num_classes)
    # NMS keeps a box among the best candidates exactly if it keeps it among all.
    is_first = candidates.rank < _FIRST_CANDIDATES
    keep = torch.zeros_like(is_first)
    keep[is_first] = nms_keep(candidates.boxes[is_first], candidates.group[is_first], iou_thres, num_classes)
    kept = torch.zeros_like(counts).index_add_(0, candidates.image, keep.long())
    needs_all = ((counts > _FIRST_CANDIDATES) & (kept < needed))[candidates.image]
    keep[needs_all] = nms_keep(candidates.boxes[needs_all], candidates.group[needs_all], iou_thres, num_classes)
    return keep


def _vote(candidates: _Candidates, kept: _Candidates, keep: Tensor, iou_thres: float, batch: int) -> _Candidates:
    """Lets suppressed candidates vote on those to ``keep``, bool (M,). Returns these, sorted by their new scores."""
    voters = candidates.take(~keep & (candidates.rank < VOTERS) & (candidates.scores > MIN_VOTING_SCORE))
    moves = (kept.rank < VOTERS) & (_numbers_in_image(kept.image, batch) < _MAX_VOTED)
    kept_boxes = BoxGroups(kept.boxes, kept.scores, kept.group)
    boxes, scores = vote(kept_boxes, BoxGroups(voters.boxes, voters.scores, voters.group), moves, iou_thres)
    return kept._replace(boxes=boxes, scores=scores).take(_best_first(kept.image, scores))


def _fill_slots(kept: _Candidates, batch: int, settings: PostprocessSettings) -> Detections:
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
