"""Charts of results.csv."""

import numpy as np
import pytest

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS
from engine.report.history import history_charts


def columns(text: str) -> dict[str, np.ndarray]:
    names, *rows = (line.split(",") for line in text.splitlines())
    return dict(
        zip(names, np.array([[float(cell or "nan") for cell in row] for row in rows]).reshape(-1, len(names)).T)
    )


def test_columns_share_a_chart_by_what_they_measure():
    charts = history_charts(
        columns("epoch,train/box,val/box,metrics/AP50,lr/0,lr/1\n1,3,,,0.1,0.2\n2,2,2.5,nan,0.1,0.1")
    )
    assert [(chart.title, [line.name for line in chart.lines]) for chart in charts] == [
        ("box loss", ["train/box", "val/box"]),
        ("Learning rates", ["lr/0", "lr/1"]),
    ]
    assert history_charts(columns("epoch,train/box")) == []


def chart_of(column: str) -> tuple[str, str]:
    """Returns the title and the label of the y axis of the chart of a column."""
    (chart,) = history_charts({"epoch": np.array([1.0, 2.0]), column: np.array([0.1, 0.2])})
    return chart.title, chart.y_label


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_metric_has_its_own_chart(metric):
    """So has that of one class, a column of ``--fitness``, whose name may have any characters."""
    assert chart_of(f"metrics/{metric.name}") == (metric.title, metric.axis)
    fitness = Fitness.parse(f"{metric.name}:a/b:c", ["a/b:c"])
    assert chart_of(fitness.column) == (fitness.name, metric.axis)


def test_only_losses_are_called_losses():
    """A new metric needs no second table, and neither the threshold nor an earlier program's metric is a loss."""
    assert chart_of("metrics/confidence") == ("confidence threshold", "confidence with the best F1")
    assert chart_of("metrics/other") == ("other", "score (no unit)")
    assert chart_of("speed/images_per_s") == ("Training images per second", "images per second")
    assert chart_of("val/box") == ("box loss", "loss (no unit)")
