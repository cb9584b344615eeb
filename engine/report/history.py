"""Charts of results.csv: losses, scores, learning rates and speed by epoch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from utils.drawing.figures import Chart, Line

_AXIS_NAMES = {
    "time": "time since the start (s)",
    "lr": "learning rate",
    "precision": "precision at IoU 0.5",
    "recall": "recall at IoU 0.5",
    "f1": "F1 at IoU 0.5",
    "AP50": "AP at IoU 0.5",
    "AP75": "AP at IoU 0.75",
    "AP": "AP at IoU 0.50:0.95",
    "images_per_s": "images per second",
    "data_wait": "fraction of the time",
}
_TITLES = {
    "time": "Time",
    "lr": "Learning rates",
    "images_per_s": "Training images per second",
    "data_wait": "Waiting for data",
}


def history_charts(columns: Mapping[str, np.ndarray]) -> list[Chart]:
    """Returns charts of the columns of results.csv that have a finite value. ``train/box`` and ``val/box`` share a
    chart, and so do all learning rates. Lines join the epochs that have a value, as not each epoch is validated."""
    panels: dict[str, list[str]] = {}  # columns by the quantity that they measure
    for name, values in columns.items():
        if name != "epoch" and np.isfinite(values).any():
            head, _, tail = name.partition("/")
            panels.setdefault(head if head == "lr" or not tail else tail, []).append(name)
    if not panels:
        return []
    first, last = columns["epoch"][[0, -1]]
    span = max(last - first, 1)
    return [
        Chart(
            title=_TITLES.get(panel, panel if names[0].startswith("metrics/") else f"{panel} loss"),
            lines=[Line(name, columns["epoch"], columns[name]) for name in names],
            x_label="epoch",
            y_label=_AXIS_NAMES.get(panel, "loss (no unit)"),
            x_is_whole=True,
            x_range=(first - 0.02 * span, first + 1.02 * span),
            y_range=(0, None) if names[0].startswith("metrics/") or panel == "data_wait" else None,
        )
        for panel, names in panels.items()
    ]
