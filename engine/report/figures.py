"""Figures of a validation in the report: precision and recall, confusions, and costs of errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.evaluation.analysis import FOREGROUND_IOU, KINDS, ErrorSplit
from engine.evaluation.metrics import nanmean
from engine.evaluation.result import EvalResult
from utils.drawing.figures import (
    AxisLabels,
    Chart,
    Line,
    Mark,
    Picture,
    bar_chart_picture,
    new_figure,
    render_figure,
    short_label,
)

# With more classes, confusion matrices have no numbers, only `FEW_CLASSES` have curves, and scores are folded.
MANY_CLASSES = 20
FEW_CLASSES = 8
MAX_CONFUSED = 60  # classes in a confusion matrix


def metric_charts(result: EvalResult, names: Sequence[str]) -> dict[str, Chart]:
    """Creates charts of curves at IoU 0.5, named PR, F1, P and R; none if no class has objects.

    There is a line for each class that has objects, and a thick one for their mean; of many classes, only those with
    the lowest AP50 have lines. A single class has only the thick line.
    """
    with_objects = np.flatnonzero(np.asarray(result.class_targets) > 0)
    if not with_objects.size:
        return {}
    class_ap50 = result.class_metrics["AP50"]
    ap_names = [f"{name} {value:.3f}" for name, value in zip(names, class_ap50)]
    precision = "precision (fraction of the detections)"
    recall = "recall (fraction of the objects)"
    threshold = result.threshold
    best = None if threshold is None else Mark(threshold, f"best: {result.metrics['f1']:.3f} at {threshold:.3f}")
    confidence = result.curve_confidence
    axis = "confidence threshold"
    curves = {
        "PR": _Curves("Precision and recall", result.pr_recall, result.pr_precision, recall, precision),
        "F1": _Curves("F1", confidence, result.curve_f1, axis, "F1", mark=best),
        "P": _Curves("Precision", confidence, result.curve_precision, axis, precision),
        "R": _Curves("Recall", confidence, result.curve_recall, axis, recall),
    }
    by_ap = with_objects[np.argsort(class_ap50[with_objects], kind="stable")]
    charts = {name: curve.chart(by_ap, names, "mean") for name, curve in curves.items()}
    charts["PR"] = curves["PR"].chart(by_ap, ap_names, f"mean AP50 {result.metrics['AP50']:.3f}")
    return charts


class _Curves(NamedTuple):
    """One curve of each class."""

    title: str
    x: np.ndarray  # float64 (S,)
    y: np.ndarray  # float64 (C, S)
    x_label: str
    y_label: str
    mark: Mark | None = None

    def chart(self, classes: np.ndarray, class_labels: Sequence[str], mean_label: str) -> Chart:
        """Draws the curves of ``classes``, int64 (n,), sorted by ascending AP50, and their mean."""
        note = ""
        if len(classes) == 1:
            note = class_labels[classes[0]]  # a single line has no legend
            lines = [Line(note, self.x, self.y[classes[0]], is_strong=True)]
        else:
            drawn = classes
            if len(classes) > MANY_CLASSES:
                drawn = classes[:FEW_CLASSES]
                note = f"the {FEW_CLASSES} of {len(classes)} classes with the lowest AP50"
            lines = [Line(mean_label, self.x, nanmean(self.y[np.sort(classes)], axis=0), is_strong=True)]
            lines += [Line(class_labels[c], self.x, self.y[c]) for c in drawn]
        title = f"{self.title} at IoU {FOREGROUND_IOU}"
        return Chart(title, lines, self.x_label, self.y_label, (0, 1), (0, 1.02), mark=self.mark, note=note)


def confusion_picture(confusion: np.ndarray, names: Sequence[str], title: str) -> Picture:
    """Draws a confusion matrix (C + 1, C + 1): rows predicted, columns true, last background. Colors show fractions of
    a column. Of many classes, those with the most errors are shown."""
    confusion = np.asarray(confusion)
    fractions = confusion / np.maximum(confusion.sum(0, keepdims=True), 1)
    labels = np.array([*map(short_label, names), "background"])
    if len(names) > MAX_CONFUSED:
        wrong = (confusion.sum(0) + confusion.sum(1) - 2 * np.diag(confusion))[:-1]
        shown = np.r_[np.sort(np.argsort(-wrong, kind="stable")[:MAX_CONFUSED]), len(names)]
        confusion = confusion[np.ix_(shown, shown)]
        fractions = fractions[np.ix_(shown, shown)]
        labels = labels[shown]
        title += f"; the {MAX_CONFUSED} of {len(names)} classes with the most errors"
    side = float(np.clip(0.5 * len(labels) + 2, 5, 12))
    figure = new_figure(side * 1.15, side)
    axes = figure.subplots()
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="fraction of the true class", shrink=0.8)
    axes.set_xticks(np.arange(len(labels)), labels, rotation=90, fontsize=8)
    axes.set_yticks(np.arange(len(labels)), labels, fontsize=8)
    axes.set(xlabel="true class", ylabel="predicted class", title=title)
    if len(labels) <= MANY_CLASSES + 1:
        for row, column in np.argwhere(confusion > 0):
            ink = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, str(confusion[row, column]), ha="center", va="center", fontsize=7, color=ink)
    return render_figure(figure)


def errors_picture(errors: ErrorSplit) -> Picture:
    """Draws the cost of each kind of error (TIDE)."""
    names = [*KINDS, "all false\npositives", "all not\nfound"]
    costs = np.array([*errors.cost, errors.false_positive_cost, errors.false_negative_cost])
    texts = [f"{c:.3f}" for c in costs]
    texts[: len(KINDS)] = [f"{c:.3f}\n({n:,})" for c, n in zip(errors.cost, errors.counts.sum(0))]
    labels = AxisLabels("kind of error", "AP50 to be gained", f"Errors; AP50 is {errors.ap:.3f}")
    return bar_chart_picture(names, costs, texts, labels)
