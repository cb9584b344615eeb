"""Label errors: each kind is found, named, and ranked before correct labels."""

from __future__ import annotations

import numpy as np
import pytest

from data.check.issues import MISSED, MOVED, SPURIOUS, SWAPPED
from data.check.scanned import scan_dataset
from data.index.dataset_yaml import load_dataset_spec
from engine.inference.predictor import load
from engine.tools.check.label_errors import LabelError, detect_all, find_label_errors, label_issues
from tests.helpers.editable_set import NAMES, EditableSet
from tests.helpers.synthetic_index import index_of
from tests.helpers.tiny import write_weights
from utils.boxes import xyxy_to_xywh
from utils.structures import DetectionTable, GroundTruth

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


def truth_of(image: np.ndarray, boxes: np.ndarray, classes: np.ndarray, images: int = 50) -> GroundTruth:
    offsets = np.searchsorted(image, np.arange(images + 1))
    xywh = xyxy_to_xywh(boxes)
    return GroundTruth(
        offsets, xywh, classes, np.zeros(len(image), bool), xywh[:, 2:].prod(1),
        np.full((images, 2), 640), tuple(range(images)), (0, 1),
    )  # fmt: skip


def first(errors: list[LabelError], clean: float = 0.3) -> LabelError:
    """The first error, if no other has a score above ``clean``."""
    assert all(error.score < clean < errors[0].score for error in errors[1:])
    return errors[0]


def test_correct_labels_have_low_scores():
    image, boxes, classes, table = scene()
    assert max(error.score for error in find_label_errors(truth_of(image, boxes, classes), table, CLASSES)) < 0.3


def test_a_missing_label():
    image, boxes, classes, table = scene()
    keep = np.arange(len(image)) != 17
    errors = find_label_errors(truth_of(image[keep], boxes[keep], classes[keep]), table, CLASSES)
    error = first(errors)
    assert (error.kind, error.image, error.row, error.class_id) == (MISSED, 17 // 6, -1, classes[17])
    np.testing.assert_allclose(error.box_xyxy_px, boxes[17], atol=8)


def test_a_swapped_class():
    image, boxes, classes, table = scene()
    labeled = classes.copy()
    labeled[17] = 1 - labeled[17]
    error = first(find_label_errors(truth_of(image, boxes, labeled), table, CLASSES))
    assert (error.kind, error.row, error.class_id) == (SWAPPED, 17, classes[17])


@pytest.mark.parametrize("shift", [(30, 0), (30, 30), (-20, 30)])
def test_a_badly_placed_box(shift):
    image, boxes, classes, table = scene()
    moved = boxes.copy()
    moved[17] += [*shift, *shift]
    error = first(find_label_errors(truth_of(image, moved, classes), table, CLASSES))
    assert (error.kind, error.row, error.class_id) == (MOVED, 17, classes[17])
    np.testing.assert_allclose(error.box_xyxy_px, boxes[17], atol=8)


def test_a_label_of_nothing():
    image, boxes, classes, table = scene()
    image = np.insert(image, 18, 2)
    boxes = np.insert(boxes, 18, [500, 500, 600, 600], 0)
    classes = np.insert(classes, 18, 1)
    error = first(find_label_errors(truth_of(image, boxes, classes), table, CLASSES))
    assert (error.kind, error.image, error.row) == (SPURIOUS, 2, 18)


def test_objects_of_a_class_that_the_model_does_not_know_are_not_spurious():
    image, boxes, classes, table = scene()
    known = table.classes == 0
    table = DetectionTable(*(getattr(table, f)[known] for f in ("image_index", "boxes_xyxy_px", "scores", "classes")))
    errors = find_label_errors(truth_of(image, boxes, classes), table, CLASSES)
    assert max(error.score for error in errors) < 0.3


def test_no_detections_and_no_labels():
    image, boxes, classes, _ = scene()
    empty = DetectionTable(np.zeros(0, np.int64), np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    errors = find_label_errors(truth_of(image, boxes, classes), empty, CLASSES)
    assert max(error.score for error in errors) < 0.3
    none = np.zeros(0, np.int64)
    assert find_label_errors(truth_of(none, np.zeros((0, 4)), none), empty, CLASSES) == []


def test_crowd_regions_are_not_examined_and_explain_detections():
    image, boxes, classes, table = scene()
    truth = truth_of(image, boxes, classes)
    truth.crowd[17] = True
    truth.boxes_xywh_px[17] += [-10, -10, 30, 30]
    errors = find_label_errors(truth, table, CLASSES)
    assert all(error.row != 17 for error in errors)
    assert max(error.score for error in errors) < 0.3


def test_all_images_are_detected_in_order(tmp_path):
    import cv2

    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(19)]
    for path in paths:
        cv2.imwrite(str(path), rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    index = index_of(["a", "b"], paths, np.full((19, 2), 64), np.zeros(20), np.zeros((0, 4)), np.zeros(0))
    predictor = load(write_weights(tmp_path / "w.pt", ["a", "b"]), device="cpu", conf=0.0, max_det=5)
    table = detect_all(predictor, index)
    assert table.image_index.tolist() == np.repeat(np.arange(19), 5).tolist()
    single = predictor(str(paths[18]))[0].boxes
    np.testing.assert_allclose(table.scores[-5:], single.conf.numpy(), rtol=1e-6)


def test_an_image_may_have_more_labels_than_a_predictor_returns(tmp_path):
    """Of 400 labels, those that no detection was left for would be called spurious."""
    data = EditableSet(tmp_path / "set")
    grid = (np.indices((20, 20)).reshape(2, -1).T + 0.5) / 20
    data.write("train/2", "".join(f"0 {x:.4f} {y:.4f} 0.04 0.04\n" for x, y in grid))
    predictor = load(write_weights(tmp_path / "w.pt", NAMES), device="cpu", imgsz=640, conf=0.0, iou=1.0)
    splits = scan_dataset(load_dataset_spec(data.yaml), ("train",), workers=0, verify="sample")
    _, tables = label_issues(predictor, splits, 0.3)
    assert np.bincount(tables["train"].image_index, minlength=4)[2] > 400
