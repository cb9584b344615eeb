"""The ids in predictions.json."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

import val
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from engine.evaluation.coco_classes import COCO_IDS
from engine.evaluation.tables import write_predictions
from models.detector import build_detector
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table
from tests.helpers.scripts import call
from tests.helpers.tiny import TINY_MODEL, write_detector
from tests.scripts.val.validation import flags, read, render_set
from utils.program_folders import CONFIGS


def test_predictions_keep_the_ids_of_the_ground_truth(tmp_path):
    none = np.zeros(0, int)
    gt = make_ground_truth(none, classes=none, area=none, image=none, num_images=2, num_classes=2, ids=(42, 'na"me'))
    gt = replace(gt, category_ids=(7, 90))
    table = make_table(image=[0, 1], boxes=[[1.00004, 2, 4, 8], [0, 0, 5, 5.5]], scores=[0.1234567, 1], classes=[1, 0])
    write_predictions(tmp_path / "predictions.json", table, gt)
    assert read(tmp_path) == [
        {"image_id": 42, "category_id": 90, "bbox": [1.00004, 2.0, 2.99996, 6.0], "score": 0.1234567},
        {"image_id": 'na"me', "category_id": 7, "bbox": [0.0, 0.0, 5.0, 5.5], "score": 1.0},
    ]
    write_predictions(tmp_path / "predictions.json", make_table(), gt)
    assert read(tmp_path) == []


@pytest.mark.parametrize("is_coco", [True, False])
def test_predictions_have_cocos_category_ids_if_yolo_labels_are_of_its_classes(tmp_path, is_coco, capsys):
    """pycocotools then finds val.py's AP with COCO's annotations."""
    names = list(load_dataset_spec(CONFIGS / "data" / "coco.yaml").names)
    names = names if is_coco else [f"class {number}" for number in range(80)]
    yolo = render_set(tmp_path / "set")
    yolo.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": names}))
    model = build_detector(TINY_MODEL, 80, names=names, seed=1)
    weights = write_detector(tmp_path / "best.pt", model, data={"source": str(yolo)})
    call(val.main, *flags((yolo, weights), tmp_path, "--noplots", "--conf-thres", "0"))
    published = COCO_IDS if is_coco else range(80)
    found = {row["category_id"] for row in read(tmp_path / "runs/exp")}
    assert len(found) > 10
    assert found <= set(published)
    index = load_index(load_dataset_spec(yolo), "val", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False))
    gt = replace(index.ground_truth(), category_ids=tuple(published))
    stats, _ = coco_evaluate(gt, tmp_path / "runs/exp/predictions.json")
    assert read(tmp_path / "runs/exp", "results")["ap"] == pytest.approx(stats[0], abs=1e-6)
    line = "predictions.json has COCO's category ids, because the classes are COCO's"
    assert (line in capsys.readouterr().out) == is_coco
