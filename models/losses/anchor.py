"""The loss of anchor heads, and the matching of anchors.

Legend: B images, M targets, A anchors of a cell, C classes, P pairs of a target and an anchor in a cell, T pairs of one
target over all levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from models.assigners.candidates import MIN_OVERLAP, match_one_to_one
from models.box_coding import anchor_to_cxcywh, flatten_levels
from models.losses.base import NO_OBJECT, Criterion, IgnoredCells, LossSettings, smooth_labels
from utils.boxes import cxcywh_to_xyxy, iou
from utils.structures import LossOutput, Targets

# Balances one positive's box, its objectness and one of its classes. YOLOX (Ge et al. 2021) has 5 : 1 : 1, YOLOv5 about
# 7 : 1 : 1 with its published gains. The defaults box 7.5, obj 1, cls 0.5 give 7.5 : 1 : 1 with this constant, and a
# box term that equals the anchor-free one, so that one learning rate suits both heads.
_CLASS_GAIN = 2.0

# Weights of a cell's objectness on P3, P4, P5. YOLOv5's balance 4 : 1 : 0.4 is for means over a level's cells, and each
# level has a quarter of the cells of the finer one.
_LEVEL_WEIGHTS = (1.0, 1.0, 1.6)


class AnchorMatches(NamedTuple):
    """Every (target, anchor, cell) triple of a level that may match; flat in P = M * A * 3."""

    valid: Tensor  # bool (P,)
    image: Tensor  # int64 (P,)
    anchor: Tensor  # int64 (P,)
    cell: Tensor  # int64 (P,) row-major in the level's grid; a valid index everywhere
    label: Tensor  # int64 (P,)
    boxes_cxcywh_cells: Tensor  # float32 (P, 4), the center relative to the cell's corner


@torch.no_grad()
def match_anchors(targets: Tensor, anchors: Tensor, grid_hw: tuple[int, int], anchor_t: float) -> AnchorMatches:
    """Matches targets, (M, 6): image, class, cx, cy, w, h normalized to the canvas, to a level's anchors (A, 2), cells,
    by shape, and to its cells by position (YOLOv5's rule).

    An anchor matches if neither side differs from the target's by a factor of ``anchor_t`` or more. The cell with the
    target's center is matched, and so are its nearer horizontal and its nearer vertical neighbor, if in the grid. The
    other two neighbors lie more than half a cell from the center, further than the head can predict.
    """
    height, width = grid_hw
    num_targets, num_anchors = targets.shape[0], anchors.shape[0]
    cx, cy = targets[:, 2] * width, targets[:, 3] * height
    sides = torch.stack((targets[:, 4] * width, targets[:, 5] * height), -1)
    ratio = sides[:, None] / anchors
    fits = torch.maximum(ratio, 1 / ratio).amax(-1) < anchor_t  # (M, A); a side of 0 gives inf, which does not fit

    center_x, center_y = cx.floor().clamp(0, width - 1), cy.floor().clamp(0, height - 1)
    near_x = center_x + torch.where(cx - center_x < 0.5, -1.0, 1.0)
    near_y = center_y + torch.where(cy - center_y < 0.5, -1.0, 1.0)
    x, y = torch.stack((center_x, near_x, center_x), -1), torch.stack((center_y, center_y, near_y), -1)  # (M, 3)
    in_grid = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    boxes = torch.stack(
        (cx[:, None] - x, cy[:, None] - y, *(side[:, None].expand_as(x) for side in sides.unbind(-1))), -1
    )

    shape = (num_targets, num_anchors, 3)
    return AnchorMatches(
        valid=(fits[:, :, None] & in_grid[:, None]).flatten(),
        image=targets[:, 0].long()[:, None, None].expand(shape).flatten(),
        anchor=torch.arange(num_anchors, device=targets.device)[:, None].expand(shape).flatten(),
        cell=(y * width + x).long()[:, None].expand(shape).flatten(),
        label=targets[:, 1].long()[:, None, None].expand(shape).flatten(),
        boxes_cxcywh_cells=boxes[:, None].expand(*shape, 4).flatten(0, 2),
    )


class LevelPairs(NamedTuple):
    """A level's (target, anchor, cell) triples, P in all and sorted by target, and what the loss reads of each."""

    valid: Tensor  # bool (P,)
    row: Tensor  # int64 (P,) into the level's B * h * w * A outputs
    score: Tensor  # (P,) objectness times the score of the target's class, no gradient
    overlap: Tensor  # (P,) CIoU
    cls: Tensor  # (P,) class BCE
    objectness: Tensor  # (B * h * w * A,) logits of all outputs
    ignored: Tensor | None  # bool, those without a loss in the background; None: none


@torch.no_grad()
def best_of_levels(levels: Sequence[LevelPairs], num_targets: int) -> list[LevelPairs]:
    """The levels with at most one valid pair per target: the best aligned one (as in anchor-free heads) whose output no
    other target has."""
    if num_targets == 0:
        return list(levels)
    sizes = [pairs.row.shape[0] // num_targets for pairs in levels]
    before = accumulate((pairs.objectness.shape[0] for pairs in levels), initial=0)
    rows = [pairs.row + offset for pairs, offset in zip(levels, before)]

    def by_target(columns: Sequence[Tensor]) -> Tensor:  # (1, M, T)
        return torch.cat([c.view(num_targets, size) for c, size in zip(columns, sizes)], 1)[None]

    overlap = by_target([pairs.overlap.clamp(min=MIN_OVERLAP) for pairs in levels])
    metric = by_target([pairs.score for pairs in levels]).pow(0.5) * overlap.pow(6.0)
    metric *= by_target([pairs.valid for pairs in levels])
    num_outputs = sum(pairs.objectness.shape[0] for pairs in levels)
    chosen, matched = match_one_to_one(by_target(rows), metric, overlap, num_outputs)
    valid = torch.zeros_like(metric, dtype=torch.bool).scatter_(-1, chosen, matched)[0]
    return [pairs._replace(valid=part.flatten()) for pairs, part in zip(levels, valid.split(sizes, -1))]


class AnchorLoss(Criterion):
    """CIoU and class BCE on matched anchors, and objectness BCE with the predicted box's IoU as target on all (YOLOv5).

    All terms are divided by the number of positives, so that an object's gradient is the same on every data set. A mean
    over cells would tie the weight of an object's objectness to the canvas size, and make it smaller than its box's on
    data sets with one or two objects an image.

    With ``one_to_one`` only the best aligned match of a target, over all levels, is a positive.
    """

    names = ("box", "obj", "cls")

    def __init__(self, settings: LossSettings, anchors: Tensor) -> None:
        """``anchors`` (L, A, 2), cells: those of the head, which the loss follows when a checkpoint is loaded."""
        super().__init__()
        self.settings, hyp = settings, settings.hyp
        self.gains = (hyp.box, hyp.obj, hyp.cls * _CLASS_GAIN)
        levels = len(settings.strides)
        self.level_weights = _LEVEL_WEIGHTS if levels == len(_LEVEL_WEIGHTS) else (1.0,) * levels
        self.register_buffer("class_weights", settings.class_weights, persistent=False)
        self.register_buffer("anchors", anchors.detach().float(), persistent=False)

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """Args: raw maps (B, A * (5 + C), h, w), one per level."""
        ignored: Sequence[IgnoredCells | None] = [None] * len(raw)
        if (found := self.ignored_cells(raw, targets)) is not None:
            of_levels = found.cells.split([level.shape[2] * level.shape[3] for level in raw], 1)
            ignored = [found._replace(cells=cells) for cells in of_levels]
        levels = [self._pairs(*given, targets.rows) for given in zip(raw, self.anchors, ignored, strict=True)]
        if self.settings.one_to_one:
            levels = best_of_levels(levels, len(targets.rows))
        totals = [self._sums(pairs, weight) for pairs, weight in zip(levels, self.level_weights, strict=True)]
        box, obj, cls, positives = (sum(column) for column in zip(*totals))
        return self.weighted((box, obj, cls), positives)

    def _pairs(self, raw: Tensor, anchors: Tensor, ignored: IgnoredCells | None, targets: Tensor) -> LevelPairs:
        """``ignored``: the level's, of cells (I, h * w, C)."""
        height, width = raw.shape[-2:]
        outputs = flatten_levels([raw]).unflatten(-1, (len(anchors), -1))  # (B, h * w, A, 5 + C)
        matches = match_anchors(targets, anchors, (height, width), self.settings.hyp.anchor_t)
        row = (matches.image * (height * width) + matches.cell) * len(anchors) + matches.anchor
        has_no_loss = None
        if ignored is not None:
            of_anchors = ignored._replace(cells=ignored.cells[:, :, None].expand(-1, -1, len(anchors), -1))
            has_no_loss = of_anchors.of_best_class(outputs[..., 5:]).flatten()
        outputs = outputs.flatten(0, 2)  # (B * h * w * A, 5 + C)
        picked = outputs.index_select(0, row)
        predicted = cxcywh_to_xyxy(anchor_to_cxcywh(picked[:, :4], anchors[matches.anchor]))
        overlap = iou(predicted, cxcywh_to_xyxy(matches.boxes_cxcywh_cells), kind="ciou")
        class_targets = smooth_labels(torch.ones_like(overlap), matches.label, self.settings)
        cls = binary_cross_entropy_with_logits(picked[:, 5:], class_targets, self.class_weights, reduction="none")
        with torch.no_grad():
            score = picked[:, 4].sigmoid() * picked[:, 5:].gather(1, matches.label[:, None])[:, 0].sigmoid()
        return LevelPairs(matches.valid, row, score, overlap, cls.sum(-1), outputs[:, 4], has_no_loss)

    def _sums(self, pairs: LevelPairs, weight: float) -> tuple[Tensor, ...]:
        """Sums of the box, objectness and class terms, and the number of positives."""
        valid = pairs.valid.float()
        reached = torch.zeros_like(pairs.objectness)
        # The maximum over several targets of one output does not depend on their order.
        reached.scatter_reduce_(0, pairs.row, pairs.overlap.detach().clamp(min=0) * valid, "amax")
        objectness = pairs.objectness
        if pairs.ignored is not None:
            positive = torch.zeros_like(objectness).scatter_reduce_(0, pairs.row, valid, "amax") > 0
            objectness = torch.where(pairs.ignored & ~positive, NO_OBJECT, objectness)
        obj = weight * binary_cross_entropy_with_logits(objectness, reached, reduction="sum")
        return (valid * (1 - pairs.overlap)).sum(), obj, (valid * pairs.cls).sum(), valid.sum()
