"""Label errors: each kind is found, named, and ranked before correct labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.evaluation.metrics import score_detections
from engine.issues.issue import BADLY_PLACED, MISSING_LABEL, SPURIOUS, WRONG_CLASS, CheckedSplit, Issue
from engine.issues.label_errors import GOOD_AP50, GOOD_AP75, MIN_AP, find_label_errors, trust_lines
from tests.helpers.synthetic_index import index_of
from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable

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
    image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, table: DetectionTable, crowd=(), ap50=(1.0, 1.0)
) -> list[Issue]:
    """Returns the label errors of 50 images named 0, 1, ... with these labels, by a model with this AP50 and AP75."""
    return find_label_errors(split_of(image, boxes, classes, crowd), table, metrics_of(*ap50))


def metrics_of(*ap50: float, ap75: Sequence[float] = ()) -> dict[str, np.ndarray]:
    return {"AP50": np.array(ap50), "AP75": np.array(ap75 or ap50)}


def split_of(image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, crowd=()) -> CheckedSplit:
    offsets = np.searchsorted(image, np.arange(51))
    names = [str(i) for i in range(50)]
    index = index_of(["a", "b"], names, np.full((50, 2), 640), offsets, xyxy_to_xywh(boxes), classes)
    index.crowd[list(crowd)] = True
    return CheckedSplit("train", index)


def first(errors: list[Issue], clean: float = 0.3) -> Issue:
    """The first error, if no other has a score above ``clean``."""
    assert all(error.score < clean < errors[0].score for error in errors[1:])
    return errors[0]


def place(error: Issue) -> tuple[str, int]:
    """The image and the number of the label in it."""
    return error.images[0], error.boxes[0].number


def assert_no_error(*labels_and_detections, **options) -> None:
    assert max(error.score for error in errors_in(*labels_and_detections, **options)) < 0.3


def test_correct_labels_have_low_scores():
    """So do labels of a class that the model does not know, and all labels for a model without detections."""
    image, boxes, classes, table = scene()
    for found in (table, table.take(table.classes == 0), table.take([])):
        assert_no_error(image, boxes, classes, found)
    none = np.zeros(0, np.int64)
    assert errors_in(none, np.zeros((0, 4)), none, table.take([])) == []


def test_a_missing_label():
    image, boxes, classes, table = scene()
    keep = np.arange(len(image)) != 17
    errors = errors_in(image[keep], boxes[keep], classes[keep], table)
    error = first(errors)
    assert (error.kind, error.images, error.boxes, error.suggestion.class_id) == (
        MISSING_LABEL,
        ("2",),
        (),
        classes[17],
    )
    np.testing.assert_allclose(error.suggestion.xyxy_px, boxes[17], atol=8)


def test_a_swapped_class():
    image, boxes, classes, table = scene()
    labeled = classes.copy()
    labeled[17] = 1 - labeled[17]
    error = first(errors_in(image, boxes, labeled, table))
    assert (error.kind, *place(error), error.suggestion.class_id) == (WRONG_CLASS, "2", 5, classes[17])


@pytest.mark.parametrize("shift", [(30, 0), (30, 30), (-20, 30)])
def test_a_badly_placed_box(shift):
    image, boxes, classes, table = scene()
    moved = boxes.copy()
    moved[17] += [*shift, *shift]
    error = first(errors_in(image, moved, classes, table))
    assert (error.kind, *place(error), error.suggestion.class_id) == (BADLY_PLACED, "2", 5, classes[17])
    np.testing.assert_allclose(error.suggestion.xyxy_px, boxes[17], atol=8)


def test_a_label_of_nothing():
    image, boxes, classes, table = scene()
    image = np.insert(image, 18, 2)
    boxes = np.insert(boxes, 18, [500, 500, 600, 600], 0)
    classes = np.insert(classes, 18, 1)
    error = first(errors_in(image, boxes, classes, table))
    assert (error.kind, *place(error), error.suggestion) == (SPURIOUS, "2", 6, None)


def test_the_lowest_of_many_faintly_seen_objects_are_not_spurious():
    """They cannot be distinguished from labels where there is no object."""
    image, boxes, classes, table = scene()
    faint = np.arange(len(image)) % 5 == 0
    table.scores[faint] = np.random.default_rng(1).uniform(0.02, 0.25, faint.sum())
    image = np.insert(image, 18, 2)
    classes = np.insert(classes, 18, 1)
    boxes = np.insert(boxes, 18, [500, 500, 600, 600], 0)
    assert_no_error(image, boxes, classes, table)


def test_a_box_that_half_fits_is_a_less_probable_error():
    image, boxes, classes, table = scene()
    scores = []
    for shift in (20, 30, 45):  # IoU 0.67, 0.54, 0.38
        moved = boxes.copy()
        moved[17] += [shift, 0, shift, 0]
        scores.append(first(errors_in(image, moved, classes, table)).score)
    assert scores == sorted(scores)
    assert scores[0] < 0.9 * scores[2]


def wrong_labels() -> tuple[CheckedSplit, DetectionTable]:
    """A label of each class is missing (objects 17 and 18), and one is swapped (19)."""
    image, boxes, classes, table = scene()
    classes[17:19] = table.classes[17:19] = 0, 1
    labeled = classes.copy()
    labeled[19] = 1 - labeled[19]
    keep = ~np.isin(np.arange(len(image)), (17, 18))
    return split_of(image[keep], boxes[keep], labeled[keep]), table


@pytest.mark.parametrize("ap50", [np.nan, 0.0, MIN_AP - 0.01])
def test_labels_of_classes_that_the_model_hardly_knows_are_not_judged(ap50):
    """A label of another class that looks like one of them is not judged, either."""
    split, table = wrong_labels()
    (error,) = find_label_errors(split, table, metrics_of(ap50, 1.0), 0.3)
    assert (error.kind, error.suggestion.class_name) == (MISSING_LABEL, "b")
    for error in find_label_errors(split, table, metrics_of(ap50, 1.0)):
        assert "a" not in [box.class_name for box in (*error.boxes, error.suggestion) if box]


def test_scores_fall_with_the_ap_of_the_class():
    split, table = wrong_labels()

    def scores(ap50: float) -> dict[tuple[str, str], float]:
        errors = find_label_errors(split, table, metrics_of(ap50, 1.0), 0.3)
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
    image, boxes, classes, table = scene()
    moved = boxes.copy()
    moved[17] += 30
    classes[17] = table.classes[17] = 0
    split = split_of(image, moved, classes)
    (error,) = find_label_errors(split, table, metrics_of(1.0, 1.0), 0.3)
    (weaker,) = find_label_errors(split, table, metrics_of(1.0, 1.0, ap75=[0.9 * GOOD_AP75, 1.0]), 0.3)
    assert error.kind == weaker.kind == BADLY_PLACED
    assert weaker.score == pytest.approx(0.9 * error.score, abs=1e-4)
    assert find_label_errors(split, table, metrics_of(1.0, 1.0, ap75=[ap75, 1.0]), 0.3) == []
    result = score_detections(split.index.ground_truth(), table, CLASSES)
    result.class_metrics["AP75"][0] = ap75
    (_, *said) = trust_lines("It", {"val": result}, ["a", "b"], [])
    assert said == (
        []
        if np.isnan(ap75)
        else [f"On val it places boxes of a (AP75 {ap75:.2f}) too loosely to judge where labels are."]
    )


@pytest.mark.parametrize("noise", [2, 4, 6])
@pytest.mark.parametrize(("planted", "listed"), [(0, 3), (1, 4), (15, 22)])
def test_few_right_boxes_are_listed_however_few_are_wrong(noise, planted, listed):
    """The boxes that fit worst are not wrong for that. Detections have errors with a heavy tail, in pixels of boxes
    with sides of 100, and of 300 labels, some are moved by a quarter of their size."""
    rng = np.random.default_rng(0)
    image, boxes, classes, table = scene()
    table.boxes_xyxy_px[:] = boxes + noise * rng.standard_t(4, boxes.shape)
    wrong = rng.choice(len(image), planted, replace=False)
    moved = boxes.copy()
    moved[wrong] += rng.choice([-25, 25], (planted, 1))
    errors = errors_in(image, moved, classes, table)
    found = [place(error) for error in errors if error.kind == BADLY_PLACED and error.score >= 0.3]
    assert len(found) <= listed
    places = {(str(image[row]), int(row % 6)) for row in wrong}
    assert len(places & {*found}) >= 0.8 * planted


def test_a_repeated_row_is_left_to_the_scan():
    """Its detection belongs to the first of the equal rows; the second is neither spurious nor badly placed."""
    image, boxes, classes, table = scene()
    image = np.insert(image, 18, image[17])
    classes = np.insert(classes, 18, classes[17])
    boxes = np.insert(boxes, 18, boxes[17], 0)
    near = table.boxes_xyxy_px[17] + [40, 0, 40, 0]  # which the second row would match
    table = DetectionTable.concatenate(
        [table, DetectionTable(image[17:18], near[None], np.array([0.6]), classes[17:18])]
    )
    split = split_of(image, boxes, classes)
    split.index.repeated[18] = True
    assert [e for e in find_label_errors(split, table, metrics_of(1.0, 1.0), 0.3) if e.boxes] == []


def test_lines_state_how_reliable_listed_errors_are():
    split, table = wrong_labels()
    truth = split.index.ground_truth()
    result = score_detections(truth, table, CLASSES)
    issues = find_label_errors(split, table, result.class_metrics, 0.3)
    good = trust_lines("best.pt", {"train": result}, split.index.names, issues)
    assert good[0] == f"best.pt has AP {result.ap:.3f} on train."
    assert good[1].startswith("Of 3 listed label errors, about 2 are real if 5% of the labels")
    assert len(good) == 2
    table = table.take(table.classes == 1)
    result = score_detections(truth, table, CLASSES)
    lines = trust_lines("It", {"val": result}, split.index.names, [])
    assert lines[1].startswith("On val it is too weak to judge labels of a (AP50 0.00), or too many of them are wrong")
    assert len(lines) == 2
    empty = split_of(*(array[:0] for array in scene()[:3]))
    result = score_detections(empty.index.ground_truth(), table, CLASSES)
    assert trust_lines("It", {"val": result}, ["a", "b"], []) == []


def test_crowd_regions_are_not_examined_and_explain_detections():
    image, boxes, classes, table = scene()
    boxes[17] += [-10, -10, 20, 20]
    errors = errors_in(image, boxes, classes, table, crowd=[17])
    assert all(error.images != ("2",) or place(error)[1] != 5 for error in errors)
    assert max(error.score for error in errors) < 0.3


def test_the_order_of_detections_does_not_matter():
    image, boxes, classes, table = scene()
    order = np.random.default_rng(1).permutation(len(table.scores))
    keep = np.arange(len(image)) != 17
    labels = image[keep], boxes[keep], classes[keep]
    assert errors_in(*labels, table.take(order)) == errors_in(*labels, table)
