"""Box voting: a box that NMS keeps moves to the weighted mean of the boxes that it overlaps, and its score rises with
their number.

Gidaris & Komodakis 2015, "Object detection via a multi-region and semantic segmentation-aware CNN model". The weights
are score * exp(-(1 - IoU)^2 / `SIGMA`), as in He et al. 2019, "Bounding Box Regression with Uncertainty for Accurate
Object Detection", but without variances. A score s becomes 1 - (1 - s) * prod (1 - w)^`INDEPENDENCE` over the weights
w: the noisy OR (Pearl 1988) of the boxes, in which a suppressed one counts as a fraction of a detection, since all of
them look at the same pixels.

For example, a kept box with the score 0.8, and one voter with the score 0.5 and an IoU of 0.9 with it. The voter's
weight is 0.5 * exp(-0.1^2 / 0.02) = 0.303. Each side of the box becomes (0.8 * its own + 0.303 * the voter's) / 1.103,
and the score 1 - 0.2 * (1 - 0.303)^0.1 = 0.807.

Legend: P kept boxes, V voters, T pairs of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VOTERS = 1024  # candidates of an image that vote, the best ones; a kept box that ranks below them does not move
SIGMA = 0.02
INDEPENDENCE = 0.1
MIN_VOTING_SCORE = 0.01  # boxes with a higher score vote and have their score raised, at any confidence threshold
_IOU_ROUNDING = 1e-3  # more than the rounding error of an IoU
_MIN_IOU = 0.1  # boxes that overlap less have weights below 1e-17
# Pairs compared together. These change speed and memory only.
_PAIRS_ON_CPU = 1 << 16
_PAIRS_ON_GPU = 1 << 22


class BoxGroups(NamedTuple):
    """N boxes; only boxes of the same group interact."""

    boxes_xyxy: Tensor  # float32 (N, 4)
    scores: Tensor  # float32 (N,), positive
    group: Tensor  # int64 (N,), from 0


def vote(kept: BoxGroups, others: BoxGroups, moves: Tensor, iou_thres: float) -> tuple[Tensor, Tensor]:
    """Moves P kept boxes and raises their scores by the votes of V ``others`` of their groups that they overlap by more
    than ``iou_thres``. Boxes without area and infinite boxes overlap nothing. ``moves``: bool (P,), False for boxes
    that stay as they are.

    Voters are sorted by their left side, and each kept box is compared only with those whose left side is near its own.
    Votes are added in this order, so on a CPU a result depends only on the boxes of its group, bit for bit.

    Returns boxes float32 (P, 4) and scores float32 (P,).
    """
    x1, _, x2, _ = kept.boxes_xyxy.unbind(1)
    # A box with an IoU above t is at most 1 / t as wide, and more than t of the larger width is common to both: at 0.5,
    # a box from x = 100 to 140 has voters that begin from 60 to 120.
    reach = (x2 - x1) * (1 - iou_thres + _IOU_ROUNDING)
    lowest = _sort_keys(x1 - reach / max(iou_thres, _MIN_IOU), kept.group)
    highest = _sort_keys(x1 + reach, kept.group)
    keys, order = _sort_keys(others.boxes_xyxy[:, 0], others.group).sort(stable=True)
    first = torch.searchsorted(keys, lowest)
    count = (torch.searchsorted(keys, highest, right=True) - first).clamp_(min=0) * moves
    voter_boxes = others.boxes_xyxy[order]
    voters = voter_boxes.T.contiguous()
    voter_scores = others.scores[order]
    columns = kept.boxes_xyxy.T.contiguous()

    sum_dtype = torch.float32 if x1.device.type == "mps" else torch.float64  # MPS has no float64
    sums = _with_ones(kept.boxes_xyxy).to(sum_dtype) * kept.scores[:, None]
    misses = torch.zeros_like(sums[:, 0])
    # All pairs of a kept box are in one chunk, of about as many pairs as are compared together.
    chunk = (count.cumsum(0) - 1).clamp(min=0) // (_PAIRS_ON_GPU if x1.is_cuda else _PAIRS_ON_CPU)
    sizes = torch.bincount(chunk).tolist()
    rows = torch.arange(len(count), device=count.device)
    for part, begin, number in zip(rows.split(sizes), first.split(sizes), count.split(sizes)):
        row = part.repeat_interleave(number)
        voter_of_first = (begin - number.cumsum(0) + number).repeat_interleave(number)
        voter = torch.arange(len(row), device=row.device) + voter_of_first
        overlap, union = overlap_and_union(columns.index_select(1, row), voters.index_select(1, voter))
        pair = (overlap > union * iou_thres).nonzero()[:, 0]
        row = row.index_select(0, pair)
        voter = voter.index_select(0, pair)
        iou = overlap.index_select(0, pair) / union.index_select(0, pair)
        weights = voter_scores.index_select(0, voter) * vote_weights(iou.to(sum_dtype))
        sums.index_add_(0, row, _with_ones(voter_boxes.index_select(0, voter)) * weights[:, None])
        misses.index_add_(0, row, log_misses(weights))
    mean = (sums[:, :4] / sums[:, 4:]).float()
    boxes = torch.where(mean.isfinite(), mean, kept.boxes_xyxy)
    return boxes, raised_scores(kept.scores.to(sum_dtype), misses).float()


def vote_weights(iou: Tensor) -> Tensor:
    """Computes the factors by which the scores of voters with these IoUs are multiplied."""
    return ((1 - iou).square() / -SIGMA).exp()


def log_misses(weights: Tensor) -> Tensor:
    """Computes log(1 - w), -inf for weights of 1 and more."""
    return (1 - weights.clamp(max=1)).log()


def raised_scores(scores: Tensor, votes: Tensor) -> Tensor:
    """Raises scores, given the sums of `log_misses` over the weights of their voters.

    Scores up to `MIN_VOTING_SCORE` stay as they are. Otherwise whether such a box becomes a detection would depend on
    whether the confidence threshold lets it be a candidate.
    """
    misses = log_misses(scores) + INDEPENDENCE * votes
    return torch.where(scores > MIN_VOTING_SCORE, torch.maximum(1 - misses.exp(), scores), scores)


def _sort_keys(left: Tensor, group: Tensor) -> Tensor:
    """Computes int64 keys that sort by ``group``, then by ``left``, float32.

    Read as integers, the bits of positive floats have the same order as the floats; for negative floats, it is
    reversed.
    """
    bits = left.view(torch.int32)
    return (group << 32) + (bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _with_ones(boxes: Tensor) -> Tensor:
    """Appends a column of ones, whose weighted sum is the sum of the weights."""
    return torch.cat((boxes, torch.ones_like(boxes[:, :1])), 1)


def overlap_and_union(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the areas of intersection and union of boxes (4, ...) that broadcast, as new tensors."""
    ax1, ay1, ax2, ay2 = a.unbind()
    bx1, by1, bx2, by2 = b.unbind()
    width = torch.minimum(ax2, bx2).sub_(torch.maximum(ax1, bx1)).clamp_(min=0)
    height = torch.minimum(ay2, by2).sub_(torch.maximum(ay1, by1)).clamp_(min=0)
    overlap = width.mul_(height)
    return overlap, ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1)).sub_(overlap)
