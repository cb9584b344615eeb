"""Charts of results.csv and of a validation."""

from __future__ import annotations

import numpy as np
import pytest

from engine.report.figures import confusion_picture, history_charts, metric_charts
from tests.helpers.scoring import make_result

NAMES = ("Katze", "größer", "снег", "猫")


def test_columns_share_a_chart_by_what_they_measure():
    names = (
        "epoch time train/box val/box metrics/AP metrics/AP50 metrics/AP:cat metrics/f1 metrics/confidence lr/0 lr/1"
    )
    columns = {name: np.array([1.0, 2.0]) for name in f"{names} speed/images_per_s".split()}
    columns["metrics/AP75"] = np.full(2, np.nan)
    charts = history_charts(columns)
    assert [[line.name for line in chart.lines] for chart in charts] == [
        ["AP", "AP50", "AP:cat"],
        ["F1", "confidence"],
        ["train", "val"],
        ["time"],
        ["0", "1"],
        ["images_per_s"],
    ]
    assert "loss" in charts[2].title
    assert history_charts({"epoch": np.zeros(0), "train/box": np.zeros(0)}) == []


def test_of_many_classes_the_worst_are_drawn():
    result = make_result((1,) * 150)
    result.class_metrics["AP50"][:] = np.linspace(1, 0, 150)
    pr = metric_charts(result, [f"c{i}" for i in range(150)])["PR"]
    assert [line.name for line in pr.lines[1:]] == [f"c{i} {1 - i / 149:.3f}" for i in range(149, 141, -1)]
    few = metric_charts(make_result(), NAMES)
    assert [line.is_strong for line in few["F1"].lines] == [True, False, False, False]
    assert metric_charts(make_result((0, 0, 0, 0)), NAMES) == {}
    single = metric_charts(make_result((0, 7, 0, 0)), NAMES)  # the curve of the mean would coincide with it
    assert {len(chart.lines) for chart in single.values()} == {1}


@pytest.mark.filterwarnings("error")
def test_confusion_matrices_show_names_as_text_and_the_worst_of_many_classes():
    given = ("a", "$\\frac$", "_hidden", "x" * 300)
    shown = ("a", "$\\frac$", " _hidden", "x" * 39 + "…")
    pictures = [confusion_picture(np.eye(5, dtype=int), names, "t").pixels for names in (given, shown)]
    assert np.array_equal(*pictures)
    assert confusion_picture(np.eye(91, dtype=int), [f"c{i}" for i in range(90)], "t").pixels.std() > 5
