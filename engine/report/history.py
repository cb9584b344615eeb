"""Charts of results.csv: losses, scores, learning rates and speed by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine.evaluation.metrics import METRICS
from utils.drawing.figures import Chart, Line
from utils.files.results_csv import CONFIDENCE_COLUMN


class _Panel(NamedTuple):
    """The title and the y axis of a chart, and whether the axis begins at 0."""

    title: str
    axis: str
    is_from_zero: bool = False


_PANELS = {
    CONFIDENCE_COLUMN: _Panel("confidence threshold", "confidence with the best F1", is_from_zero=True),
    "time": _Panel("Time", "time since the start (s)"),
    "lr": _Panel("Learning rates", "learning rate"),
    "images_per_s": _Panel("Training images per second", "images per second"),
    "data_wait": _Panel("Waiting for data", "fraction of the time", is_from_zero=True),
}


def history_charts(columns: Mapping[str, np.ndarray]) -> list[Chart]:
    """Returns charts of the columns of results.csv that have a finite value. ``train/box`` and ``val/box`` share a
    chart, and so do all learning rates. Lines join the epochs that have a value, because not every epoch is
    validated."""
    lines: dict[_Panel, list[str]] = {}  # columns by their chart
    for name, values in columns.items():
        if name != "epoch" and np.isfinite(values).any():
            lines.setdefault(_panel_of(name), []).append(name)
    if not lines:
        return []
    first, last = columns["epoch"][[0, -1]]
    span = max(last - first, 1)
    return [
        Chart(
            title=panel.title,
            lines=[Line(name, columns["epoch"], columns[name]) for name in names],
            x_label="epoch",
            y_label=panel.axis,
            x_is_whole=True,
            x_range=(first - 0.02 * span, first + 1.02 * span),
            y_range=(0, None) if panel.is_from_zero else None,
        )
        for panel, names in lines.items()
    ]


def _panel_of(column: str) -> _Panel:
    """Returns the chart of a column: metrics/METRIC, metrics/METRIC:CLASS, train/LOSS, val/LOSS, or a column
    of `_PANELS`. A key of `_PANELS` is a whole column, the beginning of lr/GROUP or the end of speed/QUANTITY."""
    head, _, tail = column.partition("/")
    panel = _PANELS.get(column) or _PANELS.get(head) or _PANELS.get(tail)
    if panel is not None:
        return panel
    if head != "metrics":
        return _Panel(f"{tail or head} loss", "loss (no unit)")
    name, _, class_name = tail.partition(":")
    for metric in METRICS:
        if tail == metric.name or (class_name and name == metric.title):
            return _Panel(tail if class_name else metric.title, metric.axis, is_from_zero=True)
    return _Panel(tail, "score (no unit)", is_from_zero=True)
