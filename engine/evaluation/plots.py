"""Figures of an analysis: what errors cost, and whether confidences mean what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.evaluation.analysis import Calibration
from engine.evaluation.tide import KINDS, ErrorSplit
from utils.visualize.plots import new_figure, save_figure


def plot_errors(errors: ErrorSplit, out: Path) -> None:
    """AP50 that each kind of error costs as a bar, with how many there are of it. Nothing without a scored class."""
    if np.isnan(errors.ap):
        return
    figure = new_figure(7.5, 4)
    axes = figure.subplots()
    labels = [*KINDS, "all false\npositives", "all not\nfound"]
    costs = [*errors.cost, errors.false_positive_cost, errors.false_negative_cost]
    colours = ["tab:blue"] * len(KINDS) + ["0.6"] * 2
    axes.bar(np.arange(len(labels)), costs, color=colours)
    axes.set_xticks(np.arange(len(labels)), labels, fontsize=8)
    for place, (cost, count) in enumerate(zip(costs, errors.counts.sum(0))):
        axes.annotate(f"{count:,}", (place, cost), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set(ylabel="AP50 to be gained", title=f"errors and their number; AP50 {errors.ap:.3f}")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3, axis="y")
    save_figure(figure, out)


def plot_reliability(calibration: Calibration, out: Path) -> None:
    """Precision over confidence, as bars against the diagonal, and below how many detections each bar stands for."""
    part = calibration.scored
    if not part.counts.any():
        return
    figure = new_figure(6, 6.5)
    curve, amounts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    centres, width = (part.edges[:-1] + part.edges[1:]) / 2, np.diff(part.edges)
    curve.bar(centres, np.nan_to_num(part.precision), width, color="tab:blue", edgecolor="white", label="precision")
    curve.plot([0, 1], [0, 1], color="0.3", linewidth=1, linestyle="--", label="as it should be")
    curve.plot(part.confidence, part.precision, "o", markersize=3, color="tab:red", label="mean confidence of a bin")
    error = f"calibration error (ECE) {part.error:.3f}"
    if calibration.shown.counts.any():
        error += f", {calibration.shown.error:.3f} from confidence {calibration.threshold:.3f} on"
        for axes in (curve, amounts):
            axes.axvline(calibration.threshold, color="0.5", linewidth=1, linestyle=":")
    curve.set(ylabel="share that is right at IoU 0.5", xlim=(0, 1), ylim=(0, 1.02), title=error)
    curve.legend(fontsize=8, loc="upper left")
    curve.grid(alpha=0.3)
    amounts.bar(centres, part.counts, width, color="0.6", edgecolor="white")
    amounts.set_yscale("symlog", linthresh=1)
    amounts.set(xlabel="confidence", ylabel="detections")
    amounts.grid(alpha=0.3)
    save_figure(figure, out)
