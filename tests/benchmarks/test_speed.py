"""The common parts of the benchmarks: alternation, tables, and what both sides are given and scored by."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict

import pytest

from benchmarks.peer import PEER_SIDE
from benchmarks.speed import loader, our_side, step
from benchmarks.speed.report import Comparison
from benchmarks.speed.sides import alternate
from benchmarks.speed.training_step import build_step
from tests.helpers.tiny import TINY_MODEL
from utils.config.recipes import hyperparameters_from

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
    return [sys.executable, "-c", SIDE.format(folder=str(PEER_SIDE.parent), name=name)]


def test_both_sides_alternate():
    results = alternate({"a": command("a"), "b": command("b")}, rounds=3)
    assert results == {name: [{"turn": turn, "name": name} for turn in range(3)] for name in "ab"}


@pytest.mark.parametrize(("higher", "advantage"), [(True, 0.5), (False, 2.0)])
def test_the_ratio_is_of_medians_and_in_the_right_direction(higher, advantage):
    row = Comparison("x", "s", [9, 1, 2], [4, 400, 0.1], higher_is_better=higher)
    assert row.advantage == advantage
    assert row.cells()[-1] == f"{advantage:.2f}"
    assert Comparison("x", "s", [1.0]).advantage is None
    assert Comparison("AP", "", [0.0], [0.0], higher_is_better=higher).cells() == ["AP", "0", "0", "1.00"]


def test_loaders_are_compared_only_with_the_same_augmentation():
    ours = asdict(hyperparameters_from(""))
    defaults = {name: ours[name] for name in ("mosaic", "scale", "fliplr")}
    loader.check_equal_augmentation(defaults, [])
    loader.check_equal_augmentation(defaults | {"mosaic": 0.0}, ["mosaic=0"])
    for peer_settings, override in ((defaults, ["mosaic=0"]), (defaults | {"fliplr": 0.0}, [])):
        with pytest.raises(SystemExit, match="augmentation settings differ"):
            loader.check_equal_augmentation(peer_settings, override)


@pytest.mark.parametrize("images", [0, 16, 64])
def test_a_timed_step_searches_kernels_for_its_own_batch_size(images):
    """0 means that no search is made."""
    assert build_step(TINY_MODEL, images=images, classes=3).settings.benchmark_images == images


@pytest.mark.parametrize(("is_short", "searched"), [(False, 64), (True, 0)])
def test_our_side_times_the_step_of_a_long_run_unless_it_is_told_otherwise(is_short, searched):
    options = Namespace(device="cpu", amp="off", compile=False, short_run=is_short)
    timed = our_side.build_timed_step(options, TINY_MODEL, 64, "SGD")
    assert timed.settings.benchmark_images == searched


class StandInProcesses:
    """Stands in for `benchmarks.speed.step.StepProcesses`: turns of known length, of ours and of the peer."""

    def __init__(self, ours: dict, peer: dict) -> None:
        self.turns = {"auto": ours, step.PEER: peer}

    def __contains__(self, name: str) -> bool:
        return name in self.turns

    def measure(self, name: str, **arguments: object) -> dict:
        return self.turns[name]


def test_a_peer_that_fails_leaves_our_figures():
    options = Namespace(rounds=2, amp=["auto"], optimizer=["SGD"], compile=False, device="0")
    sides = StandInProcesses({"seconds": 1.0, "dtype": "bfloat16"}, {"error": "out of memory"})
    rows, errors = step.compare(options, sides, "yolov8n", 16)
    assert errors == ["Ultralytics, yolov8n batch 16: out of memory"]
    assert [row.advantage for row in rows] == [None, None]
