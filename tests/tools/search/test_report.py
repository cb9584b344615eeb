"""The report of a search."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.helpers.searches import space_of

optuna = pytest.importorskip("optuna")
from tools.search.report import write_report  # noqa: E402


@pytest.mark.parametrize(
    ("ranges", "values", "is_baseline"),
    [
        ("lr_factor: [0.3, 3, log]", {"lr_factor": 1.0}, True),
        ("lr_factor: [0.3, 3, log]", {"lr_factor": 1.5}, False),
        ("lr_factor: [2, 3]", {"lr_factor": 2.5}, False),
        ("lr0: [0.001, 0.05, log]", {"lr0": 0.01}, False),  # train.py chooses it
        ("close_mosaic: [0, 3]", {"close_mosaic": 2}, True),  # in a run of four epochs
        ("lr_factor: [0.3, 3, log]\nclose_mosaic: [0, 1]", {"lr_factor": 1.0, "close_mosaic": 1}, False),
    ],
)
def test_a_trial_is_called_the_baseline_only_if_all_its_values_are_the_recipe_s(tmp_path, ranges, values, is_baseline):
    space = space_of(tmp_path, ranges, epochs=4)
    trial = optuna.trial.create_trial(params=values, distributions=space.ranges, value=0.5)
    experiment = SimpleNamespace(folder=tmp_path, fitness=SimpleNamespace(name="AP"))
    lines = write_report(experiment, [trial], space, unit="epoch", command="train.py")
    assert lines[0] == "1 trial: 1 complete"
    assert lines[2].endswith("  (baseline)") == is_baseline


def test_the_lead_of_the_best_trial_is_compared_with_the_spread(tmp_path):
    space = space_of(tmp_path, "lr_factor: [0.3, 3, log]")
    trials = [
        optuna.trial.create_trial(params={"lr_factor": factor}, distributions=space.ranges, value=value)
        for factor, value in ((0.5, 0.5), (1.0, 0.52), (2.0, 0.54))
    ]
    experiment = SimpleNamespace(folder=tmp_path, fitness=SimpleNamespace(name="AP"))
    lines = write_report(experiment, trials, space, unit="epoch", command="train.py")
    (line,) = [line for line in lines if "leads by" in line]
    assert "leads by 0.0200" in line
    assert "standard deviation of 0.0200" in line
