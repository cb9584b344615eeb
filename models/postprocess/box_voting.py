"""Box voting: a box that NMS keeps moves to the weighted mean of the boxes that it overlaps, and its score rises with
their number.

Gidaris & Komodakis 2015, "Object detection via a multi-region and semantic segmentation-aware CNN model". The weights
are score * exp(-(1 - IoU)^2 / `SIGMA`), those of He et al. 2019, "Bounding Box Regression with Uncertainty for Accurate
Object Detection", without variances. A score s becomes 1 - (1 - s) * prod (1 - w)^`INDEPENDENCE` over the weights w:
the noisy OR (Pearl 1988) of the boxes, in which a suppressed one counts as a fraction of a detection, since all of them
look at the same pixels.

Voters are sorted by their left side, and each kept box is compared only with those whose left side is near its own.
Votes are added up in this order, so on a CPU a result depends on the boxes of its group alone, bit for bit.

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

VOTERS = 1024  # of an image: its best candidates; a kept box that ranks below them stays where it is
SIGMA = 0.02
INDEPENDENCE = 0.1
MIN_VOTING_SCORE = 0.01  # boxes with a higher score vote and are raised, whatever the confidence threshold is
_ROUNDING = 1e-3  # more than the rounding error of an IoU
_MIN_VOTING_IOU = 0.1  # boxes that overlap less have weights below 1e-17
_PAIRS_ON_CPU, _PAIRS_ON_GPU = 1 << 16, 1 << 22  # compared together; changes speed and memory only


class BoxGroups(NamedTuple):
    """N boxes; those of different groups have nothing to do with each other."""

    boxes_xyxy: Tensor  # float32 (N, 4)
    scores: Tensor  # float32 (N,), positive
    group: Tensor  # int64 (N,), from 0


def vote_weights(iou: Tensor) -> Tensor:
    """What the scores of boxes with this IoU are multiplied by."""
    return ((1 - iou).square() / -SIGMA).exp()


def log_misses(weights: Tensor) -> Tensor:
    """log(1 - w), -inf from 1 on."""
    return (1 - weights.clamp(max=1)).log()


def raised_scores(scores: Tensor, votes: Tensor) -> Tensor:
    """Scores after voting, given the sums of `log_misses` over the weights of their voters. What is not above
    `MIN_VOTING_SCORE` stays, or it would be a detection only if the confidence threshold is below that."""
    misses = log_misses(scores) + INDEPENDENCE * votes
    return torch.where(scores > MIN_VOTING_SCORE, torch.maximum(1 - misses.exp(), scores), scores)


def vote(kept: BoxGroups, others: BoxGroups, moves: Tensor, iou_thres: float) -> tuple[Tensor, Tensor]:
    """The kept boxes, float32 (P, 4), and their scores, float32 (P,), after the votes of those other boxes of their
    groups that they overlap by more than ``iou_thres``. Boxes without area and infinite boxes overlap nothing.

    ``moves``: bool (P,), False for boxes that stay as they are.
    """
    x1, _, x2, _ = kept.boxes_xyxy.unbind(1)
    # A box with an IoU above t is at most 1 / t as wide and has more than t of the larger width in common.
    reach = (x2 - x1) * (1 - iou_thres + _ROUNDING)
    left = torch.cat((x1 - reach / max(iou_thres, _MIN_VOTING_IOU), x1 + reach, others.boxes_xyxy[:, 0]))
    keys = _keys(left, torch.cat((kept.group, kept.group, others.group)))
    least, most, keys = keys.split((len(x1), len(x1), len(others.group)))
    keys, order = keys.sort(stable=True)
    first = torch.searchsorted(keys, least)
    count = (torch.searchsorted(keys, most, right=True) - first).clamp_(min=0) * moves
    voters = BoxGroups(*(t.index_select(0, order) for t in others))

    exact = torch.float32 if left.device.type == "mps" else torch.float64  # MPS has no float64
    sums = _with_ones(kept.boxes_xyxy).to(exact) * kept.scores[:, None]
    misses = torch.zeros_like(sums[:, 0])
    for row, voter, iou in _overlapping_pairs(kept.boxes_xyxy, voters.boxes_xyxy, first, count, iou_thres):
        weights = voters.scores.index_select(0, voter) * vote_weights(iou.to(exact))
        votes = _with_ones(voters.boxes_xyxy.index_select(0, voter)) * weights[:, None]
        sums.index_add_(0, row, votes)
        misses.index_add_(0, row, log_misses(weights))
    mean = (sums[:, :4] / sums[:, 4:]).float()
    boxes = torch.where(mean.isfinite(), mean, kept.boxes_xyxy)
    return boxes, raised_scores(kept.scores.to(exact), misses).float()


def _keys(left: Tensor, group: Tensor) -> Tensor:
    """int64 keys that sort by ``group``, then by ``left``, float32. As integers, the bits of positive floats have the
    same order and those of negative floats the reverse."""
    bits = left.view(torch.int32)
    return (group << 32) + (bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _with_ones(boxes: Tensor) -> Tensor:
    return torch.cat((boxes, torch.ones_like(boxes[:, :1])), 1)


def _overlapping_pairs(
    kept: Tensor, voters: Tensor, first: Tensor, count: Tensor, iou_thres: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pairs of a box of ``kept`` (P, 4) and one of ``voters`` (V, 4), the ``count`` (P,) ones from ``first`` (P,) on,
    with an IoU above the threshold: rows and voters int64 (T,), in ascending order, and IoUs float32 (T,)."""
    ends = count.cumsum(0)
    to_voter = first - ends + count  # from a pair's number
    on_host = [0, *ends.tolist()]
    together = _PAIRS_ON_GPU if kept.is_cuda else _PAIRS_ON_CPU
    edges = [bisect_left(on_host, number, lo=1) - 1 for number in range(0, on_host[-1], together)]
    a, b = kept.T.contiguous(), voters.T.contiguous()
    for start, end in pairwise([*edges, len(kept)]):
        number = torch.arange(on_host[start], on_host[end], device=kept.device)
        row = torch.repeat_interleave(count[start:end], output_size=len(number)) + start
        voter = number + to_voter.index_select(0, row)
        overlap, union = overlap_and_union(a.index_select(1, row), b.index_select(1, voter))
        pair = (overlap > union * iou_thres).nonzero()[:, 0]
        iou = overlap.index_select(0, pair) / union.index_select(0, pair)
        yield row.index_select(0, pair), voter.index_select(0, pair), iou
