"""Figures of a report: scores by epoch, precision and recall, confusions, costs of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.evaluation.analysis import FOREGROUND_IOU, ErrorSplit
from engine.evaluation.metrics import METRICS, nanmean
from engine.evaluation.result import EvalResult
from engine.report.images import KIND_NAMES
from utils.drawing.figures import AxisLabels, Chart, Line, bar_chart_picture, chart_picture, draw_figure, short_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# With more classes, confusion matrices have no numbers, and only `FEW_CLASSES` have curves.
MANY_CLASSES = 20
FEW_CLASSES = 8
MAX_CONFUSED = 60  # classes in a confusion matrix
_AP_NAMES = ("AP", "AP50", "AP75")
_Y_LABELS = {"AP": 0, "score": 1, "loss": 2}  # of the charts of results.csv that come first, in this order
_OTHERS = {"data_wait": "fraction of time waiting for data"}


def history_charts(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Draws charts of the columns of results.csv that have a finite value, by title: AP, the other scores, the losses,
    then times and learning rates, uint8 (H, W, 3) RGB. ``train/box`` and ``val/box`` share a chart. Lines join the
    epochs that have a value, because not every epoch is validated."""
    metric_titles = {metric.name: metric.title for metric in METRICS}
    lines: dict[tuple[str, str], list[Line]] = {}  # by title and label of the y axis
    for column, values in columns.items():
        if column in ("epoch", "time") or not np.isfinite(values).any():
            continue
        head, _, tail = column.partition("/")
        label = metric_titles.get(tail, tail or head)
        if head == "metrics":
            key = ("AP", "AP") if tail.partition(":")[0] in _AP_NAMES else ("Precision, recall and F1", "score")
        elif head in ("train", "val"):
            key = (f"{tail} loss", "loss")
            label = head
        elif head == "lr":
            key = ("Learning rates", "learning rate")
        else:
            words = _OTHERS.get(tail or head, (tail or head).replace("_", " "))
            key = (words, words)
        lines.setdefault(key, []).append(Line(label, columns["epoch"], values, is_strong=label == "AP"))
    charts = {}
    for title, y_label in sorted(lines, key=lambda key: _Y_LABELS.get(key[1], len(_Y_LABELS))):
        y_range = (0, None) if y_label in ("AP", "score") else None
        labels = AxisLabels("epoch", y_label, title)
        charts[title] = chart_picture(Chart(labels, lines[title, y_label], y_range=y_range, x_is_whole=True))
    return charts


def metric_charts(result: EvalResult, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Draws curves at IoU 0.5, named PR, F1, P and R, uint8 (H, W, 3) RGB; none if no class has objects.

    There is a line for each class that has objects, and a thick one for their mean; of many classes, only those with
    the lowest AP50 have lines. A single class has only the thick line.
    """
    with_objects = np.flatnonzero(result.class_targets > 0)
    if not with_objects.size:
        return {}
    ap50 = result.class_metrics["AP50"]
    by_ap = with_objects[np.argsort(ap50[with_objects], kind="stable")]
    is_many = len(by_ap) > MANY_CLASSES
    drawn = by_ap[:FEW_CLASSES] if is_many else by_ap
    ap_names = [f"{name} {value:.3f}" for name, value in zip(names, ap50)]

    def chart(title: str, x: np.ndarray, y: np.ndarray, axes: tuple[str, str]) -> np.ndarray:
        is_pr = x is result.pr_recall
        class_labels = ap_names if is_pr else names
        title += f" at IoU {FOREGROUND_IOU}"
        if len(by_ap) == 1:  # a single line has no legend
            title += f": {class_labels[by_ap[0]]}"
            lines = [Line("", x, y[by_ap[0]], is_strong=True)]
        else:
            mean = f"mean AP50 {result.metrics['AP50']:.3f}" if is_pr else "mean"
            lines = [Line(mean, x, nanmean(y[with_objects], axis=0), is_strong=True)]
            lines += [Line(class_labels[c], x, y[c]) for c in drawn]
        if is_many:
            title += f"; the {FEW_CLASSES} of {len(by_ap)} classes with the lowest AP50"
        mark = None if is_pr else result.shown_confidence
        return chart_picture(Chart(AxisLabels(*axes, title), lines, (0, 1), (0, 1.02), mark=mark))

    confidence = result.curve_confidence
    axis = f"confidence; threshold {result.shown_confidence:.3f}"
    return {
        "PR_curve": chart("Precision and recall", result.pr_recall, result.pr_precision, ("recall", "precision")),
        "F1_curve": chart("F1", confidence, result.curve_f1, (axis, "F1")),
        "P_curve": chart("Precision", confidence, result.curve_precision, (axis, "precision")),
        "R_curve": chart("Recall", confidence, result.curve_recall, (axis, "recall")),
    }


def error_charts(result: EvalResult, errors: ErrorSplit, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Draws the confusion matrix, and the cost of each kind of error that occurs, the largest first, with their number:
    uint8 (H, W, 3) RGB each, none without detections or objects."""
    charts = {}
    if result.confusion.any():
        charts["confusion_matrix"] = _confusion_matrix(result, names)
    counts = errors.counts.sum(0)
    if counts.any() and result.class_targets.any():
        kinds = [kind for kind in np.argsort(-errors.cost, kind="stable").tolist() if counts[kind]]
        texts = [f"{errors.cost[kind]:.3f}\n({counts[kind]:,})" for kind in kinds]
        title = f"Errors; AP50 above the threshold is {errors.ap:.3f}"
        labels = AxisLabels("kind of error", "AP50 to be gained", title)
        charts["errors"] = bar_chart_picture([KIND_NAMES[kind] for kind in kinds], errors.cost[kinds], texts, labels)
    return charts


def _confusion_matrix(result: EvalResult, names: Sequence[str]) -> np.ndarray:
    """Draws rows for predicted, columns for true classes, last background. Colors show fractions of a column. Of many
    classes, those with the most errors are shown."""
    confusion = result.confusion
    title = f"detections above confidence {result.shown_confidence:.3f}, IoU {FOREGROUND_IOU}"
    shown = np.arange(len(names) + 1)
    if len(names) > MAX_CONFUSED:
        wrong = (confusion.sum(0) + confusion.sum(1) - 2 * np.diag(confusion))[:-1]
        shown = np.r_[np.sort(np.argsort(-wrong, kind="stable")[:MAX_CONFUSED]), len(names)]
        title += f"; the {MAX_CONFUSED} of {len(names)} classes with the most errors"
    fractions = (confusion / np.maximum(confusion.sum(0), 1))[np.ix_(shown, shown)]
    counts = confusion[np.ix_(shown, shown)]
    labels = np.array([*map(short_label, names), "background"])[shown]
    side = float(np.clip(0.5 * len(labels) + 2, 5, 12))

    def draw(axes: Axes) -> None:
        image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
        axes.figure.colorbar(image, label="fraction of the true class", shrink=0.8)
        axes.set_xticks(np.arange(len(labels)), labels, rotation=90, fontsize=8)
        axes.set_yticks(np.arange(len(labels)), labels, fontsize=8)
        axes.set(xlabel="true class", ylabel="predicted class", title=title)
        if len(labels) <= MANY_CLASSES + 1:
            for row, column in np.argwhere(counts > 0):
                ink = "white" if fractions[row, column] > 0.5 else "black"
                axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=7, color=ink)

    return draw_figure(side * 1.15, side, draw)
