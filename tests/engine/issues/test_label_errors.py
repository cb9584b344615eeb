"""Label errors: each kind is found, named, and ranked before correct labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from engine.evaluation.metrics import score_detections
from engine.issues.issue import BADLY_PLACED, MISSING_LABEL, SPURIOUS, WRONG_CLASS, CheckedSplit, Issue
from engine.issues.label_errors import GOOD_AP50, GOOD_AP75, MIN_AP, find_label_errors, trust_lines
from tests.helpers.synthetic_index import index_of
from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable

IMAGES = 50
OBJECTS = 6  # in each image
CLASSES = 2
LISTED_SCORE = 0.3


@dataclass
class Labels:
    """Labels of `IMAGES` images named 0, 1, ..., sorted by image. Arrays have a row per label."""

    image: np.ndarray  # (N,), number of the image
    boxes: np.ndarray  # (N, 4), xyxy in pixels
    classes: np.ndarray  # (N,)

    def copy(self) -> Labels:
        return Labels(self.image.copy(), self.boxes.copy(), self.classes.copy())

    def without(self, *rows: int) -> Labels:
        return Labels(*(np.delete(values, rows, 0) for values in (self.image, self.boxes, self.classes)))

    def insert(self, row: int, *, image: int, box: Sequence[float], class_id: int) -> Labels:
        return Labels(
            np.insert(self.image, row, image),
            np.insert(self.boxes, row, box, 0),
            np.insert(self.classes, row, class_id),
        )

    def split(self) -> CheckedSplit:
        offsets = np.searchsorted(self.image, np.arange(IMAGES + 1))
        names = [str(i) for i in range(IMAGES)]
        sizes = np.full((IMAGES, 2), 640)
        index = index_of(
            names=["a", "b"],
            paths=names,
            image_hw=sizes,
            offsets=offsets,
            boxes_xywh_px=xyxy_to_xywh(self.boxes),
            classes=self.classes,
        )
        return CheckedSplit("train", index)


def scene() -> tuple[Labels, DetectionTable]:
    """Objects on a grid, and the detections of a model that finds all of them with some noise."""
    rng = np.random.default_rng(0)
    image = np.repeat(np.arange(IMAGES), OBJECTS)
    column = np.arange(OBJECTS) % 3
    row = np.arange(OBJECTS) // 3
    corner = np.tile(np.stack([column, row], 1), (IMAGES, 1)) * 200 + 20
    boxes = np.concatenate([corner, corner + 100], 1).astype(float)
    classes = rng.integers(0, CLASSES, len(image))
    noisy = boxes + rng.normal(0, 2, boxes.shape)
    table = DetectionTable(image, noisy, rng.uniform(0.7, 0.95, len(image)), classes)
    return Labels(image, boxes, classes.copy()), table


def metrics_of(*ap50: float, ap75: Sequence[float] = ()) -> dict[str, np.ndarray]:
    """Metrics of a model with these AP50 and AP75 of the classes; AP75 is AP50 unless given."""
    return {"AP50": np.array(ap50), "AP75": np.array(ap75 or ap50)}


def errors_in(labels: Labels, table: DetectionTable) -> list[Issue]:
    """Returns the label errors by the detections of a perfect model."""
    return find_label_errors(labels.split(), table, metrics_of(1.0, 1.0))


def only_error(errors: list[Issue]) -> Issue:
    """Returns the one error that is listed by default: all others have low scores."""
    listed = [error for error in errors if error.score >= LISTED_SCORE]
    assert len(listed) == 1, listed
    return listed[0]


def place(error: Issue) -> tuple[str, int]:
    """Returns the image, and the number of the label in it."""
    return error.images[0], error.boxes[0].number


def assert_none_listed(errors: list[Issue]) -> None:
    assert [error for error in errors if error.score >= LISTED_SCORE] == []


def test_correct_labels_have_low_scores():
    """So do labels of a class that the model does not know, and all labels for a model without detections."""
    labels, table = scene()
    for detections in (table, table.take(table.classes == 0), table.take([])):
        assert_none_listed(errors_in(labels, detections))
    unlabeled = labels.without(*range(len(labels.image)))
    assert errors_in(unlabeled, table.take([])) == []


def test_a_missing_label():
    labels, table = scene()
    error = only_error(errors_in(labels.without(17), table))
    assert (error.kind, error.images, error.boxes) == (MISSING_LABEL, ("2",), ())
    assert error.suggestion.class_id == labels.classes[17]
    np.testing.assert_allclose(error.suggestion.xyxy_px, labels.boxes[17], atol=8)


def test_a_swapped_class():
    labels, table = scene()
    swapped = labels.copy()
    swapped.classes[17] = 1 - labels.classes[17]
    error = only_error(errors_in(swapped, table))
    assert (error.kind, place(error), error.suggestion.class_id) == (WRONG_CLASS, ("2", 5), labels.classes[17])


@pytest.mark.parametrize("shift", [(30, 0), (30, 30), (-20, 30)])
def test_a_badly_placed_box(shift):
    labels, table = scene()
    moved = labels.copy()
    moved.boxes[17] += [*shift, *shift]
    error = only_error(errors_in(moved, table))
    assert (error.kind, place(error), error.suggestion.class_id) == (BADLY_PLACED, ("2", 5), labels.classes[17])
    np.testing.assert_allclose(error.suggestion.xyxy_px, labels.boxes[17], atol=8)


def test_a_weak_detection_where_a_label_is_does_not_hide_that_it_is_badly_placed():
    labels, table = scene()
    moved = labels.copy()
    moved.boxes[17] += 30
    weak = DetectionTable(
        np.insert(table.image_index, 18, 2),
        np.insert(table.boxes_xyxy_px, 18, moved.boxes[17], 0),
        np.insert(table.scores, 18, 0.05),
        np.insert(table.classes, 18, moved.classes[17]),
    )
    error = only_error(errors_in(moved, weak))
    assert (error.kind, place(error)) == (BADLY_PLACED, ("2", 5))


def test_a_label_of_nothing():
    labels, table = scene()
    labels = labels.insert(18, image=2, box=[500, 500, 600, 600], class_id=1)
    error = only_error(errors_in(labels, table))
    assert (error.kind, place(error), error.suggestion) == (SPURIOUS, ("2", 6), None)


def test_the_lowest_of_many_faintly_seen_objects_are_not_spurious():
    """They cannot be distinguished from labels where there is no object."""
    labels, table = scene()
    faint = np.arange(len(table.scores)) % 5 == 0
    table.scores[faint] = np.random.default_rng(1).uniform(0.02, 0.25, faint.sum())
    labels = labels.insert(18, image=2, box=[500, 500, 600, 600], class_id=1)
    assert_none_listed(errors_in(labels, table))


def test_a_box_that_half_fits_is_a_less_probable_error():
    labels, table = scene()
    scores = []
    for shift in (20, 30, 45):  # IoU 0.67, 0.54, 0.38
        moved = labels.copy()
        moved.boxes[17] += [shift, 0, shift, 0]
        scores.append(only_error(errors_in(moved, table)).score)
    assert scores == sorted(scores)
    assert scores[0] < 0.9 * scores[2]


def wrong_labels() -> tuple[CheckedSplit, DetectionTable]:
    """Returns the scene with a missing label of each class (objects 17 and 18), and a swapped one (19)."""
    labels, table = scene()
    table.classes[17:19] = [0, 1]
    labels.classes[19] = 1 - labels.classes[19]
    return labels.without(17, 18).split(), table


@pytest.mark.parametrize("ap50", [np.nan, 0.0, MIN_AP - 0.01])
def test_labels_of_classes_that_the_model_hardly_knows_are_not_judged(ap50):
    """A label of another class that looks like one of them is not judged, either."""
    split, table = wrong_labels()
    (error,) = find_label_errors(split, table, metrics_of(ap50, 1.0), LISTED_SCORE)
    assert (error.kind, error.suggestion.class_name) == (MISSING_LABEL, "b")
    for error in find_label_errors(split, table, metrics_of(ap50, 1.0)):
        assert "a" not in [box.class_name for box in (*error.boxes, error.suggestion) if box]


def test_scores_fall_with_the_ap_of_the_class():
    split, table = wrong_labels()

    def scores(ap50: float) -> dict[tuple[str, str], float]:
        errors = find_label_errors(split, table, metrics_of(ap50, 1.0), LISTED_SCORE)
        return {(error.kind, error.suggestion.class_name): error.score for error in errors}

    full = scores(1.0)
    assert [kind for kind, _ in full].count(MISSING_LABEL) == 2
    assert len(full) == 3
    assert scores(GOOD_AP50) == full
    for key, score in scores(0.8 * GOOD_AP50).items():
        assert score == pytest.approx(full[key] * (1 if key == (MISSING_LABEL, "b") else 0.8), abs=1e-4)


@pytest.mark.parametrize("ap75", [np.nan, 0.0, MIN_AP - 0.01])
def test_positions_are_not_judged_by_a_model_that_places_boxes_badly(ap75):
    """AP50 does not show how well boxes are placed: it may be 1."""
    labels, table = scene()
    labels.boxes[17] += 30
    labels.classes[17] = 0
    table.classes[17] = 0
    split = labels.split()
    (error,) = find_label_errors(split, table, metrics_of(1.0, 1.0), LISTED_SCORE)
    (weaker,) = find_label_errors(split, table, metrics_of(1.0, 1.0, ap75=[0.9 * GOOD_AP75, 1.0]), LISTED_SCORE)
    assert error.kind == weaker.kind == BADLY_PLACED
    assert weaker.score == pytest.approx(0.9 * error.score, abs=1e-4)
    assert find_label_errors(split, table, metrics_of(1.0, 1.0, ap75=[ap75, 1.0]), LISTED_SCORE) == []
    result = score_detections(split.index.ground_truth(), table, CLASSES)
    result.class_metrics["AP75"][0] = ap75
    expected = [f"On val it places boxes of a (AP75 {ap75:.2f}) too loosely to judge where labels are."]
    assert trust_lines("It", {"val": result}, ["a", "b"], [])[1:] == ([] if np.isnan(ap75) else expected)


@pytest.mark.parametrize("noise", [2, 4, 6])
@pytest.mark.parametrize(("planted", "max_listed"), [(0, 3), (1, 4), (15, 22)])
def test_few_right_boxes_are_listed_however_few_are_wrong(noise, planted, max_listed):
    """The boxes that fit worst are not wrong for that. Detections have errors with a heavy tail, in pixels of boxes
    with sides of 100, and of 300 labels, some are moved by a quarter of their size."""
    rng = np.random.default_rng(0)
    labels, table = scene()
    table.boxes_xyxy_px[:] = labels.boxes + noise * rng.standard_t(4, labels.boxes.shape)
    wrong = rng.choice(len(labels.image), planted, replace=False)
    labels.boxes[wrong] += rng.choice([-25, 25], (planted, 1))
    errors = errors_in(labels, table)
    listed_places = [place(error) for error in errors if error.kind == BADLY_PLACED and error.score >= LISTED_SCORE]
    assert len(listed_places) <= max_listed
    wrong_places = {(str(labels.image[row]), int(row % OBJECTS)) for row in wrong}
    assert len(wrong_places & {*listed_places}) >= 0.8 * planted


def test_a_repeated_row_is_left_to_the_scan():
    """Its detection belongs to the first of the equal rows; the second is neither spurious nor badly placed."""
    labels, table = scene()
    second = table.take([17])  # which the second row would match
    second.boxes_xyxy_px[:] += [40, 0, 40, 0]
    second.scores[:] = 0.6
    labels = labels.insert(18, image=labels.image[17], box=labels.boxes[17], class_id=labels.classes[17])
    split = labels.split()
    split.index.repeated[18] = True
    errors = find_label_errors(split, DetectionTable.concatenate([table, second]), metrics_of(1.0, 1.0), LISTED_SCORE)
    assert [error for error in errors if error.boxes] == []


def test_lines_state_how_reliable_listed_errors_are():
    split, table = wrong_labels()
    truth = split.index.ground_truth()
    result = score_detections(truth, table, CLASSES)
    issues = find_label_errors(split, table, result.class_metrics, LISTED_SCORE)
    good = trust_lines("best.pt", {"train": result}, split.index.names, issues)
    assert good[0] == f"best.pt has AP {result.ap:.3f} on train."
    assert good[1].startswith("Of 3 listed label errors, about 2 are real if 5% of the labels")
    assert len(good) == 2
    table = table.take(table.classes == 1)
    result = score_detections(truth, table, CLASSES)
    lines = trust_lines("It", {"val": result}, split.index.names, [])
    assert lines[1].startswith("On val it is too weak to judge labels of a (AP50 0.00), or too many of them are wrong")
    assert len(lines) == 2
    labels, _ = scene()
    unlabeled = labels.without(*range(len(labels.image)))
    result = score_detections(unlabeled.split().index.ground_truth(), table, CLASSES)
    assert trust_lines("It", {"val": result}, ["a", "b"], []) == []


def test_crowd_regions_are_not_examined_and_explain_detections():
    labels, table = scene()
    labels.boxes[17] += [-10, -10, 20, 20]
    split = labels.split()
    split.index.crowd[17] = True
    errors = find_label_errors(split, table, metrics_of(1.0, 1.0))
    assert [error for error in errors if error.boxes and place(error) == ("2", 5)] == []
    assert_none_listed(errors)


def test_the_order_of_detections_does_not_matter():
    labels, table = scene()
    order = np.random.default_rng(1).permutation(len(table.scores))
    unlabeled_17 = labels.without(17)
    assert errors_in(unlabeled_17, table.take(order)) == errors_in(unlabeled_17, table)
