"""The common parts of the benchmarks: alternation, tables, and what both sides are given and scored by."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest

from benchmarks.speed import our_side, turns
from benchmarks.speed.coco_scores import average_precision
from benchmarks.speed.dataset_copy import copied
from benchmarks.speed.report import Comparison
from benchmarks.speed.training_step import build_step
from data.index.files import list_split
from data.spec.dataset_yaml import load_dataset_spec
from engine.evaluation.metrics import score_detections
from engine.evaluation.tables import write_predictions
from tests.helpers.scoring import random_case
from tests.helpers.tiny import TINY_MODEL, write_dataset

pytestmark = pytest.mark.benchmarks
SIDE = """
import sys
sys.path.insert(0, {folder!r})
from turns import take_turns
turn = iter(range(9))
print("noise", flush=True)
take_turns(lambda: {{"turn": next(turn), "name": {name!r}}})
"""


def command(name: str) -> list[str]:
    return [sys.executable, "-c", SIDE.format(folder=str(turns.PEER_SIDE.parent), name=name)]


def test_both_sides_alternate():
    results = turns.alternate({"a": command("a"), "b": command("b")}, rounds=3)
    assert results == {name: [{"turn": turn, "name": name} for turn in range(3)] for name in "ab"}


@pytest.mark.parametrize(("higher", "advantage"), [(True, 0.5), (False, 2.0)])
def test_the_ratio_is_of_medians_and_in_the_right_direction(higher, advantage):
    row = Comparison("x", "s", [9, 1, 2], [4, 400, 0.1], higher_is_better=higher)
    assert row.advantage == advantage
    assert row.cells()[-1] == f"{advantage:.2f}"
    assert Comparison("x", "s", [1.0]).advantage is None


def test_a_copy_repeats_every_training_image(tmp_path):
    original = write_dataset(tmp_path / "set", train=4, val=3)
    with copied(str(original), times=3) as data:
        spec = load_dataset_spec(data)
        train, val = (list_split(spec, split) for split in ("train", "val"))
        assert (len(train.images), len(val.images)) == (12, 3)
        assert all(label.stamp is not None for label in train.labels)
    assert not data.exists()


@pytest.mark.parametrize("first_class", [0, 1])
def test_peers_predictions_are_scored_with_any_class_numbering(tmp_path, first_class):
    gt, table, classes = random_case(0)
    path = tmp_path / "predictions.json"
    write_predictions(path, table, gt)
    rows = [row | {"category_id": row["category_id"] - 1 + first_class} for row in json.loads(path.read_text())]
    path.write_text(json.dumps(rows))
    assert average_precision(path, gt, classes) == pytest.approx(score_detections(gt, table, classes).ap, abs=1e-9)


@pytest.mark.parametrize("images", [0, 16, 64])
def test_a_timed_step_searches_kernels_for_its_own_batch_size(images):
    """0: no search."""
    assert build_step(TINY_MODEL, images=images, classes=3).settings.benchmark_images == images


@pytest.mark.parametrize(("is_short", "searched"), [(False, 64), (True, 0)])
def test_our_side_times_the_step_of_a_long_run_unless_it_is_told_otherwise(is_short, searched):
    options = Namespace(device="cpu", amp="off", compile=False, short_run=is_short)
    step = our_side.build_timed_step(options, TINY_MODEL, 64, "SGD")
    assert step.settings.benchmark_images == searched
