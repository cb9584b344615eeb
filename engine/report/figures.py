"""The figures of a validation in the report: precision and recall, confusions, and what errors cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.evaluation.analysis import KINDS, ErrorSplit
from utils.drawing.figures import Chart, Line, Picture, bars_picture, new_figure, picture_of, short_label
from utils.structures import EvalResult

MANY_CLASSES = 20  # with more, confusion matrices have no numbers
FEW_CLASSES = 8  # of many, that have a curve
MAX_CONFUSED = 60  # classes in a confusion matrix


def metric_charts(result: EvalResult, names: Sequence[str]) -> dict[str, Chart]:
    """Curves at IoU 0.5 named PR, F1, P and R: a line for each class that has objects, and a thick one for their mean;
    of many classes, only those with the lowest AP50. The line of a single class is its own mean. Empty if no class has
    objects."""
    shown = np.flatnonzero(np.asarray(result.class_targets) > 0)
    if not shown.size:
        return {}
    class_ap50 = result.class_metrics["AP50"]
    drawn, note = shown[np.argsort(class_ap50[shown], kind="stable")], ""
    if shown.size > MANY_CLASSES:
        drawn, note = drawn[:FEW_CLASSES], f"the {FEW_CLASSES} of {shown.size} classes with the lowest AP50"
    of_detections, of_objects = "precision (fraction of the detections)", "recall (fraction of the objects)"
    confidence, threshold = result.curve_confidence, result.threshold
    curves = {  # title, x, y, and their names
        "PR": ("Precision and recall", result.pr_recall, result.pr_precision, of_objects, of_detections),
        "F1": ("F1", confidence, result.curve_f1, "confidence threshold", "F1"),
        "P": ("Precision", confidence, result.curve_precision, "confidence threshold", of_detections),
        "R": ("Recall", confidence, result.curve_recall, "confidence threshold", of_objects),
    }
    charts = {}
    for key, (title, x, y, *axes) in curves.items():
        mean, labels = "mean", names
        if key == "PR":
            mean = f"mean AP50 {result.metrics['AP50']:.3f}"
            labels = [f"{name} {value:.3f}" for name, value in zip(names, class_ap50)]
        if shown.size == 1:
            note = labels[shown[0]]  # a single line has no legend
            lines = [Line(note, x, y[shown[0]], is_strong=True)]
        else:
            lines = [Line(mean, x, y[shown].mean(0), is_strong=True), *(Line(labels[c], x, y[c]) for c in drawn)]
        is_marked = key == "F1" and threshold is not None
        mark = (threshold, f"best: {result.metrics['f1']:.3f} at {threshold:.3f}") if is_marked else None
        charts[key] = Chart(f"{title} at IoU 0.5", lines, *axes, (0, 1), (0, 1.02), mark=mark, note=note)
    return charts


def confusion_picture(confusion: np.ndarray, names: Sequence[str], title: str) -> Picture:
    """A confusion matrix (C + 1, C + 1): rows predicted, columns true, last background. Colors show fractions of a
    column. Of many classes, those with the most errors are shown."""
    confusion = np.asarray(confusion)
    fractions = confusion / np.maximum(confusion.sum(0, keepdims=True), 1)
    labels = np.array([*map(short_label, names), "background"])
    if len(names) > MAX_CONFUSED:
        wrong = (confusion.sum(0) + confusion.sum(1) - 2 * np.diag(confusion))[:-1]
        shown = np.r_[np.sort(np.argsort(-wrong, kind="stable")[:MAX_CONFUSED]), len(names)]
        confusion, fractions, labels = confusion[np.ix_(shown, shown)], fractions[np.ix_(shown, shown)], labels[shown]
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
    return picture_of(figure)


def errors_picture(errors: ErrorSplit) -> Picture:
    """What each kind of error costs (TIDE)."""
    names = [*KINDS, "all false\npositives", "all not\nfound"]
    costs = np.array([*errors.cost, errors.false_positive_cost, errors.false_negative_cost])
    texts = [f"{c:.3f}" for c in costs]
    texts[: len(KINDS)] = [f"{c:.3f}\n({n:,})" for c, n in zip(errors.cost, errors.counts.sum(0))]
    return bars_picture(names, costs, texts, ("kind of error", "AP50 to be gained", f"Errors; AP50 is {errors.ap:.3f}"))
