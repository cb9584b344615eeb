"""train.py, val.py and detect.py with a model of two heads, which needs no NMS."""

from __future__ import annotations

import json

import detect
import train
import val
from models.weights.load import load_detector
from tests.helpers.scripts import PLAIN, SMALL, call
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model
from utils.files.torch_file import read_checkpoint


def test_train_val_and_detect_work_with_two_heads(tmp_path, capsys) -> None:
    data = write_dataset(tmp_path / "set")
    model = write_model(tmp_path / "pair.yaml", TINY_MODEL | {"end2end": True, "reg_max": 1})
    folder = tmp_path / "exp"
    given = ["--data", data, "--model", model, "--epochs", "2", *SMALL, "--project", tmp_path]
    call(train.main, *given, "--cache-dir", tmp_path / "cache")
    header = (folder / "results.csv").read_text().splitlines()[0]
    assert all(f"{where}/{name}" in header for where in ("train", "val") for name in ("l1", "box_one", "cls_one"))
    assert read_checkpoint(folder / "last.pt")["model_spec"]["end2end"] is True
    assert load_detector(folder / "last.pt")[0].head.is_dual
    common = ["--weights", folder / "last.pt", "--device", "cpu", "--project", tmp_path]
    source = ["--source", data.parent / "images" / "val", "--conf-thres", "0.001", "--nosave", "--save-json"]

    def rows_of(name: str, *more: str) -> list:
        script, given = (
            (detect.main, source) if name.startswith("detect") else (val.main, [*PLAIN, "--cache-dir", tmp_path])
        )
        call(script, *common, *given, "--name", name, *more)
        return json.loads((tmp_path / name / "predictions.json").read_text())

    for prefix in ("", "detect_"):
        one = rows_of(f"{prefix}one")
        many = rows_of(f"{prefix}many", "--nms")
        both = rows_of(f"{prefix}both", "--iou-thres", "0.3", "--no-box-voting")
        assert one
        assert one != many
        assert len(both) < len(one), "a threshold that is given is used"
        assert {str(d) for d in both} < {str(d) for d in one}
    assert "does nothing" not in capsys.readouterr().out
    for name in ("idle", "detect_idle"):
        rows_of(name, "--no-box-voting")
    line = "last.pt: --no-box-voting does nothing: its detections need no NMS"
    assert capsys.readouterr().out.count(line) == 2
    assert len(rows_of("detect_agnostic", "--agnostic-nms")) < len(one)
