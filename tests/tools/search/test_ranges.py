"""Ranges of hyper-parameters, from the YAML to the values of a trial."""

from __future__ import annotations

import pytest

from tests.helpers.messages import refused
from tests.helpers.searches import RANGES, space_of
from utils.config.tool_settings import SearchConfig
from utils.program_folders import CONFIGS

optuna = pytest.importorskip("optuna")
from tools.search.ranges import read_space  # noqa: E402


def test_ranges_are_read(tmp_path):
    space = space_of(tmp_path, RANGES, override=["mixup=0.25"], epochs=100)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(study.ask()) for _ in range(200)]
    assert {type(values["close_mosaic"]) for values in drawn} == {int}
    assert {values["close_mosaic"] for values in drawn} == {0, 1, 2, 3}
    assert {values["mosaic"] for values in drawn} == {0.0, 1.0}
    below = sum(values["lr0"] < (0.001 * 0.05) ** 0.5 for values in drawn)
    assert 70 < below < 130  # uniform in the logarithm
    assert space.baseline_values() == {"mosaic": 1.0}  # the recipe's close_mosaic is 10, beyond the range
    assert space_of(tmp_path, RANGES, epochs=4).baseline_values() == {"mosaic": 1.0, "close_mosaic": 2}
    recipe = space.recipe({"lr0": 0.01, "mosaic": 1.0, "close_mosaic": 2})
    assert recipe == {"lr0": 0.01, "ema_tau": 2.0, "mosaic": 1.0, "close_mosaic": 2, "mixup": 0.25}


def test_null_among_the_choices_is_the_recipes_own_value(tmp_path):
    """The fixed part is what train.py would use. A hyper-parameter is not both searched and set."""
    ranges = "close_mosaic: {choice: [null, 10]}\nclose_scale: {choice: [0, 10]}\n"
    long = space_of(tmp_path, ranges, epochs=100)
    assert long.baseline_values() == {"close_mosaic": None, "close_scale": 10}
    assert space_of(tmp_path, ranges, epochs=6).baseline_values() == {"close_mosaic": None}
    assert space_of(tmp_path, RANGES, weights="yolov8n").base.lr_mult is None
    assert space_of(tmp_path, RANGES).base.lr_mult == 1.0
    with refused("--set lr0=1: .../ranges.yaml searches lr0; remove one"):
        space_of(tmp_path, RANGES, override=["lr0=1"])


@pytest.mark.parametrize("path", sorted((CONFIGS / "search").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_ready_ranges_are_valid(path):
    assert len(read_space(SearchConfig(hyp=path.stem)).ranges) >= 4


@pytest.mark.parametrize(
    "text",
    [
        "lr: [0, 1]",
        "epochs: [1, 5]",  # a flag
        "lr0: [0.1]",
        "lr0: [0.1, 0.01]",
        "lr0: [0, 0.01, log]",
        "mosaic: [0, 2]",
        "close_mosaic: [0, 2.5]",
        "mosaic: {choice: [0, x]}",
        "lr0: [.nan, 1]",
        "mosaic: 1.0",  # nothing to search
        "",
    ],
)
def test_wrong_ranges_are_one_line(tmp_path, text):
    with refused("ranges.yaml: ..."):
        space_of(tmp_path, text)
