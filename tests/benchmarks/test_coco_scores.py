"""Files of detections have the AP that this program computes, whichever side has written them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.coco_scores import average_precision, read_detections
from engine.evaluation.metrics import score_detections
from engine.evaluation.tables import write_predictions
from tests.helpers.scoring import random_case

pytestmark = pytest.mark.benchmarks


def as_the_peer(rows: list[dict]) -> list[dict]:
    """Returns rows with classes from 1 and with file names."""
    return [row | {"category_id": row["category_id"] + 1, "file_name": f"{row['image_id']}.jpg"} for row in rows]


@pytest.mark.parametrize("side", ["ours", "peer"])
def test_the_detections_of_either_side_are_scored(tmp_path: Path, side: str):
    gt, table, classes = random_case(0)
    gt = replace(gt, category_ids=tuple(range(classes)))
    path = tmp_path / "predictions.json"
    write_predictions(path, table, gt)
    if side == "peer":
        path.write_text(json.dumps(as_the_peer(json.loads(path.read_text()))))
    expected = score_detections(gt, table, classes).result.ap
    names = [f"class {number}" for number in range(classes)]
    assert average_precision(path, gt, names) == pytest.approx(expected, abs=1e-9)
    read = read_detections(path, gt, names)
    assert score_detections(gt, read, classes).result.ap == pytest.approx(expected, abs=1e-9)
