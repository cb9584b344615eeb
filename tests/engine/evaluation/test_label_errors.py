"""Label errors: each kind is found, named, and ranked before correct labels."""

from __future__ import annotations

import numpy as np
import pytest

from data.check.issues import MISSED, MOVED, SPURIOUS, SWAPPED, Issue
from data.check.scanned import CheckedSplit
from engine.evaluation.label_errors import find_label_errors
from tests.helpers.synthetic_index import index_of
from utils.boxes import xyxy_to_xywh
from utils.structures import DetectionTable

CLASSES = 2


def scene(
    images: int = 50, objects: int = 6, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, DetectionTable]:
    """Objects on a grid (image, xyxy, class), and a model that finds all of them with some noise."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(images), objects)
    corner = np.stack([np.tile(np.arange(objects) % 3, images), np.tile(np.arange(objects) // 3, images)], 1) * 200 + 20
    boxes = np.concatenate([corner, corner + 100], 1).astype(float)
    classes = rng.integers(0, CLASSES, len(image))
    noisy = boxes + rng.normal(0, 2, boxes.shape)
    return image, boxes, classes, DetectionTable(image, noisy, rng.uniform(0.7, 0.95, len(image)), classes)


def errors_in(
    image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, table: DetectionTable, crowd=()
) -> list[Issue]:
    """Of 50 images named 0, 1, ... with these labels."""
    offsets, names = np.searchsorted(image, np.arange(51)), [str(i) for i in range(50)]
    index = index_of(["a", "b"], names, np.full((50, 2), 640), offsets, xyxy_to_xywh(boxes), classes)
    index.crowd[list(crowd)] = True
    return find_label_errors(CheckedSplit("train", index), table)


def first(errors: list[Issue], clean: float = 0.3) -> Issue:
    """The first error, if no other has a score above ``clean``."""
    assert all(error.score < clean < errors[0].score for error in errors[1:])
    return errors[0]


def place(error: Issue) -> tuple[str, int]:
    """The image and the number of the label in it."""
    return error.images[0], error.boxes[0].number


def test_correct_labels_have_low_scores():
    image, boxes, classes, table = scene()
    assert max(error.score for error in errors_in(image, boxes, classes, table)) < 0.3


def test_a_missing_label():
    image, boxes, classes, table = scene()
    keep = np.arange(len(image)) != 17
    errors = errors_in(image[keep], boxes[keep], classes[keep], table)
    error = first(errors)
    assert (error.kind, error.images, error.boxes, error.suggestion.class_id) == (MISSED, ("2",), (), classes[17])
    np.testing.assert_allclose(error.suggestion.xyxy_px, boxes[17], atol=8)


def test_a_swapped_class():
    image, boxes, classes, table = scene()
    labeled = classes.copy()
    labeled[17] = 1 - labeled[17]
    error = first(errors_in(image, boxes, labeled, table))
    assert (error.kind, *place(error), error.suggestion.class_id) == (SWAPPED, "2", 5, classes[17])


@pytest.mark.parametrize("shift", [(30, 0), (30, 30), (-20, 30)])
def test_a_badly_placed_box(shift):
    image, boxes, classes, table = scene()
    moved = boxes.copy()
    moved[17] += [*shift, *shift]
    error = first(errors_in(image, moved, classes, table))
    assert (error.kind, *place(error), error.suggestion.class_id) == (MOVED, "2", 5, classes[17])
    np.testing.assert_allclose(error.suggestion.xyxy_px, boxes[17], atol=8)


def test_a_label_of_nothing():
    image, boxes, classes, table = scene()
    image = np.insert(image, 18, 2)
    boxes = np.insert(boxes, 18, [500, 500, 600, 600], 0)
    classes = np.insert(classes, 18, 1)
    error = first(errors_in(image, boxes, classes, table))
    assert (error.kind, *place(error), error.suggestion) == (SPURIOUS, "2", 6, None)


def test_objects_of_a_class_that_the_model_does_not_know_are_not_spurious():
    image, boxes, classes, table = scene()
    known = table.classes == 0
    table = DetectionTable(*(getattr(table, f)[known] for f in ("image_index", "boxes_xyxy_px", "scores", "classes")))
    errors = errors_in(image, boxes, classes, table)
    assert max(error.score for error in errors) < 0.3


def test_no_detections_and_no_labels():
    image, boxes, classes, _ = scene()
    empty = DetectionTable(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    errors = errors_in(image, boxes, classes, empty)
    assert max(error.score for error in errors) < 0.3
    none = np.zeros(0, np.int64)
    assert errors_in(none, np.zeros((0, 4)), none, empty) == []


def test_crowd_regions_are_not_examined_and_explain_detections():
    image, boxes, classes, table = scene()
    boxes[17] += [-10, -10, 20, 20]
    errors = errors_in(image, boxes, classes, table, crowd=[17])
    assert all(error.images != ("2",) or place(error)[1] != 5 for error in errors)
    assert max(error.score for error in errors) < 0.3


def test_the_order_of_detections_does_not_matter():
    image, boxes, classes, table = scene()
    order = np.random.default_rng(1).permutation(len(table.scores))
    shuffled = DetectionTable(*(getattr(table, name)[order] for name in table.__slots__))
    keep = np.arange(len(image)) != 17
    labels = image[keep], boxes[keep], classes[keep]
    assert errors_in(*labels, shuffled) == errors_in(*labels, table)
