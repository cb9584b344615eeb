"""Figures of a validation: what errors cost, and how far confidences can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.evaluation.analysis import KINDS, Calibration, ErrorSplit
from utils.drawing.figures import COLORS, FAINT, MARK, label_axes, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_errors(errors: ErrorSplit, out: Path) -> None:
    """The AP50 that each kind of error costs as a bar, and the number of errors. Nothing if no class was scored."""
    if np.isnan(errors.ap):
        return
    figure = new_figure(7.5, 4)
    axes = figure.subplots()
    labels = [*KINDS, "all false\npositives", "all not\nfound"]
    costs = [*errors.cost, errors.false_positive_cost, errors.false_negative_cost]
    colors = ["tab:blue"] * len(KINDS) + ["0.6"] * 2
    axes.bar(np.arange(len(labels)), costs, color=colors)
    axes.set_xticks(np.arange(len(labels)), labels, fontsize=8)
    for bar, (cost, count) in enumerate(zip(costs, errors.counts.sum(0))):
        axes.annotate(f"{count:,}", (bar, cost), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xlabel="kind of error", ylabel="AP50 to be gained", title=f"errors and their number; AP50 {errors.ap:.3f}")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3, axis="y")
    save_figure(figure, out)


def plot_reliability(calibration: Calibration, out: Path) -> None:
    """Writes `reliability_figure`. Nothing if nothing was detected."""
    if figure := reliability_figure(calibration):
        save_figure(figure, out)


def reliability_figure(calibration: Calibration) -> Figure | None:
    """Reliability diagram: precision against confidence as bars, and below the number of detections in each bin; None
    if nothing was detected."""
    part = calibration.scored
    if not part.counts.any():
        return None
    figure = new_figure(5.2, 5)
    curve, amounts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    centers, width = (part.edges[:-1] + part.edges[1:]) / 2, np.diff(part.edges) * 0.97
    curve.bar(centers, np.nan_to_num(part.precision), width, color=COLORS[0], label="precision")
    curve.plot([0, 1], [0, 1], color=MARK, linewidth=1, linestyle="--", label="perfect calibration")
    curve.plot(part.confidence, part.precision, "o", markersize=3, color=COLORS[1], label="mean confidence of a bin")
    error = f"calibration error (ECE) {part.error:.3f}"
    if calibration.shown.counts.any():
        error += f", {calibration.shown.error:.3f} above confidence {calibration.threshold:.3f}"
        for axes in (curve, amounts):
            axes.axvline(calibration.threshold, color=MARK, linewidth=1, linestyle=":")
    label_axes(curve, "", "precision at IoU 0.5")
    label_axes(amounts, "confidence", "detections")
    curve.set(xlim=(0, 1), ylim=(0, 1.02))
    curve.set_title(error, fontsize=9)
    curve.legend(fontsize=8, loc="upper left", frameon=False)
    amounts.bar(centers, part.counts, width, color=FAINT)
    amounts.set_yscale("symlog", linthresh=1)
    return figure
