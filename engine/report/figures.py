"""Figures of a report: scores by epoch, precision and recall, confusions, costs of errors, boxes of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.evaluation.analysis import FOREGROUND_IOU, ErrorSplit
from engine.evaluation.metrics import METRICS, nanmean
from engine.evaluation.result import EvalResult
from engine.report.images import KIND_NAMES
from utils.drawing.figures import (
    AxisLabels,
    Chart,
    Line,
    Mark,
    Picture,
    bar_chart_picture,
    default_style,
    new_figure,
    render_figure,
    short_label,
)

# With more classes, confusion matrices have no numbers, only `FEW_CLASSES` have curves, and scores are folded.
MANY_CLASSES = 20
FEW_CLASSES = 8
MAX_CONFUSED = 60  # classes in a confusion matrix
_AP_NAMES = ("AP", "AP50", "AP75")
_TIMES = {"time": "seconds since the start", "data_wait": "fraction of time waiting for data"}


class HistoryCharts(NamedTuple):
    """Charts of results.csv by epoch; a chart without a value is left out."""

    ap: list[Chart]  # at most one
    training: list[Chart]  # other scores, then losses
    others: list[Chart]  # times and learning rates


def history_charts(columns: Mapping[str, np.ndarray]) -> HistoryCharts:
    """Creates charts of the columns of results.csv that have a finite value. ``train/box`` and ``val/box`` share a
    chart. Lines join the epochs that have a value, because not every epoch is validated."""
    metric_titles = {metric.name: metric.title for metric in METRICS}
    ap: list[str] = []  # names of columns
    scores: list[str] = []
    losses: dict[str, list[str]] = {}
    others: dict[tuple[str, str], list[str]] = {}  # by title and label of the y axis
    for name, values in columns.items():
        if name == "epoch" or not np.isfinite(values).any():
            continue
        head, _, tail = name.partition("/")
        if head == "metrics":
            (ap if tail.partition(":")[0] in _AP_NAMES else scores).append(name)
        elif head in ("train", "val"):
            losses.setdefault(f"{tail} loss", []).append(name)
        else:
            words = _TIMES.get(tail or head, (tail or head).replace("_", " "))
            title = ("Learning rates", "learning rate") if head == "lr" else (words, words)
            others.setdefault(title, []).append(name)

    def chart(title: str, names: Sequence[str], y_label: str, *, from_zero: bool = False) -> Chart:
        lines = []
        for name in names:
            head, _, tail = name.partition("/")
            label = head if y_label == "loss" else metric_titles.get(tail, tail or head)
            lines.append(Line(label, columns["epoch"], columns[name], is_strong=label == "AP"))
        y_range = (0, None) if from_zero else None
        return Chart(title=title, lines=lines, x_label="epoch", y_label=y_label, x_is_whole=True, y_range=y_range)

    training = [chart("Precision, recall and F1", scores, "score", from_zero=True)] if scores else []
    training += [chart(title, names, "loss") for title, names in losses.items()]
    return HistoryCharts(
        [chart("AP", ap, "AP", from_zero=True)] if ap else [],
        training,
        [chart(title, names, y_label) for (title, y_label), names in others.items()],
    )


def metric_charts(result: EvalResult, names: Sequence[str]) -> dict[str, Chart]:
    """Creates charts of curves at IoU 0.5, named PR, F1, P and R; none if no class has objects.

    There is a line for each class that has objects, and a thick one for their mean; of many classes, only those with
    the lowest AP50 have lines. A single class has only the thick line.
    """
    with_objects = np.flatnonzero(np.asarray(result.class_targets) > 0)
    if not with_objects.size:
        return {}
    ap50 = result.class_metrics["AP50"]
    by_ap = with_objects[np.argsort(ap50[with_objects], kind="stable")]
    is_many = len(by_ap) > MANY_CLASSES
    drawn = by_ap[:FEW_CLASSES] if is_many else by_ap
    ap_names = [f"{name} {value:.3f}" for name, value in zip(names, ap50)]
    mark = None
    if result.metrics["f1"] > 0:
        shown = result.shown_confidence
        mark = Mark(shown, f"threshold {shown:.3f}: F1 {result.metrics['f1']:.3f}")

    def chart(title: str, x: np.ndarray, y: np.ndarray, axes: tuple[str, str], mark: Mark | None = None) -> Chart:
        is_pr = x is result.pr_recall
        class_labels = ap_names if is_pr else names
        note = f"the {FEW_CLASSES} of {len(by_ap)} classes with the lowest AP50" if is_many else ""
        if len(by_ap) == 1:
            note = class_labels[by_ap[0]]  # a single line has no legend
            lines = [Line(note, x, y[by_ap[0]], is_strong=True)]
        else:
            mean = f"mean AP50 {result.metrics['AP50']:.3f}" if is_pr else "mean"
            lines = [Line(mean, x, nanmean(y[with_objects], axis=0), is_strong=True)]
            lines += [Line(class_labels[c], x, y[c]) for c in drawn]
        return Chart(f"{title} at IoU {FOREGROUND_IOU}", lines, *axes, (0, 1), (0, 1.02), mark=mark, note=note)

    confidence = result.curve_confidence
    axis = "confidence threshold"
    return {
        "PR": chart("Precision and recall", result.pr_recall, result.pr_precision, ("recall", "precision")),
        "F1": chart("F1", confidence, result.curve_f1, (axis, "F1"), mark),
        "P": chart("Precision", confidence, result.curve_precision, (axis, "precision")),
        "R": chart("Recall", confidence, result.curve_recall, (axis, "recall")),
    }


@default_style()
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
    """Draws the cost of each kind of error that occurs, the largest first, with their number."""
    counts = errors.counts.sum(0)
    kinds = [kind for kind in np.argsort(-errors.cost, kind="stable").tolist() if counts[kind]]
    texts = [f"{errors.cost[kind]:.3f}\n({counts[kind]:,})" for kind in kinds]
    labels = AxisLabels("kind of error", "AP50 to be gained", f"Errors; AP50 above the threshold is {errors.ap:.3f}")
    return bar_chart_picture([KIND_NAMES[kind] for kind in kinds], errors.cost[kinds], texts, labels)


def class_bars(boxes: np.ndarray, names: Sequence[str], split: str) -> Picture:
    """Draws the number of boxes of each class, int64 (C,), or of the `MANY_CLASSES` most frequent ones."""
    order = np.argsort(-boxes, kind="stable")[:MANY_CLASSES]
    subset = f"{MANY_CLASSES} of {len(names)} classes" if len(names) > MANY_CLASSES else "each class"
    labels = AxisLabels("", "boxes", f"Boxes of {subset} ({split})")
    return bar_chart_picture([names[c] for c in order], boxes[order], [f"{n:,}" for n in boxes[order]], labels)
