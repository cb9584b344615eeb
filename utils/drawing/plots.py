"""Plots of a run, and sheets of labeled images. Matplotlib is imported when a figure is created."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from utils.boxes import cxcywh_to_xyxy
from utils.drawing.draw import class_colors, draw_boxes, tile_images, write_text
from utils.files.results_csv import read_columns
from utils.files.safe_io import atomic_write
from utils.structures import Detections, EvalResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY_CLASSES = 20  # with more, curves have no legend, and confusion matrices no numbers
MOST_LETTERS = 40  # of a name in a figure
CAPTION_COLOR = np.array([40, 40, 40])
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


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, created without pyplot, which has global state and needs a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, out: Path) -> None:
    """Writes a PNG file atomically."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")  # class names in a script that the font lacks
        with atomic_write(out) as file:
            figure.savefig(file, format="png", dpi=130)


def _panel_of(column: str) -> str:
    """``train/box`` and ``val/box`` share the panel "box"; all learning rates share one."""
    head, _, tail = column.partition("/")
    return head if head == "lr" or not tail else tail


def panels_of(columns: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """The columns that have a finite value, by the quantity that they measure, without "epoch"."""
    panels: dict[str, list[str]] = {}
    for name, values in columns.items():
        if name != "epoch" and np.isfinite(values).any():
            panels.setdefault(_panel_of(name), []).append(name)
    return panels


def axis_name(panel: str) -> str:
    """The name of a panel's y axis, with the unit."""
    return _AXIS_NAMES.get(panel, "loss (no unit)")


def _label(text: str) -> str:
    """A name as Matplotlib shall show it: shortened to leave space for the axes; with dollars that are no formula; and
    with a space before a first underscore, which would leave the line out of the legend."""
    text = (text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def plot_curves(csv_path: Path, out: Path) -> None:
    """Plots results.csv over epochs. Writes nothing if there is no finite value."""
    if figure := curves_figure(read_columns(csv_path)):
        save_figure(figure, out)


def curves_figure(columns: Mapping[str, np.ndarray]) -> Figure | None:
    """The columns of results.csv over epochs, with one panel per quantity, which training and validation share; None if
    there is no finite value."""
    epochs, panels = columns.get("epoch", np.empty(0)), panels_of(columns)
    if not panels:
        return None
    across = min(5, len(panels))
    down = math.ceil(len(panels) / across)
    figure = new_figure(3.2 * across, 2.6 * down)
    for axes, (title, names) in zip(figure.subplots(down, across, squeeze=False).flat, panels.items()):
        for name in names:
            known = np.isfinite(columns[name])
            axes.plot(epochs[known], columns[name][known], marker=".", markersize=4, linewidth=1.3, label=_label(name))
        axes.set_title(_label(title), fontsize=10)
        axes.set_xlabel("epoch", fontsize=8)
        axes.set_ylabel(axis_name(title), fontsize=8)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(names) > 1:
            axes.legend(fontsize=7)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    return figure


def plot_run_curves(csv_paths: Mapping[str, Path], out: Path) -> None:
    """Plots results.csv of several runs over epochs, with one panel per column. Writes nothing if there is no finite
    value. ``csv_paths``: by the run's label."""
    tables = {label: read_columns(path) for label, path in csv_paths.items()}
    runs = {label: columns for label, columns in tables.items() if columns}  # a run may have no complete epoch
    panels = dict.fromkeys(name for columns in runs.values() for names in panels_of(columns).values() for name in names)
    if not panels:
        return
    across = min(4, len(panels))
    down = math.ceil(len(panels) / across)
    figure = new_figure(3.6 * across, 2.7 * down)
    grid = figure.subplots(down, across, squeeze=False)
    for axes, name in zip(grid.flat, panels):
        for label, columns in runs.items():
            values = columns.get(name, np.full_like(columns["epoch"], np.nan))
            known = np.isfinite(values)
            style = {"marker": ".", "markersize": 4, "linewidth": 1.3}
            axes.plot(columns["epoch"][known], values[known], **style, label=_label(label))
        axes.set_title(_label(name), fontsize=10)
        axes.set(xlabel="epoch", ylabel=axis_name(_panel_of(name)))
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", fontsize=8)
    save_figure(figure, out)


def plot_metric_curves(result: EvalResult, names: Sequence[str], out_dir: Path) -> list[Path]:
    """Writes PR_curve.png, F1_curve.png, P_curve.png and R_curve.png at IoU 0.5, with a thin line for each class that
    has objects and a thick one for their mean. Writes nothing if no class has objects. Returns the paths."""
    shown = np.flatnonzero(np.asarray(result.class_targets) > 0)
    if not len(shown):
        return []
    precision, recall = np.nan_to_num(result.curve_precision), np.nan_to_num(result.curve_recall)
    f1 = np.nan_to_num(result.curve_f1)
    ap50, class_ap50 = result.metrics["AP50"], result.class_metrics["AP50"]
    labels = [f"{_label(names[c])} {class_ap50[c]:.3f}" for c in shown]
    confidence = result.curve_confidence
    plain = [_label(names[c]) for c in shown]
    best = f"all {f1[shown].mean(0).max():.3f} at confidence {result.best_confidence:.3f}"
    paths = [Path(out_dir) / f"{kind}_curve.png" for kind in ("PR", "F1", "P", "R")]
    pr = np.nan_to_num(result.pr_precision[shown])
    _plot_lines(result.pr_recall, pr, labels, f"all {ap50:.3f} mAP50", "recall", "precision", paths[0])
    curves = ((f1, best, "F1"), (precision, "all", "precision"), (recall, "all", "recall"))
    for (values, mean_label, name), path in zip(curves, paths[1:]):
        _plot_lines(confidence, values[shown], plain, mean_label, "confidence", name, path)
    return paths


def _plot_lines(
    x: np.ndarray, lines: np.ndarray, labels: list[str], mean_label: str, x_name: str, y_name: str, out: Path
) -> None:
    """Lines (C, S) over x (S,), and their mean."""
    figure = new_figure(7.5, 5)
    axes = figure.subplots()
    few = len(labels) <= MANY_CLASSES
    for line, label in zip(lines, labels):
        axes.plot(x, line, linewidth=1, **({"label": label} if few else {"alpha": 0.4, "color": "0.7"}))
    axes.plot(x, lines.mean(0), linewidth=3, zorder=3, color="tab:blue", label=mean_label)
    axes.set(xlabel=x_name, ylabel=y_name, xlim=(0, 1), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, out)


def plot_confusion(confusion: np.ndarray, names: Sequence[str], confidence: float, out: Path) -> None:
    """Plots a confusion matrix (C + 1, C + 1) of the detections from ``confidence`` on: rows predicted, columns true,
    last background. Colors show fractions of a column."""
    confusion = np.asarray(confusion)
    labels = [*map(_label, names), "background"]
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
    title = f"detections from confidence {confidence:.3f} on, matched at IoU 0.45"
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
        bars.set_xticks(np.arange(len(names)), [*map(_label, names)], rotation=90, fontsize=8)
    bars.set(xlabel="class", ylabel="boxes")
    some = np.linspace(0, len(boxes) - 1, min(len(boxes), 800)).astype(int)
    half = boxes[some, 2:] / 2
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]])
    lines = 0.5 + half[:, None, :] * corners
    outlines.add_collection(LineCollection(lines, colors=class_colors(classes[some]) / 255, linewidths=0.6, alpha=0.6))
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


def _images(images: Tensor | np.ndarray, limit: int) -> np.ndarray:
    """Converts uint8 (B, 3, H, W) to at most ``limit`` images (n, H, W, 3)."""
    return np.ascontiguousarray(_as_array(images[:limit]).transpose(0, 2, 3, 1))


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
        images: uint8 (B, 3, H, W) RGB.
        targets: (M, 6) as in `Batch.targets`.
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
