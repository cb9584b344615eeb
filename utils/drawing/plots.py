"""Plots of a run: results over epochs, precision and recall, confusions, the labels of a data set, and sheets of images
with their boxes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from utils.boxes import cxcywh_to_xyxy
from utils.config.pixels import as_rgb8
from utils.drawing.draw import class_colors, draw_boxes, write_text
from utils.drawing.figures import Chart, Line, chart_figure, grid_figure, new_figure, save_figure, short_label
from utils.files.results_csv import read_columns
from utils.structures import Detections, EvalResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY_CLASSES = 20  # with more, most curves are gray, and confusion matrices have no numbers
MOST_COLORED, MOST_FAINT = 8, 100  # of many classes in a figure
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


def _panel_of(column: str) -> str:
    """``train/box`` and ``val/box`` share the panel "box"; all learning rates share one."""
    head, _, tail = column.partition("/")
    return head if head == "lr" or not tail else tail


def _panels(columns: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    """The columns that have a finite value, by the quantity that they measure, without "epoch"."""
    panels: dict[str, list[str]] = {}
    for name, values in columns.items():
        if name != "epoch" and np.isfinite(values).any():
            panels.setdefault(_panel_of(name), []).append(name)
    return panels


def history_charts(columns: Mapping[str, np.ndarray]) -> list[Chart]:
    """The columns of results.csv over epochs, with one chart per quantity, which training and validation share. Lines
    join the epochs that have a value, as not each epoch is validated."""
    panels = _panels(columns)
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


def curves_figure(columns: Mapping[str, np.ndarray]) -> Figure | None:
    """The columns of results.csv over epochs; None if there is no finite value."""
    return grid_figure(history_charts(columns), 5)


def plot_curves(csv_path: Path, out: Path) -> None:
    """Plots results.csv over epochs. Writes nothing if there is no finite value."""
    if figure := curves_figure(read_columns(csv_path)):
        save_figure(figure, out)


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
        note = f"; the {MOST_COLORED} classes with the lowest AP50 have colors"
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
        return Chart(f"{title} at IoU 0.5{note}", lines, *axes, (0, 1), (0, 1.02), mark=mark)

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


def plot_metric_curves(result: EvalResult, names: Sequence[str], out_dir: Path) -> list[Path]:
    """Writes PR_curve.png, F1_curve.png, P_curve.png and R_curve.png (see `metric_charts`). Returns the paths."""
    charts = metric_charts(result, names)
    paths = [Path(out_dir) / f"{kind}_curve.png" for kind in charts]
    for chart, path in zip(charts.values(), paths):
        save_figure(chart_figure(chart), path, dpi=220)
    return paths


def plot_confusion(confusion: np.ndarray, names: Sequence[str], confidence: float, out: Path) -> None:
    """Plots a confusion matrix (C + 1, C + 1) of the detections from ``confidence`` on: rows predicted, columns true,
    last background. Colors show fractions of a column."""
    confusion = np.asarray(confusion)
    labels = [*map(short_label, names), "background"]
    fractions = confusion / np.maximum(confusion.sum(0, keepdims=True), 1)
    side = float(np.clip(0.55 * len(labels) + 2, 5, 24))
    figure = new_figure(side * 1.15, side)
    axes = figure.subplots()
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="fraction of the true class", shrink=0.8)
    step = max(1, len(labels) // 60)
    ticks = np.arange(0, len(labels), step)
    axes.set_xticks(ticks, [labels[i] for i in ticks], rotation=90, fontsize=8)
    axes.set_yticks(ticks, [labels[i] for i in ticks], fontsize=8)
    title = f"detections above confidence {confidence:.3f} on, matched at IoU 0.45"
    axes.set(xlabel="true class", ylabel="predicted class", title=title)
    if len(labels) <= MANY_CLASSES + 1:
        for row, column in np.argwhere(confusion > 0):
            ink = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, str(confusion[row, column]), ha="center", va="center", fontsize=7, color=ink)
    save_figure(figure, out)


def plot_labels(classes: np.ndarray, boxes_norm: np.ndarray, names: Sequence[str], out: Path) -> None:
    """Plots the boxes of a data set: their number by class, their outlines about one center, their centers and sizes.

    Args:
        classes: (n,) 0-based.
        boxes_norm: (n, 4) center and size, normalized to the image.
    """
    from matplotlib.collections import LineCollection

    figure = new_figure(9, 8)
    (bars, outlines), (centers, sizes) = figure.subplots(2, 2)
    classes = np.asarray(classes, np.int64).reshape(-1)
    boxes = np.asarray(boxes_norm, np.float64).reshape(-1, 4)
    counts = np.bincount(classes, minlength=len(names))
    bars.bar(np.arange(len(counts)), counts, color=class_colors(np.arange(len(counts))) / 255)
    if len(names) <= 2 * MANY_CLASSES:
        bars.set_xticks(np.arange(len(names)), [*map(short_label, names)], rotation=90, fontsize=8)
    bars.set(xlabel="class", ylabel="boxes")
    sampled = np.linspace(0, len(boxes) - 1, min(len(boxes), 800)).astype(int)
    half = boxes[sampled, 2:] / 2
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]])
    lines = 0.5 + half[:, None, :] * corners
    outlines.add_collection(
        LineCollection(lines, colors=class_colors(classes[sampled]) / 255, linewidths=0.6, alpha=0.6)
    )
    outlines.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title="shapes about one center")
    outlines.set(xlabel="fraction of the image's width", ylabel="fraction of its height")
    counts = centers.hist2d(boxes[:, 0], boxes[:, 1], bins=50, range=((0, 1), (0, 1)), cmap="viridis")
    figure.colorbar(counts[3], ax=centers, label="boxes", shrink=0.8)
    centers.set(xlabel="center x (fraction of the width)", ylabel="center y (fraction of the height)", aspect="equal")
    centers.invert_yaxis()
    counts = sizes.hist2d(boxes[:, 2], boxes[:, 3], bins=50, range=((0, 1), (0, 1)), cmap="viridis")
    figure.colorbar(counts[3], ax=sizes, label="boxes", shrink=0.8)
    sizes.set(xlabel="width (fraction of the image's)", ylabel="height (fraction of the image's)", aspect="equal")
    save_figure(figure, out)


def tile_images(images: Sequence[np.ndarray], columns: int, *, gap: int = 2) -> np.ndarray:
    """Arranges images of one size in rows of ``columns``, ``gap`` white pixels apart. Unused places are white.

    Raises ValueError if there is no image.
    """
    if not images:
        raise ValueError("no images to tile")
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap, 3)
    sheet = np.full(shape, GAP_COLOR, np.uint8)
    for i, image in enumerate(images):
        y, x = i // columns * (height + gap), i % columns * (width + gap)
        sheet[y : y + height, x : x + width] = image
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
