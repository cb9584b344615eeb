"""The parts of a report about scores: curves over training, precision and recall, confusions, errors, calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from engine.evaluation.analysis import Calibration, Reliability
from engine.evaluation.metrics import CONFUSION_IOU, METRICS
from engine.evaluation.tide import KINDS, ErrorSplit
from engine.report.advice import confused_pairs
from utils.drawing import page
from utils.drawing.charts import FAINT, Line, histogram, line_chart
from utils.drawing.plots import axis_name, panels_of
from utils.structures import EvalResult

MOST_LINES = 8  # classes with a color of their own in a chart
MOST_FAINT = 100  # other classes in a chart
MOST_SHOWN = 20  # classes of a confusion matrix
MOST_PAIRS = 200
CURVE_POINTS = 100
_TITLES = {
    "time": "Time",
    "lr": "Learning rates",
    "images_per_s": "Training images per second, over all processes",
    "data_wait": "Fraction of the time that training waits for data",
}


def history_parts(history: dict[str, np.ndarray]) -> list[page.Content]:
    """A chart for each quantity of results.csv, which training and validation share. Lines join the epochs that have a
    value, as not each epoch is validated."""
    epochs = history.get("epoch", np.zeros(0))
    if not epochs.size:
        return ["No epoch is complete yet."]
    charts = [
        line_chart(
            [_known(Line(name, epochs, history[name])) for name in names],
            title=_TITLES.get(title, title if names[0].startswith("metrics/") else f"{title} loss"),
            x_label="epoch",
            x_range=(float(epochs[0]), float(max(epochs[-1], epochs[0] + 1))),
            x_is_whole=True,
            y_label=axis_name(title),
            y_range=(0.0, 1.0) if names[0].startswith("metrics/") or title == "data_wait" else None,
        )
        for title, names in panels_of(history).items()
    ]
    return [page.row_of(*charts)]


def _known(line: Line) -> Line:
    known = np.isfinite(line.y)
    return Line(line.name, line.x[known], line.y[known], line.style)


def curve_parts(result: EvalResult, names: Sequence[str]) -> list[page.Content]:
    """PR and F1 curves by class, and the scores of each."""
    shown = np.flatnonzero(result.class_targets > 0)
    if not shown.size:
        return ["No class has validation objects, so there are no curves."]
    f1 = np.nan_to_num(result.curve_f1)
    ap50 = result.class_metrics["AP50"]
    some = np.linspace(0, result.curve_confidence.size - 1, CURVE_POINTS).round().astype(int)
    order = shown[np.argsort(ap50[shown], kind="stable")]
    note = "" if shown.size <= MOST_LINES else f"; the {MOST_LINES} classes with the lowest AP50 have colors"
    if shown.size > MOST_LINES + MOST_FAINT:
        note += f", {MOST_FAINT} of the other {shown.size - MOST_LINES} are gray"
    pr = np.nan_to_num(result.pr_precision)
    threshold = result.threshold
    charts = [
        line_chart(
            _class_lines(result.pr_recall, pr, order, names, shown, f"mean, AP50 {result.metrics['AP50']:.3f}"),
            title=f"Precision and recall at IoU 0.5{note}",
            x_label="recall (fraction of the objects)",
            y_label="precision (fraction of the detections)",
            x_range=(0.0, 1.0),
            y_range=(0.0, 1.0),
        ),
        line_chart(
            _class_lines(result.curve_confidence[some], f1[:, some], order, names, shown, "mean"),
            title=f"F1 at IoU 0.5{note}",
            x_label="confidence threshold",
            y_label="F1",
            x_range=(0.0, 1.0),
            y_range=(0.0, 1.0),
            marks=[(threshold, f"best: {threshold:.3f}")] if threshold is not None else [],
        ),
    ]
    best = np.where(f1.max(1) > 0, result.curve_confidence[f1.argmax(1)], np.nan)
    columns = ("class", "objects", *(m.column for m in METRICS), "best F1", "at confidence")
    values = np.stack(
        [*(result.class_metrics[m.name] for m in METRICS), np.where(f1.max(1) > 0, f1.max(1), np.nan), best], 1
    )
    scores = [
        [names[c], int(result.class_targets[c]), *(float(v) for v in values[c])]
        for c in np.argsort(-np.nan_to_num(ap50, nan=-1.0), kind="stable")
    ]
    every = ["all", int(result.class_targets.sum()), *result.metrics.values(), result.metrics["f1"], threshold]
    caption = f"Scores of each class; P, R and F1 at confidence {result.best_confidence:.3f}, IoU 0.5"
    table = page.table(columns, [every, *scores], caption)
    many = len(names) > MOST_SHOWN
    return [page.row_of(*charts), page.fold(f"Scores of all classes ({len(names)})", table) if many else table]


def _class_lines(
    x: np.ndarray, values: np.ndarray, order: np.ndarray, names: Sequence[str], shown: np.ndarray, mean: str
) -> list[Line]:
    """The mean of the classes ``shown``, the first of ``order`` in colors, and some of the others faint and below."""
    others = order[MOST_LINES:]
    others = others[np.unique(np.linspace(0, others.size - 1, min(others.size, MOST_FAINT)).round().astype(int))]
    faint = [Line(names[c], x, values[c], FAINT) for c in others]
    colored = [Line(names[c], x, values[c], f"s{number + 1}") for number, c in enumerate(order[:MOST_LINES])]
    return [*faint, *colored, Line(mean, x, values[shown].mean(0), "s0 strong")]


def confusion_parts(result: EvalResult, names: Sequence[str]) -> list[page.Content]:
    """The matrix of the classes that are confused most, and the pairs."""
    confusion = np.asarray(result.confusion)
    if not confusion.any():
        return [
            f"No object, and no detection at confidence {result.confusion_confidence:g} or above: nothing to compare."
        ]
    wrong = confusion.sum(0)[:-1] + confusion.sum(1)[:-1] - 2 * np.diag(confusion)[:-1]
    chosen = np.arange(len(names))
    threshold = f"confidence {result.confusion_confidence:.3f}"
    threshold += " (the recommended threshold)" if result.threshold is not None else ""
    caption = f"Objects and detections at {threshold} or above, matched at IoU {CONFUSION_IOU}"
    if len(names) > MOST_SHOWN:
        chosen = np.sort(np.argsort(-wrong, kind="stable")[:MOST_SHOWN])
        caption += f"; the {MOST_SHOWN} of {len(names)} classes with the most errors"
    rows = np.r_[chosen, len(names)]
    shades = confusion / np.maximum(confusion.sum(0, keepdims=True), 1)
    grid = page.matrix(
        confusion[np.ix_(rows, rows)].tolist(),
        shades[np.ix_(rows, rows)].tolist(),
        [*(names[c] for c in chosen), "background"],
        f"{caption}. A stronger color: a larger fraction of the true class",
        "predicted",
        "true",
    )
    pairs = confused_pairs(confusion)
    if not pairs:
        return [grid, "No object is taken for another class."]
    listed = [
        [names[t], names[p], count, count / max(int(confusion[:, t].sum()), 1)] for count, p, t in pairs[:MOST_PAIRS]
    ]
    columns = ("true class", "seen as", "objects", "fraction of the true class")
    table = page.table(columns, listed, "Confused pairs of classes")
    return [grid, page.fold(f"Confused pairs ({len(pairs)})", table)]


def error_parts(errors: ErrorSplit, names: Sequence[str]) -> list[page.Content]:
    """What each kind of error costs (TIDE)."""
    if np.isnan(errors.ap):
        return ["No class has validation objects, so no error can be priced."]
    counts = errors.counts.sum(0)
    rows = [(kind, float(cost), f"{cost:.3f} ({count:,})") for kind, cost, count in zip(KINDS, errors.cost, counts)]
    rows += [("all false positives", errors.false_positive_cost, f"{errors.false_positive_cost:.3f}")]
    rows += [("all not found", errors.false_negative_cost, f"{errors.false_negative_cost:.3f}")]
    by_class = [[name, *(int(v) for v in count)] for name, count in zip(names, errors.counts) if count.any()]
    table = page.table(("class", *KINDS), by_class, "Errors of each class, at any confidence")
    text = (
        "Each bar is the rise of AP50 if all errors of one kind were mended and no others (TIDE); in parentheses is "
        "their number at any confidence. A class error has the right place and the wrong class, a location error the "
        "right class and an IoU from 0.1 to 0.5; both: neither is right; background: no object is there."
    )
    bars = page.bars(rows, f"AP50 to be gained by mending one kind of error; AP50 is {errors.ap:.3f}")
    return [text, bars, page.fold("Errors of each class", table)]


def calibration_parts(calibration: Calibration) -> list[page.Content]:
    """Reliability: precision against confidence."""
    if not calibration.scored.counts.any():
        return ["Nothing was detected, so nothing is known about confidences."]
    charts = [
        _reliability(calibration.scored, "all detections"),
        _reliability(calibration.shown, f"detections from confidence {calibration.threshold:.3f} on"),
    ]
    return [
        "Of detections with confidence 0.8, 80 % should be correct (at IoU 0.5). Bars below the line: overconfident.",
        page.row_of(*charts),
    ]


def _reliability(part: Reliability, what: str) -> Markup:
    diagonal = Line("perfect calibration", np.array([0.0, 1.0]), np.array([0.0, 1.0]), "s7")
    mean = Line("mean precision of a bin", part.confidence, part.precision, "s1")
    title = f"{what}: {int(part.counts.sum()):,}"
    if part.counts.any():
        title += f"; calibration error (ECE) {part.error:.3f}"
    return histogram(
        part.edges, part.precision, title=title, x_label="confidence", y_label="precision at IoU 0.5",
        y_range=(0.0, 1.0), lines=[diagonal, mean],
    )  # fmt: skip
