"""Loss of anchor heads.

Legend: B images, M targets, A anchors per cell, C classes, P (target, anchor, cell) triples of a level, T triples of
one target over all levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from models.assigners.anchor import match_anchors
from models.assigners.candidates import MIN_OVERLAP, match_one_to_one
from models.box_coding import anchor_to_cxcywh, flatten_levels
from models.losses.base import NO_OBJECT, BranchLoss, LossOutput, LossSettings, add_up, smooth_labels
from models.losses.ignored_cells import IgnoredCells
from utils.batches import Targets
from utils.boxes import cxcywh_to_xyxy, iou

# Balances one positive's box, its objectness and one of its classes. YOLOX (Ge et al. 2021) has 5 : 1 : 1, YOLOv5 about
# 7 : 1 : 1 with its published gains. With this constant the defaults box 7.5, obj 1, cls 0.5 give 7.5 : 1 : 1, and a
# box term that equals the anchor-free one, so that one learning rate suits both heads.
_CLASS_GAIN = 2.0

# Weights of a cell's objectness by stride, in a head with exactly these levels (P3, P4, P5); in others all weigh 1.
# YOLOv5's balance 4 : 1 : 0.4 is for means over a level's cells, and each level has a quarter of the cells of the next
# finer one. Its balance of four levels, 4 : 1 : 0.25 : 0.06, gives equal weights.
_P3_TO_P5_WEIGHTS = {8: 1.0, 16: 1.0, 32: 1.6}


class LevelMatches(NamedTuple):
    """A level's (target, anchor, cell) triples, P in all and sorted by target, with the terms of their loss."""

    valid: Tensor  # bool (P,)
    row: Tensor  # int64 (P,) into the level's B * h * w * A outputs
    score: Tensor  # (P,) objectness times the score of the target's class, no gradient
    overlap: Tensor  # (P,) CIoU
    cls: Tensor  # (P,) class BCE
    objectness: Tensor  # (B * h * w * A,) logits of all outputs
    ignored: Tensor | None  # bool (B * h * w * A,), outputs without a loss unless positive; None: none


@torch.no_grad()
def keep_best_match(levels: Sequence[LevelMatches], num_targets: int) -> list[LevelMatches]:
    """Keeps at most one valid match per target: the best aligned one (as in anchor-free heads), over all levels, whose
    output no other target has."""
    if num_targets == 0:
        return list(levels)
    sizes = [level.row.shape[0] // num_targets for level in levels]
    first_outputs = accumulate((level.objectness.shape[0] for level in levels), initial=0)
    rows = [level.row + first for level, first in zip(levels, first_outputs)]

    def by_target(values: Sequence[Tensor]) -> Tensor:
        """Joins the levels' values, (P,) each: (1, M, T)."""
        return torch.cat([column.view(num_targets, size) for column, size in zip(values, sizes)], 1)[None]

    overlap = by_target([level.overlap.clamp(min=MIN_OVERLAP) for level in levels])
    metric = by_target([level.score for level in levels]).pow(0.5) * overlap.pow(6.0)
    metric *= by_target([level.valid for level in levels])
    num_outputs = sum(level.objectness.shape[0] for level in levels)
    chosen, matched = match_one_to_one(by_target(rows), metric, overlap, num_outputs)
    valid = torch.zeros_like(metric, dtype=torch.bool).scatter_(-1, chosen, matched)[0]
    return [level._replace(valid=kept.flatten()) for level, kept in zip(levels, valid.split(sizes, -1))]


class LevelTerms(NamedTuple):
    """Sums over a level, () each."""

    box: Tensor
    obj: Tensor
    cls: Tensor
    positives: Tensor  # number of valid matches


def _level_weights(strides: Sequence[int]) -> tuple[float, ...]:
    """Returns the weight of a cell's objectness on each level, in the order of ``strides``."""
    if sorted(strides) != sorted(_P3_TO_P5_WEIGHTS):
        return (1.0,) * len(strides)
    return tuple(_P3_TO_P5_WEIGHTS[stride] for stride in strides)


class AnchorLoss(BranchLoss):
    """CIoU and class BCE on matched anchors, and objectness BCE with the predicted box's IoU as target on all (YOLOv5).

    All terms are divided by the number of positives, so that an object's gradient is the same on every data set. A mean
    over cells would tie the weight of an object's objectness to the canvas size, and make it smaller than its box's on
    data sets with one or two objects an image.

    With ``one_to_one`` only a target's best aligned match over all levels is a positive.
    """

    anchors: Tensor  # (L, A, 2), cells
    names = ("box", "obj", "cls")

    def __init__(self, settings: LossSettings, anchors: Tensor) -> None:
        """``anchors``: the head's buffer float32 (L, A, 2), cells, whose memory is shared."""
        super().__init__(settings)
        hyp = settings.hyp
        self.gains = (hyp.box, hyp.obj, hyp.cls * _CLASS_GAIN)
        self.level_weights = _level_weights(settings.strides)
        self.register_buffer("anchors", anchors.detach().float(), persistent=False)

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: raw maps (B, A * (5 + C), h, w), one per level."""
        matches = [
            self._match(level, anchors, ignored, targets.rows)
            for level, anchors, ignored in zip(raw, self.anchors, self._ignored_by_level(raw, targets), strict=True)
        ]
        if self.settings.one_to_one:
            matches = keep_best_match(matches, len(targets.rows))
        terms = [self._terms(level, weight) for level, weight in zip(matches, self.level_weights, strict=True)]
        box, obj, cls, positives = (add_up(values) for values in zip(*terms))
        return self.weighted((box, obj, cls), positives)

    def _ignored_by_level(self, raw: Sequence[Tensor], targets: Targets) -> Sequence[IgnoredCells | None]:
        """Finds the cells (I, h * w, C) in ignore regions of each level."""
        ignored = self.ignored_cells(raw, targets)
        if ignored is None:
            return [None] * len(raw)
        sizes = [level.shape[2] * level.shape[3] for level in raw]
        return [ignored._replace(cells=cells) for cells in ignored.cells.split(sizes, 1)]

    def _match(self, raw: Tensor, anchors: Tensor, ignored: IgnoredCells | None, targets: Tensor) -> LevelMatches:
        """Matches targets, (M, 6) as in `Targets`, to a level's anchors and computes the terms of each match."""
        height, width = raw.shape[-2:]
        outputs = flatten_levels([raw]).unflatten(-1, (len(anchors), -1))  # (B, h * w, A, 5 + C)
        matches = match_anchors(targets, anchors, (height, width), self.settings.hyp.anchor_t)
        row = (matches.image * (height * width) + matches.cell) * len(anchors) + matches.anchor
        is_ignored = None
        if ignored is not None:
            anchor_cells = ignored.cells[:, :, None].expand(-1, -1, len(anchors), -1)
            is_ignored = ignored._replace(cells=anchor_cells).of_best_class(outputs[..., 5:]).flatten()
        outputs = outputs.flatten(0, 2)  # (B * h * w * A, 5 + C)
        picked = outputs.index_select(0, row)
        predicted = cxcywh_to_xyxy(anchor_to_cxcywh(picked[:, :4], anchors[matches.anchor]))
        overlap = iou(predicted, cxcywh_to_xyxy(matches.boxes_cxcywh_cells), kind="ciou")
        class_targets = smooth_labels(torch.ones_like(overlap), matches.label, self.settings)
        cls = binary_cross_entropy_with_logits(picked[:, 5:], class_targets, self.class_weights, reduction="none")
        with torch.no_grad():
            score = picked[:, 4].sigmoid() * picked[:, 5:].gather(1, matches.label[:, None])[:, 0].sigmoid()
        return LevelMatches(matches.valid, row, score, overlap, cls.sum(-1), outputs[:, 4], is_ignored)

    def _terms(self, level: LevelMatches, objectness_weight: float) -> LevelTerms:
        """Sums the terms of a level; the objectness target of an output is its highest IoU with a matched target."""
        valid = level.valid.float()
        target = torch.zeros_like(level.objectness)
        # The maximum over several targets of one output does not depend on their order.
        target.scatter_reduce_(0, level.row, level.overlap.detach().clamp(min=0) * valid, "amax")
        objectness = level.objectness
        if level.ignored is not None:
            is_positive = torch.zeros_like(objectness).scatter_reduce_(0, level.row, valid, "amax") > 0
            objectness = torch.where(level.ignored & ~is_positive, NO_OBJECT, objectness)
        obj = objectness_weight * binary_cross_entropy_with_logits(objectness, target, reduction="sum")
        return LevelTerms((valid * (1 - level.overlap)).sum(), obj, (valid * level.cls).sum(), valid.sum())
