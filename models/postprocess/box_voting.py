"""Box voting: a box that NMS keeps moves to the weighted mean of the boxes that it overlaps, and its score rises with
their number.

Gidaris & Komodakis 2015, "Object detection via a multi-region and semantic segmentation-aware CNN model". The weights
are score * exp(-(1 - IoU)^2 / `SIGMA`), as in He et al. 2019, "Bounding Box Regression with Uncertainty for Accurate
Object Detection", but without variances. A score s becomes 1 - (1 - s) * prod (1 - w)^`INDEPENDENCE` over the weights
w: the noisy OR (Pearl 1988) of the boxes, in which a suppressed one counts as a fraction of a detection, since all of
them look at the same pixels.

Voters are sorted by their left side, and each kept box is compared only with those whose left side is near its own.
Votes are added up in this order, so on a CPU a result depends only on the boxes of its group, bit for bit.

Legend: P kept boxes, V voters, T pairs of both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from models.postprocess.nms import overlap_and_union

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


def vote(kept: BoxGroups, others: BoxGroups, moves: Tensor, iou_thres: float) -> tuple[Tensor, Tensor]:
    """Moves kept boxes and raises their scores by the votes of other boxes of their groups that they overlap by more
    than ``iou_thres``. Boxes without area and infinite boxes overlap nothing.

    Args:
        kept: P boxes.
        others: V boxes.
        moves: bool (P,), False for boxes that stay as they are.
        iou_thres: the IoU above which a box votes.

    For example, a kept box with the score 0.8, and one voter with the score 0.5 and an IoU of 0.9 with it. The voter's
    weight is 0.5 * exp(-0.1^2 / 0.02) = 0.303. Each side of the box becomes (0.8 * its own + 0.303 * the voter's) /
    1.103, and the score 1 - 0.2 * (1 - 0.303)^0.1 = 0.807.

    Returns boxes float32 (P, 4) and scores float32 (P,).
    """
    voters, first, count = _near_voters(kept, others, iou_thres)
    count = count * moves
    sum_dtype = torch.float32 if kept.scores.device.type == "mps" else torch.float64  # MPS has no float64
    sums = _with_ones(kept.boxes_xyxy).to(sum_dtype) * kept.scores[:, None]
    misses = torch.zeros_like(sums[:, 0])
    for row, voter, iou in _overlapping_pairs(kept.boxes_xyxy, voters.boxes_xyxy, first, count, iou_thres):
        weights = voters.scores.index_select(0, voter) * vote_weights(iou.to(sum_dtype))
        votes = _with_ones(voters.boxes_xyxy.index_select(0, voter)) * weights[:, None]
        sums.index_add_(0, row, votes)
        misses.index_add_(0, row, log_misses(weights))
    mean = (sums[:, :4] / sums[:, 4:]).float()
    boxes = torch.where(mean.isfinite(), mean, kept.boxes_xyxy)
    return boxes, raised_scores(kept.scores.to(sum_dtype), misses).float()


def _near_voters(kept: BoxGroups, others: BoxGroups, iou_thres: float) -> tuple[BoxGroups, Tensor, Tensor]:
    """Finds the voters that may overlap each kept box by more than the threshold: those of its group whose left sides
    are near enough.

    For example, with a threshold of 0.5, a kept box from x = 100 to 140 reaches 20 to the right, because a box that
    begins later than 120 shares less than half of its width, and 40 to the left. Of voters of its group with the left
    sides 50, 70, 95, 118, 130, those from the second to the fourth are near: its first voter is number 1 (from 0), of
    3.

    Returns the ``others`` sorted by group, then by left side; and the position of each kept box's first voter among
    them and the number of its voters, int64 (P,).
    """
    x1, _, x2, _ = kept.boxes_xyxy.unbind(1)
    # A box with an IoU above t is at most 1 / t as wide, and more than t of the larger width is common to both.
    reach = (x2 - x1) * (1 - iou_thres + _IOU_ROUNDING)
    lowest = _sort_keys(x1 - reach / max(iou_thres, _MIN_IOU), kept.group)
    highest = _sort_keys(x1 + reach, kept.group)
    voter_keys, order = _sort_keys(others.boxes_xyxy[:, 0], others.group).sort(stable=True)
    first = torch.searchsorted(voter_keys, lowest)
    count = (torch.searchsorted(voter_keys, highest, right=True) - first).clamp_(min=0)
    return BoxGroups(*(column.index_select(0, order) for column in others)), first, count


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


def _overlapping_pairs(
    kept: Tensor, voters: Tensor, first: Tensor, count: Tensor, iou_thres: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the pairs of a kept box and a voter whose IoU is above the threshold.

    Args:
        kept: (P, 4).
        voters: (V, 4), of which each kept box is compared with ``count`` (P,), from ``first`` (P,) on.

    Yields rows and voters int64 (T,), in ascending order, and IoUs float32 (T,).
    """
    # Pairs are numbered by kept box, then by voter: box i has the numbers from edges[i] to edges[i + 1].
    ends = count.cumsum(0)
    edges = [0, *ends.tolist()]
    first_number = ends - count
    voter_of_number = first - first_number  # offset from the number of a box's pair to its voter
    kept_columns = kept.T.contiguous()
    voter_columns = voters.T.contiguous()
    for start, end in _chunks(edges, _PAIRS_ON_GPU if kept.is_cuda else _PAIRS_ON_CPU):
        number = torch.arange(edges[start], edges[end], device=kept.device)
        row = torch.repeat_interleave(count[start:end], output_size=len(number)) + start
        voter = number + voter_of_number.index_select(0, row)
        overlap, union = overlap_and_union(kept_columns.index_select(1, row), voter_columns.index_select(1, voter))
        pair = (overlap > union * iou_thres).nonzero()[:, 0]
        iou = overlap.index_select(0, pair) / union.index_select(0, pair)
        yield row.index_select(0, pair), voter.index_select(0, pair), iou


def _chunks(edges: list[int], pairs: int) -> Iterator[tuple[int, int]]:
    """Divides kept boxes into ranges with about ``pairs`` pairs each, all pairs of a box in one range. Yields the first
    box of each range and the first box after it.

    ``edges``: P + 1 numbers, see `_overlapping_pairs`. For example, boxes with 3, 0, 4, 2 and 1 pairs have the edges 0,
    3, 3, 7, 9 and 10. Ranges with 4 pairs begin at the boxes that have the pairs 0, 4 and 8: boxes 0 to 1, 2, and 3 to
    4.
    """
    first_boxes = [bisect_left(edges, number, lo=1) - 1 for number in range(0, edges[-1], pairs)]
    yield from pairwise([*first_boxes, len(edges) - 1])
