"""Which detection is which object: overlapping pairs as flat arrays, and COCO's greedy assignment over them.

Everything here is ragged and flat. A detection takes part in the assignment only if it overlaps some object of its
group by at least the lowest IoU threshold; on real detections that is a small share, and the rest is never padded,
stored or looped over. Groups are (image, class) pairs, or images for class-agnostic matching.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from utils.boxes import xyxy_to_xywh

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # COCO's T
AREA_RANGES = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]])  # COCO's A: all, small, medium, large
_CHUNK_PAIRS = 1 << 21  # overlaps computed at a time; bounds the memory at some 200 MB


class Pairs(NamedTuple):
    """Detections and objects of one group that overlap enough."""

    detection: np.ndarray  # int64 (P,) row of the detections, ascending
    target: np.ndarray  # int64 (P,) row of the objects, ascending within a detection
    overlap: np.ndarray  # float64 (P,) IoU; intersection over the detection's area where the object is crowd


class Objects(NamedTuple):
    """Ground truth sorted by group."""

    group: np.ndarray  # int64 (M,) ascending
    boxes_xywh: np.ndarray  # float64 (M, 4)
    crowd: np.ndarray  # bool (M,)


class Assignment(NamedTuple):
    """COCO's verdict on the detections that overlap something. A = area ranges, T = IoU thresholds."""

    contender: np.ndarray  # int64 (N,) rows of the detections, ascending
    matched: np.ndarray  # bool (N, A, T)
    ignored: np.ndarray  # bool (N, A, T) neither right nor wrong: matched to an ignored object (crowd, out of range)
    taken: np.ndarray  # int64 (N,) the object in the first area range at the first threshold, -1: none


def position_in_run(keys: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each run of equal neighbours of ``keys`` (N,): int64 (N,)."""
    if keys.size == 0:
        return np.zeros(0, dtype=np.int64)
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    lengths = np.diff(np.r_[starts, keys.size])
    return np.arange(keys.size) - np.repeat(starts, lengths)


def _overlap(detections_xywh: np.ndarray, objects_xywh: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """IoU of (P, 4) with (P, 4) in the order of operations of pycocotools, so that thresholds fall the same way."""
    dx, dy, dw, dh = detections_xywh.T
    gx, gy, gw, gh = objects_xywh.T
    w = np.maximum(np.minimum(dw + dx, gw + gx) - np.maximum(dx, gx), 0)
    h = np.maximum(np.minimum(dh + dy, gh + gy) - np.maximum(dy, gy), 0)
    intersection = w * h
    area = dw * dh
    union = np.where(crowd, area, area + gw * gh - intersection)
    return np.divide(intersection, union, out=np.zeros_like(union), where=intersection > 0)


def overlapping_pairs(
    group: np.ndarray, boxes_xyxy: np.ndarray, objects: Objects, min_overlap: float
) -> Iterator[Pairs]:
    """All (detection, object) pairs of equal group with at least ``min_overlap``, in chunks that never cut a group.

    Args:
        group: int64 (D,) ascending.
        boxes_xyxy: float64 (D, 4), the frame of ``objects``.
    """
    first = np.searchsorted(objects.group, group, side="left")
    count = np.searchsorted(objects.group, group, side="right") - first
    rows = np.flatnonzero(count)  # detections with anything to meet
    if rows.size == 0:
        return
    first, count = first[rows], count[rows]
    boxes_xywh = xyxy_to_xywh(boxes_xyxy[rows])
    group_start = np.flatnonzero(np.r_[True, group[rows][1:] != group[rows][:-1]])
    pairs_before = np.r_[0, np.cumsum(count)]
    chunk_of_group = pairs_before[group_start] // _CHUNK_PAIRS
    cuts = group_start[np.flatnonzero(np.r_[True, np.diff(chunk_of_group) > 0])]
    for low, high in zip(cuts, np.r_[cuts[1:], rows.size]):
        n = count[low:high]
        local = np.repeat(np.arange(low, high), n)
        target = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n) + np.repeat(first[low:high], n)
        overlap = _overlap(boxes_xywh[local], objects.boxes_xywh[target], objects.crowd[target])
        keep = np.flatnonzero(overlap >= min_overlap)
        if keep.size:
            yield Pairs(rows[local[keep]], target[keep], overlap[keep])


def _assign_chunk(group: np.ndarray, pairs: Pairs, crowd: np.ndarray, target_ignored: np.ndarray) -> Assignment:
    """`assign_coco` for pairs of complete groups. ``target_ignored`` is bool (M, A)."""
    contender, slot = np.unique(pairs.detection, return_inverse=True)
    rank = position_in_run(group[contender])  # order of scores among the contenders of a group
    # Within a detection: ascending overlap, equal ones in the order of the objects; COCO takes the last of the best.
    order = np.lexsort((pairs.target, pairs.overlap, slot, rank[slot]))
    slot, target, overlap = slot[order], pairs.target[order], pairs.overlap[order]
    step_ends = np.cumsum(np.bincount(rank[slot]))

    areas, thresholds = target_ignored.shape[1], IOU_THRESHOLDS.size
    local_targets, target = np.unique(target, return_inverse=True)
    crowd, target_ignored = crowd[local_targets], target_ignored[local_targets]
    taken = np.zeros((local_targets.size, areas, thresholds), dtype=bool)
    matched = np.zeros((contender.size, areas, thresholds), dtype=bool)
    ignored = np.zeros_like(matched)
    object_taken = np.full(contender.size, -1, dtype=np.int64)
    for low, high in zip(np.r_[0, step_ends[:-1]], step_ends):
        # One detection a group: no object appears twice in a step, so plain indexed assignment is safe.
        goal, owner = target[low:high], slot[low:high]
        free = ~taken[goal] | crowd[goal, None, None]
        free &= (overlap[low:high, None] >= IOU_THRESHOLDS)[:, None, :]
        # Any object that counts is preferred to any ignored one; then the larger overlap. Keys are unique.
        preference = np.arange(1, high - low + 1)[:, None] + (high - low) * ~target_ignored[goal]
        key = np.where(free, preference[:, :, None], 0)
        starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
        best = np.maximum.reduceat(key, starts, axis=0)
        winner = free & (key == np.repeat(best, np.diff(np.r_[starts, high - low]), axis=0))
        taken[goal] |= winner
        plain = np.flatnonzero(winner[:, 0, 0])
        object_taken[owner[plain]] = local_targets[goal[plain]]
        matched[owner[starts]] = best > 0
        ignored[owner[starts]] = np.logical_or.reduceat(winner & target_ignored[goal][:, :, None], starts, axis=0)
    return Assignment(contender, matched, ignored, object_taken)


def assign_coco(group: np.ndarray, boxes_xyxy: np.ndarray, objects: Objects, target_ignored: np.ndarray) -> Assignment:
    """The greedy assignment of COCO's evaluation, for all groups, area ranges and IoU thresholds at once.

    Detections choose in the order of their scores. Each takes the free object with the largest overlap at or above
    the threshold; objects that are ignored (crowd, or outside the area range) are considered only if no other is
    left; crowd may be taken any number of times.

    Args:
        group: int64 (D,) ascending, scores descending within a group.
        boxes_xyxy: float64 (D, 4).
        objects: sorted by the same group numbers.
        target_ignored: bool (M, A).
    """
    chunks = [
        _assign_chunk(group, pairs, objects.crowd, target_ignored)
        for pairs in overlapping_pairs(group, boxes_xyxy, objects, float(IOU_THRESHOLDS[0]))
    ]
    if not chunks:
        nobody = np.zeros(0, dtype=np.int64)
        nothing = np.zeros((0, target_ignored.shape[1], IOU_THRESHOLDS.size), dtype=bool)
        return Assignment(nobody, nothing, nothing, nobody)
    return Assignment(*(np.concatenate(parts) for parts in zip(*chunks)))


def match_by_overlap(pairs: Pairs, preference: np.ndarray, detections: int, targets: int) -> np.ndarray:
    """One-to-one matching that always takes the pair with the largest overlap left; equal ones by ``preference``.

    A pair that is the best left of both its ends is what the one-by-one greedy would reach sooner or later, so all
    such pairs are taken at once until none is left.

    Args:
        pairs: candidates.
        preference: float (P,), larger first.
        detections: number of detections D.
        targets: number of objects M.

    Returns:
        int64 (D,) the object of each detection, -1 for none.
    """
    order = np.lexsort((-preference, -pairs.overlap))
    detection, target = pairs.detection[order], pairs.target[order]
    result = np.full(detections, -1, dtype=np.int64)
    target_free = np.ones(targets, dtype=bool)
    while detection.size:
        place = np.arange(detection.size)
        best_of_detection = np.full(detections, detection.size)
        best_of_target = np.full(targets, detection.size)
        np.minimum.at(best_of_detection, detection, place)
        np.minimum.at(best_of_target, target, place)
        mutual = (best_of_detection[detection] == place) & (best_of_target[target] == place)
        result[detection[mutual]] = target[mutual]
        target_free[target[mutual]] = False
        left = (result[detection] < 0) & target_free[target]
        detection, target = detection[left], target[left]
    return result
