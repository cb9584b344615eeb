"""val.py: its scores are pycocotools', on any number of processes; its files; the classes and images of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

import export
import train
import val
from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from data.spec import SINGLE_CLASS_NAME
from engine.evaluation.coco_classes import COCO_IDS
from models.detector import build_detector
from tests.helpers.exports import calibrated_detector
from tests.helpers.processes import Processes
from tests.helpers.same_content import read_csv
from tests.helpers.scoring import coco_evaluate
from tests.helpers.scripts import PLAIN, call, run_python, training, write_inputs
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_detector, write_model
from utils.files.torch_file import read_checkpoint
from utils.labels import GroundTruth
from utils.program_folders import CONFIGS

NAMES = ("light", "dark")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set", train=8, val=7)


def flags(weights: Path, tmp_path: Path, *more: object) -> list[object]:
    common = ["--weights", weights, "--device", "cpu", "--batch-size", 2, "--workers", 0]
    return [*common, "--project", tmp_path / "runs", "--cache-dir", tmp_path / "cache", *more]


def read(folder: Path, name: str = "predictions") -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def labels_of(data: Path, cache: Path) -> GroundTruth:
    settings = IndexSettings(cache_dir=str(cache), progress=False)
    return load_index(load_dataset_spec(data), "val", settings).ground_truth()


@pytest.mark.parametrize("is_coco", [True, False])
def test_the_scores_are_pycocotools_and_all_files_are_written(data, tmp_path, capsys, is_coco):
    """If the classes are COCO's, predictions.json has its category ids, as COCO's annotations have."""
    names = list(load_dataset_spec(CONFIGS / "data" / "coco.yaml").names)
    names = names if is_coco else [f"class {number}" for number in range(80)]
    data.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": names}))
    detector = build_detector(TINY_MODEL, 80, names=names, seed=1)
    weights = write_detector(tmp_path / "best.pt", detector, data={"source": str(data)})
    call(val.main, *flags(weights, tmp_path, "--conf-thres", 0))
    folder = tmp_path / "runs" / "exp"
    results = read(folder, "results")
    assert results["images"] == 7
    labels = labels_of(data, tmp_path / "cache")
    instances = {row["class"]: row["instances"] for row in results["classes"]}
    assert [instances[name] for name in names[:2]] == np.bincount(labels.classes).tolist()
    published = COCO_IDS if is_coco else range(80)
    found = {row["category_id"] for row in read(folder)}
    assert len(found) > 10
    assert found <= {*published}
    stats, _ = coco_evaluate(replace(labels, category_ids=tuple(published)), folder / "predictions.json")
    assert [results[name] for name in ("ap", "ap50", "ap75")] == pytest.approx(stats[:3], abs=1e-6)
    rows = read_csv(folder / "classes.csv")
    assert [row["class"] for row in rows[:3]] == ["all", *names[:2]]
    assert float(rows[0]["AP"]) == results["ap"]
    assert len(read_csv(folder / "sizes.csv")) == len(results["sizes"]["rows"]) > 4
    figures = [f"{name}.png" for name in ("PR_curve", "F1_curve", "P_curve", "R_curve", "confusion_matrix", "errors")]
    assert all(cv2.imread(str(folder / name)) is not None for name in (*figures, "predictions.jpg"))
    line = "predictions.json has COCO's category ids, because the classes are COCO's"
    assert (line in capsys.readouterr().out) == is_coco


@pytest.mark.parametrize("more", [[], pytest.param(["--tta", "--conf-thres", "0.0001"], marks=pytest.mark.slow)])
def test_results_are_equal_on_one_and_two_processes(data, tmp_path, more):
    detector = calibrated_detector(TINY_MODEL, NAMES)
    weights = write_detector(tmp_path / "best.pt", detector, data={"source": str(data)})
    call(val.main, *flags(weights, tmp_path, "--name", "1", *more))
    ended = run_python("val.py", *flags(weights, tmp_path, "--name", "2", *more), torchrun=2)
    assert ended.stdout.count("AP by size") == 1
    one, two = (tmp_path / "runs" / name for name in "12")
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
    results = [read(folder, "results") for folder in (one, two)]
    for lasting in results:  # without times, the machine and the command
        del lasting["extras"], lasting["settings"]
    assert results[0] == results[1]
    for name in ("predictions.json", "classes.csv", "sizes.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_some_classes_are_scored_as_among_all(data, tmp_path):
    """Also by a data set of some of the model's classes, in its own order: ultralytics#20786."""
    weights = write_detector(tmp_path / "lively.pt", calibrated_detector(TINY_MODEL, NAMES))

    def scored(name: str, *chosen: str) -> tuple[dict[str, list[str]], list[dict]]:
        more = ["--data", data, "--max-det", 5000, "--imgsz", 256, "--name", name, "--noplots", *chosen]
        call(val.main, *flags(weights, tmp_path, *more))
        folder = tmp_path / "runs" / name
        rows = read_csv(folder / "classes.csv")
        return {row["class"]: [row[name] for name in ("AP", "AP50", "AP75")] for row in rows}, read(folder)

    rows, found = scored("all")
    assert len({row["category_id"] for row in found}) == 2
    some_rows, some_found = scored("some", "--classes", "dark")
    assert list(some_rows) == ["all", "dark"]
    assert some_rows["dark"] == rows["dark"]
    assert some_found == [row for row in found if row["category_id"] == 1]
    data.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": ["dark"]}))
    for labels in (data.parent / "labels/val").glob("*.txt"):
        boxes = [row.split(" ", 1)[1] for row in labels.read_text().splitlines() if row.startswith("1 ")]
        labels.write_text("".join(f"0 {box}\n" for box in boxes))
    own_rows, own_found = scored("own", "--classes", "dark")
    assert own_rows["dark"] == rows["dark"]
    assert [row | {"category_id": 1} for row in own_found] == some_found


@pytest.mark.parametrize(("more", "names"), [(["--classes", "1"], ["dark"]), (["--single-cls"], [SINGLE_CLASS_NAME])])
def test_a_run_of_some_or_merged_classes_is_scored_on_them_without_a_flag(data, tmp_path, more, names):
    """This also holds after resuming, and for an exported file."""
    write_model(tmp_path / "tiny.yaml")
    call(train.main, *training(tmp_path, tmp_path / "runs", "--epochs", 1, *more))
    last, best = (tmp_path / "runs" / "exp" / name for name in ("last.pt", "best.pt"))
    call(train.main, "--resume", last, "--epochs", 2)
    call(export.main, "--weights", best, "--format", "torchscript", "--no-check")
    for weights in (best, best.with_suffix(".torchscript")):
        given = flags(weights, tmp_path, "--trust", "--noplots", "--project", tmp_path / "val", "--exist-ok")
        call(val.main, *given)
        assert [row["class"] for row in read(tmp_path / "val" / "exp", "results")["classes"]] == names


def test_val_fraction_holds_out_the_same_images_everywhere(tmp_path):
    """With another seed, on two processes and staged; when the run resumes with more images; in val.py, also of an
    exported file."""
    root = tmp_path / "set"
    runs = tmp_path / "runs"
    write_inputs(tmp_path, train=12, val=1)
    (root / "data.yaml").write_text(yaml.safe_dump({"train": "images/train", "names": ["light", "dark"]}))
    command = training(tmp_path, runs, "--epochs", 1, "--val-fraction", 0.25)
    call(train.main, *command, "--name", "one")
    with Processes(tmp_path / "log.txt") as two:
        two.ranks(2, *command, "--name", "two", "--seed", "4", "--stage", str(tmp_path / "stage"))
        assert two.codes() == [0, 0], two.output()
    last, best = (runs / "one" / name for name in ("last.pt", "best.pt"))
    one, two = (read_checkpoint(runs / name / "last.pt") for name in ("one", "two"))
    assert one["val_images"] == two["val_images"] == read_checkpoint(best)["val_images"]
    assert len(one["val_images"]) == 3
    assert one["identity"] == two["identity"]
    for i in range(20, 29):
        for folder, suffix in (("images", ".png"), ("labels", ".txt")):
            name = (root / folder / "train" / "000").with_suffix(suffix)
            name.with_name(f"{i:03}{suffix}").write_bytes(name.read_bytes())
    call(train.main, "--resume", last, "--epochs", 2)
    assert read_checkpoint(last)["val_images"] == one["val_images"]
    call(export.main, "--weights", best, "--format", "torchscript", "--no-check")
    stems = {int(Path(name).stem) for name in one["val_images"]}
    for weights in (best, best.with_suffix(".torchscript")):
        more = ["--trust", "--noplots", "--project", tmp_path / "val", "--exist-ok"]
        call(val.main, *flags(weights, tmp_path, "--save-json", "--conf-thres", 0, *more))
        assert read(tmp_path / "val" / "exp", "results")["images"] == 3
        assert {row["image_id"] for row in read(tmp_path / "val" / "exp")} == stems


@pytest.mark.slow
def test_training_in_bfloat16_validates_in_float32_as_val_py_does(tmp_path):
    write_inputs(tmp_path, train=40, val=40)  # enough for the type to change the AP
    more = ["--batch-size", 8, "--epochs", 60, "--val-every", 0, "--amp", "bf16", "--set", "close_mosaic=20"]
    call(train.main, *training(tmp_path, tmp_path / "runs", *more))
    run = tmp_path / "runs" / "exp"
    trained = read_checkpoint(run / "last.pt")["progress"]["best_fitness"]
    scored = {}
    for amp in ("bf16", "off"):
        call(val.main, "--weights", run / "best.pt", *PLAIN, "--amp", amp, "--project", tmp_path, "--name", amp)
        scored[amp] = read(tmp_path / amp, "results")["ap"]
    assert trained > 0.3
    assert scored["off"] == pytest.approx(trained, abs=1e-5)
    assert scored["bf16"] != pytest.approx(trained, abs=1e-5)
