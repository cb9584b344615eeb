"""What becomes of each detection: right, wrong or ignored, by COCO's rules. Every score starts from here.

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


class Judgement(NamedTuple):
    """Detections and objects by (image, class), images in the order of their ids, and who took which."""

    ranked: Ranked
    objects: Objects
    ignored: np.ndarray  # bool (M, A) objects that don't count: crowd, or out of the range
    assignment: Assignment
    num_classes: int

    @property
    def object_classes(self) -> np.ndarray:
        """int64 (M,)."""
        return self.objects.group % self.num_classes

    def targets(self) -> np.ndarray:
        """Objects that count, by class and area range: int64 (C, A)."""
        counts = np.zeros((self.num_classes, self.ignored.shape[1]), dtype=np.int64)
        np.add.at(counts, self.object_classes, ~self.ignored)
        return counts


class Verdicts(NamedTuple):
    """Every detection, by class and then by falling score, with what became of it."""

    class_offsets: np.ndarray  # int64 (C + 1,)
    scores: np.ndarray  # float64 (D,)
    classes: np.ndarray  # int64 (D,)
    wrong_if_alone: np.ndarray  # bool (D, A): overlaps nothing, and its size is in the range
    contender: np.ndarray  # int64 (N,) rows that overlap something, ascending
    right: np.ndarray  # bool (N, A, T)
    wrong: np.ndarray  # bool (N, A, T)

    def plain(self) -> tuple[np.ndarray, np.ndarray]:
        """Which detections are right and which wrong, of all sizes, at the lowest IoU threshold: bool (D,) twice.

        Those that are neither lie in a crowd.
        """
        right = np.zeros(self.scores.size, dtype=bool)
        wrong = self.wrong_if_alone[:, 0].copy()
        right[self.contender] = self.right[:, 0, 0]
        wrong[self.contender] = self.wrong[:, 0, 0]
        return right, wrong


def judge(gt: GroundTruth, table: DetectionTable, num_classes: int, *, max_det: int = 100) -> Judgement:
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
    return Judgement(ranked, objects, ignored, assignment, num_classes)


def sort_by_class(judgement: Judgement) -> Verdicts:
    """The verdicts on all detections of a class together, best first; equal scores in the order of the images."""
    ranked, assignment = judgement.ranked, judgement.assignment
    order = np.lexsort((-ranked.scores, ranked.classes))
    is_contender = np.zeros(order.size, dtype=bool)
    is_contender[assignment.contender] = True
    where = np.empty(order.size, dtype=np.int64)
    where[assignment.contender] = np.arange(assignment.contender.size)
    contender = np.flatnonzero(is_contender[order])
    verdict = where[order[contender]]
    x1, y1, x2, y2 = ranked.boxes_xyxy[order].T
    out_of_range = _out_of_range((x2 - x1) * (y2 - y1))
    matched, ignored = assignment.matched[verdict], assignment.ignored[verdict]
    return Verdicts(
        class_offsets=np.searchsorted(ranked.classes[order], np.arange(judgement.num_classes + 1)),
        scores=ranked.scores[order],
        classes=ranked.classes[order],
        wrong_if_alone=~out_of_range & ~is_contender[order, None],
        contender=contender,
        right=matched & ~ignored,
        wrong=~matched & ~out_of_range[contender, :, None],
    )


def _check_classes(classes: np.ndarray, num_classes: int, what: str) -> None:
    if classes.size and not (classes.min() >= 0 and classes.max() < num_classes):
        raise ValueError(f"class ids of the {what} span {classes.min()}..{classes.max()}, want 0..{num_classes - 1}")


def _image_ranks(image_ids: tuple[int | str, ...]) -> np.ndarray:
    """Place of each image in the order of ids, numbers before names: int64 (N,)."""
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
