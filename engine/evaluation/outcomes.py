"""The outcome of each detection by COCO's rules: true positive, false positive or ignored. All scores start from here.

Legend: D detections, M objects, C classes, A area ranges, T IoU thresholds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.evaluation.matching import AREA_RANGES, Assignment, Objects, assign_coco, position_in_run
from utils.structures import DetectionTable, GroundTruth


class Ranked(NamedTuple):
    """Detections that count: grouped by (image, class), best first within a group, at most ``max_det`` of each."""

    group: np.ndarray  # int64 (D,) ascending: image's rank * C + class
    boxes_xyxy: np.ndarray  # float64 (D, 4)
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)


class Matches(NamedTuple):
    """Detections and objects by (image, class), images in the order of their ids, and the assignment between them."""

    ranked: Ranked
    objects: Objects
    ignored: np.ndarray  # bool (M, A) objects that do not count: crowd, or out of the area range
    assignment: Assignment
    num_classes: int

    @property
    def object_classes(self) -> np.ndarray:
        """int64 (M,)."""
        return self.objects.group % self.num_classes

    def targets(self) -> np.ndarray:
        """Number of objects that count, by class and area range: int64 (C, A)."""
        counts = np.zeros((self.num_classes, self.ignored.shape[1]), dtype=np.int64)
        np.add.at(counts, self.object_classes, ~self.ignored)
        return counts


class Outcomes(NamedTuple):
    """All detections, sorted by class and then by falling score, with their outcomes.

    N of them overlap an object of their class in their image. The others cannot be true positives, and are the same at
    all IoU thresholds.
    """

    class_offsets: np.ndarray  # int64 (C + 1,)
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)
    unmatched: np.ndarray  # bool (D, A): false positives that overlap nothing, with an area in the range
    overlapping: np.ndarray  # int64 (N,) rows of the detections that overlap an object, ascending
    true_positive: np.ndarray  # bool (N, A, T)
    false_positive: np.ndarray  # bool (N, A, T)

    def at_first_iou(self) -> tuple[np.ndarray, np.ndarray]:
        """True positives and false positives, of all areas, at the lowest IoU threshold (0.5): bool (D,) each.

        Detections that are neither lie in a crowd region.
        """
        true_positive = np.zeros(self.scores.size, dtype=bool)
        false_positive = self.unmatched[:, 0].copy()
        true_positive[self.overlapping] = self.true_positive[:, 0, 0]
        false_positive[self.overlapping] = self.false_positive[:, 0, 0]
        return true_positive, false_positive


def match_detections(gt: GroundTruth, table: DetectionTable, num_classes: int, *, max_det: int = 100) -> Matches:
    """Assigns the best ``max_det`` detections of each class in each image to the objects, as COCO's evaluation does."""
    _check_classes(gt.classes, num_classes, "labels")
    _check_classes(table.classes, num_classes, "detections")
    rank_of_image = _image_ranks(gt.image_ids)
    ranked = _rank_detections(table, rank_of_image, num_classes, max_det)
    gt_image = rank_of_image[np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))]
    gt_group = gt_image * num_classes + gt.classes
    order = np.argsort(gt_group, kind="stable")
    objects = Objects(gt_group[order], gt.boxes_xywh_px[order], gt.crowd[order])
    ignored = objects.crowd[:, None] | _out_of_range(gt.area_px[order])
    assignment = assign_coco(ranked.group, ranked.boxes_xyxy, objects, ignored)
    return Matches(ranked, objects, ignored, assignment, num_classes)


def sort_by_class(matches: Matches) -> Outcomes:
    """The outcomes of all detections of a class together, best first; equal scores in the order of the images."""
    ranked, assignment = matches.ranked, matches.assignment
    order = np.lexsort((-ranked.scores, ranked.classes))
    overlaps = np.zeros(order.size, dtype=bool)
    overlaps[assignment.overlapping] = True
    assigned_row = np.empty(order.size, dtype=np.int64)
    assigned_row[assignment.overlapping] = np.arange(assignment.overlapping.size)
    overlapping = np.flatnonzero(overlaps[order])
    rows = assigned_row[order[overlapping]]
    x1, y1, x2, y2 = ranked.boxes_xyxy[order].T
    out_of_range = _out_of_range((x2 - x1) * (y2 - y1))
    matched, ignored = assignment.matched[rows], assignment.ignored[rows]
    return Outcomes(
        class_offsets=np.searchsorted(ranked.classes[order], np.arange(matches.num_classes + 1)),
        scores=ranked.scores[order],
        classes=ranked.classes[order],
        unmatched=~out_of_range & ~overlaps[order, None],
        overlapping=overlapping,
        true_positive=matched & ~ignored,
        false_positive=~matched & ~out_of_range[overlapping, :, None],
    )


def known_outcomes(classes: np.ndarray, scores: np.ndarray, true_positive: np.ndarray, num_classes: int) -> Outcomes:
    """Outcomes, at one IoU threshold and of all areas, of detections sorted by class and falling score: (D,) each.
    Those that are no true positives are false positives."""
    overlapping = np.flatnonzero(true_positive)
    return Outcomes(
        class_offsets=np.searchsorted(classes, np.arange(num_classes + 1)),
        scores=scores,
        classes=classes,
        unmatched=~true_positive[:, None],
        overlapping=overlapping,
        true_positive=np.ones((overlapping.size, 1, 1), dtype=bool),
        false_positive=np.zeros((overlapping.size, 1, 1), dtype=bool),
    )


def _check_classes(classes: np.ndarray, num_classes: int, what: str) -> None:
    if classes.size and not (classes.min() >= 0 and classes.max() < num_classes):
        raise ValueError(f"class ids of the {what} span {classes.min()}..{classes.max()}, want 0..{num_classes - 1}")


def _image_ranks(image_ids: tuple[int | str, ...]) -> np.ndarray:
    """Rank of each image in the order of ids, numbers before names: int64 (N,)."""
    order = sorted(range(len(image_ids)), key=lambda i: (isinstance(image_ids[i], str), image_ids[i]))
    ranks = np.empty(len(image_ids), dtype=np.int64)
    ranks[order] = np.arange(len(image_ids))
    return ranks


def _out_of_range(area: np.ndarray) -> np.ndarray:
    """bool (..., A)."""
    return (area[..., None] < AREA_RANGES[:, 0]) | (area[..., None] > AREA_RANGES[:, 1])


def _rank_detections(table: DetectionTable, rank_of_image: np.ndarray, num_classes: int, max_det: int) -> Ranked:
    group = rank_of_image[table.image_index] * num_classes + table.classes
    order = np.lexsort((-table.scores, group))  # stable: equal scores in the order of the table
    order = order[position_in_run(group[order]) < max_det]
    return Ranked(group[order], table.boxes_xyxy_px[order], table.scores[order], table.classes[order])
