"""The common parts of the benchmarks: alternation, tables, the log, and the model of scaling."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from benchmarks import report, turns
from benchmarks.coco_scores import average_precision
from benchmarks.dataset_copy import copied
from benchmarks.export_formats import cell
from benchmarks.loader import differences
from benchmarks.metrics import make_scene
from benchmarks.pictures import describe, rate_of
from benchmarks.report import Comparison
from benchmarks.scaling import ring_seconds, step_seconds
from benchmarks.tiles import write_mosaics
from data.index.dataset_yaml import load_dataset_spec
from data.index.files import list_split
from data.index.index import load_index
from engine.evaluation.metrics import score_detections
from engine.export.parity import Parity
from tests.helpers.tiny import write_dataset
from utils.drawing.detection_writer import write_predictions

SIDE = """
import sys
sys.path.insert(0, {folder!r})
from turns import take_turns
turn = iter(range(9))
print("noise", flush=True)
take_turns(lambda: {{"turn": next(turn), "name": {name!r}}})
"""


def command(name: str) -> list[str]:
    return [sys.executable, "-c", SIDE.format(folder=str(turns.ROOT / "benchmarks"), name=name)]


def test_help_names_the_command():
    """Those that run in the environment of a peer are started by their file."""
    for path in (turns.ROOT / "benchmarks").rglob("*.py"):
        module = ".".join(path.relative_to(turns.ROOT).with_suffix("").parts).removesuffix(".__main__")
        expected = "" if path.stem in ("peer_checkpoints", "ultralytics_side") else f'"python -m {module}"'
        assert set(re.findall(r"ArgumentParser\((\"[^\"]*\")?[,)d]", path.read_text())) <= {expected}, path


def test_both_sides_alternate():
    results = turns.alternate({"a": command("a"), "b": command("b")}, rounds=3)
    assert results == {name: [{"turn": turn, "name": name} for turn in range(3)] for name in "ab"}


def test_the_output_of_a_failing_side_is_quoted():
    with pytest.raises(SystemExit, match=r"without a result(.|\n)*ZeroDivisionError"):
        turns.run_in_turns({"a": [sys.executable, "-c", "1 / 0"]}, 1)


@pytest.mark.parametrize(("higher", "advantage"), [(True, 0.5), (False, 2.0)])
def test_the_ratio_is_of_medians_and_in_the_right_direction(higher, advantage):
    row = Comparison("x", "s", [9, 1, 2], [4, 400, 0.1], higher_is_better=higher, goal=1.0)
    assert row.advantage == advantage
    assert row.cells()[-1] == ("1, short" if higher else "1, met")
    assert Comparison("x", "s", [1.0]).advantage is None


def test_a_table_is_printed_and_logged(tmp_path):
    rows = [Comparison("step", "s", [0.2], [0.4]), Comparison("rate", "images/s", [100.0, 300.0])]
    lines = report.table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "2.00" in lines[2]
    log = tmp_path / "README.md"
    log.write_text("# Log\n")
    report.append_log("word " * 60, log)
    written = log.read_text().splitlines()
    assert written[1].startswith("- 20")
    assert all(len(line) <= report.WIDTH for line in written)
    assert all(line.startswith("  ") for line in written[2:])


def test_a_copy_repeats_every_training_image(tmp_path):
    original = write_dataset(tmp_path / "set", train=4, val=3)
    with copied(str(original), times=3) as data:
        spec = load_dataset_spec(data)
        train, val = (list_split(spec, split) for split in ("train", "val"))
        assert (len(train.images), len(val.images)) == (12, 3)
        assert all(label.stamp is not None for label in train.labels)
    assert not data.exists()


def test_image_statistics_equal_hand_computed_ones():
    images = torch.full((2, 3, 8, 8), 114, dtype=torch.uint8)
    images[1, 0] = 228
    looks = describe([(images, torch.tensor([[0.5, 0.5, 0.2, 0.1]]))])
    assert looks["boxes a picture"] == 0.5
    assert looks["padding"] == 0.5
    assert looks["saturation"] == pytest.approx(0.25)
    assert rate_of(iter([4] * 10_000_000), 0.01) > 0


def test_differing_images_are_reported():
    looks = {"boxes a picture": 20.0, "box side, share of the picture": 0.2, "padding": 0.0}
    looks |= {"brightness": 0.5, "saturation": 0.3}
    assert differences(looks, looks | {"padding": 0.01, "boxes a picture": 21.0, "brightness": 0.52}) == []
    assert differences(looks, looks | {"padding": 0.1, "boxes a picture": 30.0}) == ["boxes a picture", "padding"]


def test_the_ring_formula_equals_the_sum_of_its_steps():
    """Reduce-scatter and all-gather send 2 (N - 1) pieces, one after another."""
    size, processes, bandwidth, delay = 100e6, 8, 10e9, 1e-5
    assert ring_seconds(size, processes, bandwidth, delay) == pytest.approx(
        sum(size / processes / bandwidth + delay for _ in range(2 * (processes - 1)))
    )


def test_communication_overlaps_with_the_backward_pass():
    assert step_seconds(0.1, 0.6, 1e9, 1, 1e9, 0) == 0.1
    assert step_seconds(0.1, 0.6, 1e6, 8, 1e12, 0) == pytest.approx(0.1, rel=1e-3)
    slow = step_seconds(0.1, 0.6, 250e6, 2, 1e9, 0)  # ten buckets: 0.25 s on the wire, 0.054 s of it hidden
    assert slow == pytest.approx(0.1 + 0.25 - 0.9 * 0.06)


@pytest.mark.parametrize("first_class", [0, 1])
def test_peers_predictions_are_scored_with_any_class_numbering(tmp_path, first_class):
    gt, table = make_scene(images=8, detections=20, objects=3, classes=4)
    path = tmp_path / "predictions.json"
    write_predictions(path, table, gt)
    rows = [row | {"category_id": row["category_id"] + first_class} for row in json.loads(path.read_text())]
    path.write_text(json.dumps(rows))
    assert average_precision(path, gt, 4) == pytest.approx(score_detections(gt, table, 4).ap, abs=1e-9)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_mosaics_hold_each_object_once(tmp_path, scale):
    """Objects of the small set are squares of one brightness, which they keep, and their size unless it is scaled."""
    before = load_index(
        load_dataset_spec(write_dataset(tmp_path / "set", val=9)), "val", cache_dir=str(tmp_path / "c"), progress=False
    )
    (tmp_path / "mosaics").mkdir()
    count = write_mosaics(tmp_path / "mosaics", before, 256, scale, 0)
    spec = load_dataset_spec(tmp_path / "mosaics" / "data.yaml")
    after = load_index(spec, "val", cache_dir=str(tmp_path / "c"), progress=False)
    assert len(after) == count
    assert sorted(after.classes) == sorted(before.classes)
    if scale == 1.0:
        sizes = [np.sort(index.boxes_xywh_px[:, 2] + 1000 * index.classes) for index in (after, before)]
        np.testing.assert_allclose(*sizes, atol=1e-4)
    for number in range(count):
        image = cv2.imread(after.path(number)).astype(int)
        rows = slice(*after.offsets[number : number + 2])
        for x, y, w, h in after.boxes_xywh_px[rows]:
            middle = image[int(y + h / 2), int(x + w / 2)]
            assert set(middle.tolist()) <= {20, 235}  # a later object may cover an earlier one


def test_a_comparison_without_detections_is_a_failure():
    parity = Parity(
        images=64,
        matched=20,
        missing=1,
        box=2e-5,
        mean_box=1e-6,
        score=3e-6,
        mean_score=1e-7,
        ap=0.46,
        ap_checkpoint=0.47,
        f1=0.5,
        f1_checkpoint=0.52,
        threshold=0.3,
        worst_image="a.jpg",
    )
    line = "/best.onnx: 12.2 MB, 3 s; "
    assert cell(line + parity.line, "float32") == "2.0e-05, 3.0e-06, 1 of 20"
    assert cell(line + parity.line, "int8") == "AP -0.0100 of 0.4700, F1 -0.0200 of 0.5200"
    assert cell(line + replace(parity, matched=0).line, "float32").startswith("failed: no detections")
    assert cell("", "half").startswith("failed: ")
    refused = "onnx: /best.onnx.failed: differs too much from the checkpoint: AP is 0.1; F1 is 0.2 (worst image: a.jpg)"
    assert cell(refused, "half") == "failed: AP is 0.1; F1 is 0.2"
