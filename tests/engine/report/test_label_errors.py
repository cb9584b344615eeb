"""Label errors: those that are planted are found, named, and ranked before correct labels."""

from __future__ import annotations

import numpy as np
import pytest

from engine.report.label_errors import MISSING_LABEL, WRONG_CLASS, CheckedSplit, find_label_errors
from tests.helpers.scoring import make_table
from tests.helpers.synthetic_index import index_of
from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable

IMAGES = 50
OBJECTS = 6  # in each image
GOOD = np.array([1.0, 1.0])  # AP50 of the classes


def scene() -> tuple[np.ndarray, np.ndarray, np.ndarray, DetectionTable]:
    """Returns image, box and class of objects on a grid, and the detections of a model that finds all of them."""
    rng = np.random.default_rng(0)
    image = np.repeat(np.arange(IMAGES), OBJECTS)
    corner = np.tile(np.stack([np.arange(OBJECTS) % 3, np.arange(OBJECTS) // 3], 1), (IMAGES, 1)) * 200.0 + 20
    boxes = np.concatenate([corner, corner + 100], 1)
    classes = rng.integers(0, 2, len(image))
    noisy = boxes + rng.normal(0, 2, boxes.shape)
    scores = rng.uniform(0.7, 0.95, len(image))
    scores[17:20] = 0.94
    return image, boxes, classes, DetectionTable(image, noisy, scores, classes.copy())


def split_of(image: np.ndarray, boxes: np.ndarray, classes: np.ndarray) -> CheckedSplit:
    index = index_of(
        names=["a", "b"],
        paths=[str(i) for i in range(IMAGES)],
        image_hw=np.full((IMAGES, 2), 640),
        offsets=np.searchsorted(image, np.arange(IMAGES + 1)),
        boxes_xywh_px=xyxy_to_xywh(boxes),
        classes=classes,
    )
    return CheckedSplit("train", index)


def without(label: int) -> tuple[CheckedSplit, DetectionTable]:
    image, boxes, classes, table = scene()
    return split_of(*(np.delete(values, label, 0) for values in (image, boxes, classes))), table


def swapped(label: int) -> tuple[CheckedSplit, DetectionTable]:
    image, boxes, classes, table = scene()
    classes[label] = 1 - classes[label]
    return split_of(image, boxes, classes), table


@pytest.mark.parametrize(("make", "kind"), [(without, MISSING_LABEL), (swapped, WRONG_CLASS)])
def test_the_planted_error_is_the_only_one(make, kind):
    split, table = make(17)
    _, boxes, _, true = scene()
    order = np.random.default_rng(1).permutation(len(table.scores))
    (error,) = find_label_errors(split, table.take(order), GOOD)
    assert (error.kind, error.images) == (kind, ("2",))
    assert error.suggestion.class_id == true.classes[17]
    np.testing.assert_allclose(error.suggestion.xyxy_px, boxes[17], atol=8)
    assert error.score > 0.5


def test_correct_labels_are_not_listed():
    """Nor with a model that knows one class, or none."""
    image, boxes, classes, table = scene()
    for detections in (table, table.take(table.classes == 0), table.take([])):
        assert find_label_errors(split_of(image, boxes, classes), detections, GOOD) == []


def test_only_detections_that_score_as_the_mean_of_their_class_contradict_a_label():
    split, table = without(17)
    of_class = table.classes == table.classes[17]
    mean = table.scores[of_class & (np.arange(len(of_class)) != 17)].mean()
    for difference in (-0.01, 0.01):
        table.scores[17] = mean + difference
        assert len(find_label_errors(split, table, GOOD)) == (difference > 0)


@pytest.mark.parametrize("make", [without, swapped])
def test_what_cannot_be_judged_is_not_listed(make):
    """Labels of classes that the model hardly knows, repeated rows; and crowd regions, which explain detections."""
    split, table = make(17)
    for ap50 in (np.nan, 0.49):
        weak = GOOD.copy()
        weak[table.classes[17]] = ap50
        assert find_label_errors(split, table, weak) == []
    for change in ("crowd", "repeated") if make is swapped else ():
        split, table = swapped(17)
        getattr(split.index, change)[17] = True
        assert find_label_errors(split, table, GOOD) == []


def test_a_box_that_misses_its_label_is_not_a_missing_label():
    """The report calls it misplaced. One of another class beside a label is a missing label."""
    image, boxes, classes, table = scene()
    shifted = make_table(
        image=[2, 2], boxes=boxes[[17, 16]] + [60, 0, 60, 0], scores=[0.99] * 2, classes=classes[[17, 16]]
    )
    split = split_of(image, boxes, classes)
    assert find_label_errors(split, DetectionTable.concatenate([table, shifted]), GOOD) == []
    shifted.classes[:] = 1 - shifted.classes
    errors = find_label_errors(split, DetectionTable.concatenate([table, shifted]), GOOD)
    assert [error.kind for error in errors] == [MISSING_LABEL] * 2
