"""Decoded boxes to detections: by threshold and non-maximum suppression (suppression.py) or, for end-to-end heads, by
rank alone. selection.py defines the settings, and the three selections that a validation makes of the same boxes.

Legend: B images, N boxes, C classes, L classes with which a box may be detected (its labels), M pairs of both in an
image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from models.postprocess.selection import (
    SCORED,
    SELECTIONS,
    SHOWN,
    SHOWN_UNVOTED,
    VALIDATION_DEFAULTS,
    PostprocessSettings,
    ValidationSettings,
)
from models.postprocess.suppression import class_mask, eligible_labels, order_sides, suppress
from utils.detections import Detections


class BoxDecoder(Protocol):
    """The part of a model that postprocessing needs; a `Detector` has it."""

    @property
    def nms_iou(self) -> float | None:
        """IoU threshold of NMS in validation; None if the detections need no NMS."""
        ...

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw maps to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        ...


@torch.no_grad()
def select_detections(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings) -> Detections:
    """Selects the best boxes of each image. Among equal scores, the first (box, class) pair ranks first.

    A box with swapped sides (regressed distances may be negative) becomes a box without area. Without NMS, no shape
    depends on values, and the host does not wait for the device.

    Args:
        boxes_xyxy: (B, N, 4) canvas pixels.
        scores: (B, N, C). A NaN is below any threshold; without ``multi_label``, its box is left out.

    Raises UserError for classes that the model does not have.
    """
    if settings.iou_thres is None:
        return _select_by_rank(boxes_xyxy, scores, settings)
    return suppress(boxes_xyxy, scores, settings, settings.iou_thres).detections(voted=settings.box_voting)


@torch.no_grad()
def select_with_and_without_voting(
    boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings
) -> tuple[Detections, Detections]:
    """Returns `select_detections` with and without box voting, which share one NMS. If ``settings`` rule out voting,
    both are the same object."""
    if settings.iou_thres is None or not settings.box_voting:
        detections = select_detections(boxes_xyxy, scores, settings)
        return detections, detections
    # Voting needs candidates below the confidence threshold. They rank last, so without voting they change nothing.
    suppressed = suppress(boxes_xyxy, scores, settings, settings.iou_thres)
    return suppressed.detections(voted=True), suppressed.detections(voted=False)


def detections_to_score(
    model: nn.Module, raw: list[Tensor], settings: ValidationSettings = VALIDATION_DEFAULTS
) -> Detections:
    """Selects the detections whose AP is computed, from the raw maps of ``model``, a `BoxDecoder`."""
    decoder = _as_decoder(model)
    boxes, scores = _decode(decoder, raw, settings)
    selection = settings.selections(decoder.nms_iou)[SCORED]
    return _renumber_classes(select_detections(boxes, scores, selection), selection.classes)


def select_for_validation(
    model: nn.Module, raw: list[Tensor], settings: ValidationSettings = VALIDATION_DEFAULTS
) -> dict[str, Detections]:
    """Selects detections for validation from the raw maps of ``model``, a `BoxDecoder`. Returns them by name:

    - `SCORED`: see `detections_to_score`.
    - `SHOWN`: the detections of detect.py, for their best threshold, the confusion matrix and pictures.
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


def _top_positions(scores: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Returns positions (B, count) of the highest scores (B, M); ties are broken by the lowest ``numbers`` (B, M).

    A float32 from 0 on sorts like its bits read as an integer, so one int64 key holds both. The bits of -1, the score
    of excluded pairs, are a negative integer, which ranks below all others.
    """
    keys = (scores.view(torch.int32).long() << 32) - numbers
    return keys.topk(count, dim=1).indices


def _select_by_rank(boxes_xyxy: Tensor, scores: Tensor, settings: PostprocessSettings) -> Detections:
    """Implements `select_detections` without NMS."""
    label_scores, classes = eligible_labels(scores.float(), settings.multi_label)
    is_eligible = label_scores > settings.conf_thres
    if settings.classes is not None:
        is_eligible &= class_mask(settings.classes, scores)[classes]
    label_scores = torch.where(is_eligible, label_scores, -1.0)
    return _best_pairs(order_sides(boxes_xyxy.float()), label_scores, classes, settings.max_det)


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
