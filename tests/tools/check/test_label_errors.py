"""What a model is asked for label errors: all detections, enough of them."""

from __future__ import annotations

import numpy as np

from data.check.scanned import scan_dataset
from data.spec.dataset_yaml import load_dataset_spec
from engine.inference.predictor import load
from tests.helpers.editable_set import NAMES, EditableSet
from tests.helpers.synthetic_index import index_of
from tests.helpers.tiny import write_weights
from tools.check.label_errors import detect_all, label_issues


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
    splits = scan_dataset(load_dataset_spec(data.yaml), ("train",), workers=0)
    _, tables, results = label_issues(predictor, splits, 0.3)
    assert results["train"].num_images == 4
    assert np.bincount(tables["train"].image_index, minlength=4)[2] > 400
