"""Matches detections to objects by COCO's rules, as true positives, false positives or ignored.

Only the few detections that overlap an object of their group by at least the lowest IoU threshold are assigned. A group
is a pair of image and class, or an image where classes do not matter.

Legend: D detections, M objects, P pairs of the two, N detections that overlap an object, C classes, A area ranges, T
IoU thresholds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable
from utils.labels import GroundTruth

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # COCO's T
IOU_50, IOU_75 = 0, 5  # positions in `IOU_THRESHOLDS`
AREA_RANGES = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]])  # COCO's A, square pixels
SIZES = ("all", "small", "medium", "large")  # names of `AREA_RANGES`
ALL_SIZES, SMALL, MEDIUM, LARGE = range(4)  # positions in `AREA_RANGES`
_CHUNK_PAIRS = 1 << 21  # overlaps computed at a time; bounds the memory at some 200 MB


class Objects(NamedTuple):
    """Ground truth sorted by group."""

    group: np.ndarray  # int64 (M,) ascending
    boxes_xywh: np.ndarray  # float64 (M, 4)
    crowd: np.ndarray  # bool (M,)


class Ranked(NamedTuple):
    """Detections that count: grouped by (image, class), best first within a group, at most ``max_det`` of each."""

    group: np.ndarray  # int64 (D,) ascending: image's rank * C + class
    boxes_xyxy: np.ndarray  # float64 (D, 4)
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)


class Pairs(NamedTuple):
    """Detections and objects of one group that overlap enough."""

    detection: np.ndarray  # int64 (P,) row of the detections, ascending
    target: np.ndarray  # int64 (P,) row of the objects, ascending within a detection
    overlap: np.ndarray  # float64 (P,) IoU; intersection over the detection's area where the object is crowd

    def take(self, rows: np.ndarray | slice) -> Pairs:
        """Selects ``rows``: a mask, indices or a slice."""
        return Pairs(*(column[rows] for column in self))


class CocoAssignment(NamedTuple):
    """COCO's matches of the N detections that overlap an object."""

    overlapping: np.ndarray  # int64 (N,) rows of these detections, ascending
    matched: np.ndarray  # bool (N, A, T)
    ignored: np.ndarray  # bool (N, A, T) matched to an ignored object (crowd, out of range): neither true nor false
    target: np.ndarray  # int64 (N,) matched object in the first area range at the first threshold; -1: none


class Matches(NamedTuple):
    """Detections and objects by (image, class), images in the order of their ids, and the assignment between them."""

    ranked: Ranked
    objects: Objects
    ignored: np.ndarray  # bool (M, A) objects that do not count: crowd, or out of the area range
    assignment: CocoAssignment
    num_classes: int

    @property
    def object_classes(self) -> np.ndarray:
        """Class of each object: int64 (M,)."""
        return self.objects.group % self.num_classes

    @property
    def by_class(self) -> np.ndarray:
        """Rows of ``ranked`` by class, then by score; equal scores in the order of the images: int64 (D,)."""
        return np.lexsort((-self.ranked.scores, self.ranked.classes))

    def outcomes_50(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns whether each detection is a true positive at IoU 0.5, and whether it is neither true nor false,
        because it lies in a crowd region: bool (D,) each."""
        assignment = self.assignment
        matched = assignment.matched[:, ALL_SIZES, IOU_50]
        ignored = assignment.ignored[:, ALL_SIZES, IOU_50]
        is_correct = np.zeros(self.ranked.scores.size, dtype=bool)
        is_ignored = np.zeros_like(is_correct)
        is_correct[assignment.overlapping] = matched & ~ignored
        is_ignored[assignment.overlapping] = matched & ignored
        return is_correct, is_ignored

    def detected_objects(self) -> np.ndarray:
        """Returns the objects that true positives match at IoU 0.5, in the order of these: int64 (n,)."""
        assignment = self.assignment
        is_correct, _ = self.outcomes_50()
        return assignment.target[is_correct[assignment.overlapping]]

    def above(self, confidence: float) -> Matches:
        """Returns the matches of the detections that score above ``confidence``. These are what matching them alone
        would give, because a detection's match does not depend on those that score less."""
        is_above = self.ranked.scores > confidence
        row = np.cumsum(is_above) - 1  # of each detection among those above
        assignment = CocoAssignment(*(column[is_above[self.assignment.overlapping]] for column in self.assignment))
        return self._replace(
            ranked=Ranked(*(column[is_above] for column in self.ranked)),
            assignment=assignment._replace(overlapping=row[assignment.overlapping]),
        )

    def targets(self) -> np.ndarray:
        """Counts the objects that are not ignored, by class and area range: int64 (C, A)."""
        counts = np.zeros((self.num_classes, self.ignored.shape[1]), dtype=np.int64)
        np.add.at(counts, self.object_classes, ~self.ignored)
        return counts


class DetectionOutcomes(NamedTuple):
    """Detections by class, the best first. Those that are neither true nor false positives lie in a crowd region or out
    of the area range."""

    classes: np.ndarray  # int64 (D,) ascending
    true_positive: np.ndarray  # bool (D, A, T)
    false_positive: np.ndarray  # bool (D, A, T)

    def of_classes(self, num_classes: int) -> list[slice]:
        """Returns the rows of each class."""
        return [slice(*ends) for ends in pairwise(np.searchsorted(self.classes, np.arange(num_classes + 1)).tolist())]


def match_detections(gt: GroundTruth, table: DetectionTable, num_classes: int) -> Matches:
    """Assigns the best ``gt.max_det`` detections of each class in each image to the objects, as COCO's evaluation
    does."""
    for owner, classes in (("labels", gt.classes), ("detections", table.classes)):
        if classes.size and not 0 <= classes.min() <= classes.max() < num_classes:
            span = f"{classes.min()}..{classes.max()}"
            raise ValueError(f"class ids of the {owner} span {span}, expected 0..{num_classes - 1}")
    rank_of_image = image_ranks(gt.image_ids)
    group = rank_of_image[table.image_index] * num_classes + table.classes
    order = np.lexsort((-table.scores, group))  # stable: equal scores in the order of the table
    order = order[_position_in_run(group[order]) < gt.max_det]
    ranked = Ranked(group[order], table.boxes_xyxy_px[order], table.scores[order], table.classes[order])
    group = rank_of_image[gt.image_of_box] * num_classes + gt.classes
    order = np.argsort(group, kind="stable")
    objects = Objects(group[order], gt.boxes_xywh_px[order], gt.crowd[order])
    ignored = objects.crowd[:, None] | _out_of_range(gt.area_px[order])
    pairs = overlapping_pairs(ranked.group, ranked.boxes_xyxy, objects, float(IOU_THRESHOLDS[0]))
    assignment = _assign_coco(ranked.group, pairs, objects.crowd, ignored)
    return Matches(ranked, objects, ignored, assignment, num_classes)


def image_ranks(image_ids: tuple[int | str, ...]) -> np.ndarray:
    """Ranks images by their ids, numbers before names: int64 (N,)."""
    order = sorted(range(len(image_ids)), key=lambda i: (isinstance(image_ids[i], str), image_ids[i]))
    ranks = np.empty(len(image_ids), dtype=np.int64)
    ranks[order] = np.arange(len(image_ids))
    return ranks


def _out_of_range(area: np.ndarray) -> np.ndarray:
    """Returns which areas (...,) are outside which of `AREA_RANGES`: bool (..., A)."""
    return (area[..., None] < AREA_RANGES[:, 0]) | (area[..., None] > AREA_RANGES[:, 1])


def sort_by_class(matches: Matches) -> DetectionOutcomes:
    """Sorts the outcomes of all images in the order of `Matches.by_class`."""
    ranked = matches.ranked
    assignment = matches.assignment
    order = matches.by_class
    position = np.empty_like(order)  # position of each detection in this order
    position[order] = np.arange(order.size)
    x1, y1, x2, y2 = ranked.boxes_xyxy.T
    out_of_range = _out_of_range((x2 - x1) * (y2 - y1))[order][:, :, None]
    # Unless it is assigned, a detection is a false positive at every IoU threshold.
    false_positive = np.repeat(~out_of_range, IOU_THRESHOLDS.size, 2)
    true_positive = np.zeros_like(false_positive)
    assigned = position[assignment.overlapping]
    true_positive[assigned] = assignment.matched & ~assignment.ignored
    false_positive[assigned] = ~assignment.matched & ~out_of_range[assigned]
    return DetectionOutcomes(ranked.classes[order], true_positive, false_positive)


def _assign_coco(group: np.ndarray, pairs: Pairs, crowd: np.ndarray, target_ignored: np.ndarray) -> CocoAssignment:
    """Computes the greedy assignment of COCO's evaluation for all groups, area ranges and IoU thresholds at once.

    Detections are matched in the order of their scores, each to the free object with the largest overlap at or above
    the threshold. Ignored objects (crowd, or outside the area range) are matched only if no other is left; a crowd
    region may be matched any number of times.

    Step k matches the k-th best overlapping detection of every group at once. For example, two detections of one group,
    a (score 0.9) and b (0.8), and three objects x, y and z, none of them ignored, with these overlaps:

              x     y     z
        a   0.60  0.75   -
        b   0.55  0.70   -

    Step 1: a takes y at the thresholds up to 0.75, for its overlap with y is larger than with x. Step 2: b takes x at
    0.5 and 0.55, since y is taken; at 0.6 to 0.7 it overlaps only y enough, and is a false positive; at 0.8 both are. z
    is in no pair and stays free. If y were ignored, a would take x up to 0.6, and y, being ignored, only above that.

    ``group``: int64 (D,) ascending, scores descending within a group; ``target_ignored``: bool (M, A).
    """
    # Only detections and objects in a pair are numbered, without gaps.
    overlapping, detection = np.unique(pairs.detection, return_inverse=True)
    overlapped, target = np.unique(pairs.target, return_inverse=True)
    crowd = crowd[overlapped]
    target_ignored = target_ignored[overlapped]
    shape = (target_ignored.shape[1], IOU_THRESHOLDS.size)
    is_taken = np.zeros((len(overlapped), *shape), dtype=bool)
    matched = np.zeros((len(overlapping), *shape), dtype=bool)
    ignored = np.zeros_like(matched)
    matched_target = np.full(len(overlapping), -1, dtype=np.int64)
    rank = _position_in_run(group[overlapping])  # rank by score among the overlapping detections of a group
    step_of_pair = rank[detection]
    # Within a detection: ascending overlap, equal ones in the order of the objects; COCO matches the last of the best.
    order = np.lexsort((target, pairs.overlap, detection, step_of_pair))
    candidates = Pairs(detection, target, pairs.overlap).take(order)
    step_ends = np.cumsum(np.bincount(step_of_pair))
    for low, high in zip(np.r_[0, step_ends[:-1]], step_ends):
        step = candidates.take(slice(low, high))  # one detection of each group, and so no object twice
        is_available = ~is_taken[step.target] | crowd[step.target, None, None]
        is_ignored = target_ignored[step.target]
        chosen = _choose_objects(step, is_available, is_ignored)
        is_taken[step.target] |= chosen
        at_first = np.flatnonzero(chosen[:, ALL_SIZES, IOU_50])
        matched_target[step.detection[at_first]] = overlapped[step.target[at_first]]
        starts = _run_starts(step.detection)
        rows = step.detection[starts]
        matched[rows] = np.logical_or.reduceat(chosen, starts, axis=0)
        ignored[rows] = np.logical_or.reduceat(chosen & is_ignored[:, :, None], starts, axis=0)
    return CocoAssignment(overlapping, matched, ignored, matched_target)


def _choose_objects(pairs: Pairs, is_available: np.ndarray, is_ignored: np.ndarray) -> np.ndarray:
    """Chooses at most one object for each detection, area range and IoU threshold: of the available ones that overlap
    enough, one that counts rather than an ignored one; then the last, which has the largest overlap.

    Args:
        pairs: P pairs, by detection, then by ascending overlap.
        is_available: bool (P, A, T), whether the object may be matched.
        is_ignored: bool (P, A), whether the object is ignored.

    Returns the chosen pairs: bool (P, A, T).
    """
    count = len(pairs.detection)
    may_match = is_available & (pairs.overlap[:, None] >= IOU_THRESHOLDS)[:, None, :]
    preference = np.arange(1, count + 1)[:, None] + count * ~is_ignored  # unique
    key = np.where(may_match, preference[:, :, None], 0)
    starts = _run_starts(pairs.detection)
    best = np.maximum.reduceat(key, starts, axis=0)
    pairs_per_detection = np.diff(np.r_[starts, count])
    return may_match & (key == np.repeat(best, pairs_per_detection, axis=0))


def overlapping_pairs(group: np.ndarray, boxes_xyxy: np.ndarray, objects: Objects, min_overlap: float) -> Pairs:
    """Returns all (detection, object) pairs of one group that overlap by at least ``min_overlap``.

    Args:
        group: int64 (D,) ascending, of the detections.
        boxes_xyxy: float64 (D, 4), in the frame of ``objects``.
    """
    first_object = np.searchsorted(objects.group, group, side="left")
    num_objects = np.searchsorted(objects.group, group, side="right") - first_object
    rows = np.flatnonzero(num_objects)  # detections whose group has objects
    boxes_xywh = xyxy_to_xywh(boxes_xyxy)
    no_rows = np.zeros(0, dtype=np.int64)
    pairs = [Pairs(no_rows, no_rows, np.zeros(0))]
    chunk_of_row = np.cumsum(num_objects[rows]) // _CHUNK_PAIRS
    for chunk in np.split(rows, np.flatnonzero(np.diff(chunk_of_row)) + 1):
        counts = num_objects[chunk]
        detection = np.repeat(chunk, counts)
        first_pair = np.cumsum(counts) - counts  # position of each detection's first pair in this chunk
        target = np.arange(counts.sum()) + np.repeat(first_object[chunk] - first_pair, counts)
        overlap = overlaps_of(boxes_xywh[detection], objects.boxes_xywh[target], objects.crowd[target])
        pairs.append(Pairs(detection, target, overlap).take(overlap >= min_overlap))
    return Pairs(*map(np.concatenate, zip(*pairs)))


def overlaps_of(detections_xywh: np.ndarray, objects_xywh: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """Computes the IoU of (P, 4) with (P, 4) in pycocotools' order of operations, so that thresholds fall the same
    way."""
    dx, dy, dw, dh = detections_xywh.T
    gx, gy, gw, gh = objects_xywh.T
    w = np.maximum(np.minimum(dw + dx, gw + gx) - np.maximum(dx, gx), 0)
    h = np.maximum(np.minimum(dh + dy, gh + gy) - np.maximum(dy, gy), 0)
    intersection = w * h
    area = dw * dh
    union = np.where(crowd, area, area + gw * gh - intersection)
    return np.divide(intersection, union, out=np.zeros_like(union), where=intersection > 0)


def match_by_overlap(pairs: Pairs, preference: np.ndarray, detections: int, targets: int) -> np.ndarray:
    """Matches detections and objects one to one, greedily: the largest overlap first, of equal ones the largest
    ``preference``, float (P,). Returns the object of each detection, -1 for none: int64 (D,).

    A greedy loop over single pairs would also match each pair that is the best remaining one of both its detection and
    its object, so all such pairs are matched at once, until none remains.
    """
    order = np.lexsort((-preference, -pairs.overlap))
    detection, target = pairs.detection[order], pairs.target[order]
    result = np.full(detections, -1, dtype=np.int64)
    target_free = np.ones(targets, dtype=bool)
    while detection.size:
        rank = np.arange(detection.size)
        best_of_detection = np.full(detections, detection.size)
        best_of_target = np.full(targets, detection.size)
        np.minimum.at(best_of_detection, detection, rank)
        np.minimum.at(best_of_target, target, rank)
        mutual = (best_of_detection[detection] == rank) & (best_of_target[target] == rank)
        result[detection[mutual]] = target[mutual]
        target_free[target[mutual]] = False
        remaining = (result[detection] < 0) & target_free[target]
        detection, target = detection[remaining], target[remaining]
    return result


def _position_in_run(keys: np.ndarray) -> np.ndarray:
    """Counts 0, 1, 2, ... within each run of equal neighbors of ``keys`` (N,): int64 (N,)."""
    starts = _run_starts(keys)
    return np.arange(keys.size) - np.repeat(starts, np.diff(np.r_[starts, keys.size]))


def _run_starts(keys: np.ndarray) -> np.ndarray:
    """Returns where each run of equal neighbors of ``keys`` (N,) starts: int64, [0] for N = 0."""
    return np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
