"""Plots of a run: results over epochs, precision and recall, confusions, the labels of a data set, and sheets of images
with their boxes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from utils.boxes import cxcywh_to_xyxy
from utils.config.pixels import as_rgb8
from utils.drawing.draw import class_colors, draw_boxes, write_text
from utils.drawing.figures import Chart, Line, new_figure, picture_of, short_label
from utils.structures import Detections, EvalResult

MANY_CLASSES = 20  # with more, most curves are gray, and confusion matrices have no numbers
MOST_COLORED, MOST_FAINT = 8, 100  # of many classes in a figure
MOST_CONFUSED = 60  # classes in a confusion matrix
CURVE_POINTS = 200  # of a line over all confidences
GAP_COLOR, CAPTION_COLOR = 255, np.array([40, 40, 40])  # of sheets
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
    """The columns of results.csv that have a finite value over epochs. ``train/box`` and ``val/box`` share a chart, and
    so do all learning rates. Lines join the epochs that have a value, as not each epoch is validated."""
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


def metric_charts(result: EvalResult, names: Sequence[str]) -> dict[str, Chart]:
    """Curves at IoU 0.5 named PR, F1, P and R: a line for each class that has objects, and a thick one for their mean;
    of many classes, those with the lowest AP50 have colors. Empty if no class has objects."""
    shown = np.flatnonzero(np.asarray(result.class_targets) > 0)
    if not shown.size:
        return {}
    class_ap50 = result.class_metrics["AP50"]
    colored = shown[np.argsort(class_ap50[shown], kind="stable")]
    faint, note = colored[:0], ""
    if shown.size > MANY_CLASSES:
        colored, faint = np.split(colored, [MOST_COLORED])
        note = f"the {MOST_COLORED} classes with the lowest AP50 have colors"
        if faint.size > MOST_FAINT:
            note += f", {MOST_FAINT} of the other {faint.size} are gray"
            faint = faint[np.linspace(0, faint.size - 1, MOST_FAINT).round().astype(int)]

    def chart(
        title: str,
        x: np.ndarray,
        y: np.ndarray,
        axes: tuple[str, str],
        *,
        mean: str = "mean",
        labels: Sequence[str] = names,
        mark: tuple[float, str] | None = None,
    ) -> Chart:
        sampled = np.unique(np.linspace(0, x.size - 1, min(x.size, CURVE_POINTS)).round().astype(int))
        lines = [Line(mean, x[sampled], y[shown].mean(0)[sampled], "strong")]
        lines += [Line(labels[c], x[sampled], y[c, sampled]) for c in colored]
        lines += [Line(labels[c], x[sampled], y[c, sampled], "faint") for c in faint]
        return Chart(f"{title} at IoU 0.5", lines, *axes, (0, 1), (0, 1.02), mark=mark, note=note)

    precision, recall = (np.nan_to_num(v) for v in (result.curve_precision, result.curve_recall))
    f1 = np.nan_to_num(result.curve_f1)
    best, threshold, confidence = f1[shown].mean(0).max(), result.threshold, result.curve_confidence
    mark = (threshold, f"best: {best:.3f} at {threshold:.3f}") if threshold is not None else None
    of_detections, of_objects = "precision (fraction of the detections)", "recall (fraction of the objects)"
    with_ap50 = [f"{name} {value:.3f}" for name, value in zip(names, class_ap50)]
    return {
        "PR": chart(
            "Precision and recall", result.pr_recall, np.nan_to_num(result.pr_precision), (of_objects, of_detections),
            mean=f"mean AP50 {result.metrics['AP50']:.3f}", labels=with_ap50,
        ),
        "F1": chart("F1", confidence, f1, ("confidence threshold", "F1"), mark=mark),
        "P": chart("Precision", confidence, precision, ("confidence threshold", of_detections)),
        "R": chart("Recall", confidence, recall, ("confidence threshold", of_objects)),
    }  # fmt: skip


def confusion_picture(confusion: np.ndarray, names: Sequence[str], title: str) -> np.ndarray:
    """A confusion matrix (C + 1, C + 1): rows predicted, columns true, last background. Colors show fractions of a
    column. Of many classes, those with the most errors are shown."""
    confusion = np.asarray(confusion)
    fractions = confusion / np.maximum(confusion.sum(0, keepdims=True), 1)
    labels = np.array([*map(short_label, names), "background"])
    if len(names) > MOST_CONFUSED:
        wrong = (confusion.sum(0) + confusion.sum(1) - 2 * np.diag(confusion))[:-1]
        shown = np.r_[np.sort(np.argsort(-wrong, kind="stable")[:MOST_CONFUSED]), len(names)]
        confusion, fractions, labels = confusion[np.ix_(shown, shown)], fractions[np.ix_(shown, shown)], labels[shown]
        title += f"; the {MOST_CONFUSED} of {len(names)} classes with the most errors"
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


def tile_images(images: Sequence[np.ndarray], columns: int, *, gap: int = 2) -> np.ndarray:
    """Arranges images in rows of ``columns``, ``gap`` white pixels apart. Unused places, and what is left of the place
    of a smaller image, are white.

    Raises ValueError if there is no image.
    """
    if not images:
        raise ValueError("no images to tile")
    columns = min(columns, len(images))
    height, width = np.max([image.shape[:2] for image in images], axis=0)
    rows = -(-len(images) // columns)
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap, 3)
    sheet = np.full(shape, GAP_COLOR, np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * (height + gap), i % columns * (width + gap)
        sheet[y : y + image.shape[0], x : x + image.shape[1]] = image
    return sheet


def _images(images: Tensor | np.ndarray, limit: int) -> np.ndarray:
    """Converts images (B, C, H, W) to at most ``limit`` as people see them, uint8 (n, H, W, 3)."""
    return np.ascontiguousarray(as_rgb8(_as_array(images[:limit]).transpose(0, 2, 3, 1)))


def _as_array(values: Tensor | np.ndarray) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _with_targets(image: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Draws the boxes of targets (n, 5): class, cx, cy, w, h normalized to the image."""
    height, width = image.shape[:2]
    classes = targets[:, 0].astype(int)
    boxes = cxcywh_to_xyxy(targets[:, 1:] * np.array([width, height, width, height]))
    return draw_boxes(image, boxes, [names[c] for c in classes], class_colors(classes))


def _caption(image: np.ndarray, text: str) -> None:
    write_text(image, text, (0, image.shape[0]), 11, CAPTION_COLOR)


def draw_batch(
    images: Tensor | np.ndarray,
    targets: Tensor | np.ndarray,
    paths: Sequence[str],
    names: Sequence[str],
    *,
    limit: int = 16,
) -> np.ndarray | None:
    """A sheet of the first ``limit`` training images with their targets; None for an empty batch.

    Args:
        images: uint8 (B, 3, H, W) RGB, or of another `PixelFormat`.
        targets: (M, 6) as in `Targets`.
        paths: of the B images, or empty; the file names are written below the images.

    Returns:
        uint8 (H', W', 3) RGB.
    """
    shown = _images(images, limit)
    if not len(shown):
        return None
    rows = _as_array(targets)
    drawn = [_with_targets(image, rows[rows[:, 0] == i, 1:], names) for i, image in enumerate(shown)]
    for image, path in zip(drawn, paths):
        _caption(image, Path(path).name)
    return tile_images(drawn, math.ceil(math.sqrt(len(drawn))))


def draw_detections(
    images: Tensor | np.ndarray,
    detections: Detections,
    targets: Tensor | np.ndarray,
    paths: Sequence[str],
    names: Sequence[str],
    *,
    conf_thres: float = 0.25,
    limit: int = 8,
) -> np.ndarray | None:
    """A sheet of image pairs: the labels on the left, the detections on the right.

    Args:
        images: uint8 (B, 3, H, W) RGB.
        detections: in canvas pixels of ``images``; those below ``conf_thres`` are not drawn.
        targets, paths: as for `draw_batch`.

    Returns:
        uint8 (H', W', 3) RGB, or None for an empty batch.
    """
    shown = _images(images, limit)
    if not len(shown):
        return None
    rows, counts = _as_array(targets), _as_array(detections.counts)
    boxes, scores, classes = (_as_array(v) for v in (detections.boxes_xyxy, detections.scores, detections.classes))
    drawn = []
    for i, image in enumerate(shown):
        keep = (np.arange(scores.shape[1]) < counts[i]) & (scores[i] >= conf_thres)
        labels = [f"{names[c]} {s:.2f}" for c, s in zip(classes[i][keep], scores[i][keep])]
        left = _with_targets(image, rows[rows[:, 0] == i, 1:], names)
        right = draw_boxes(image, boxes[i][keep], labels, class_colors(classes[i][keep]))
        _caption(left, f"labels: {Path(paths[i]).name}" if i < len(paths) else "labels")
        _caption(right, "detections")
        drawn += [left, right]
    return tile_images(drawn, 4 if len(shown) > 1 else 2)
