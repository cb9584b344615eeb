"""Label errors are judged by the detections that val.py scores, and by enough of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import val
from data.dataset.yaml_file import load_dataset_spec
from engine.inference.open_model import open_weights
from tests.helpers.editable_set import NAMES, EditableSet
from tests.helpers.scripts import call
from tests.helpers.tiny import write_weights
from tools.check.label_errors import examine_labels
from tools.check.scan import scan_splits
from utils.config.settings import ValConfig


def test_the_scores_are_those_of_val_py_also_of_an_image_with_more_labels_than_detections(tmp_path):
    """Labels for which no detection was left, out of 400, would be called spurious."""
    data = EditableSet(tmp_path / "set")
    grid = (np.indices((20, 20)).reshape(2, -1).T + 0.5) / 20
    data.write("train/2", "".join(f"0 {x:.4f} {y:.4f} 0.04 0.04\n" for x, y in grid))
    weights = write_weights(tmp_path / "w.pt", NAMES)
    spec = load_dataset_spec(data.yaml)
    splits, _ = scan_splits(spec, [], workers=0)
    config = ValConfig(weights=str(weights), imgsz=640, conf_thres=0.0, iou_thres=1.0, workers=0)
    errors = examine_labels(config, open_weights(weights, device="cpu"), spec, splits, min_score=0.3)
    for split, result in errors.results.items():
        more = ["--conf-thres", "0", "--iou-thres", "1", "--noplots", "--no-save-json", "--name", split]
        call(
            val.main, "--weights", weights, "--data", data.yaml, "--task", split, "--imgsz", "640", "--workers", "0",
            "--device", "cpu", "--project", tmp_path / "val", "--cache-dir", tmp_path, *more,
        )  # fmt: skip
        scores = json.loads((tmp_path / "val" / split / "results.json").read_text())
        assert scores["images"] == result.num_images
        for name, value in result.metrics.items():
            stored = np.nan if scores[name.lower()] is None else scores[name.lower()]
            assert stored == pytest.approx(value, abs=1e-12, nan_ok=True), (split, name)
        assert np.bincount(errors.detections[split].table.image_index).max() == 300
