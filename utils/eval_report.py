"""A validation's result for people and for other programs: the table, results.json, a line a class as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.structures import EvalResult, GroundTruth
from utils.whole_file import write_whole

COLUMNS = ("class", "images", "instances", "P", "R", "F1", "AP50", "AP75", "AP")


class Row(NamedTuple):
    """One line of the table; scores are nan where there is nothing to score."""

    name: str
    images: int
    instances: int
    scores: tuple[float, ...]  # P, R, F1, AP50, AP75, AP


def result_rows(result: EvalResult, gt: GroundTruth, names: Sequence[str]) -> list[Row]:
    """A row for all classes together, then one for each, in the order of the classes."""
    total = (result.precision, result.recall, result.f1, result.ap50, result.ap75, result.ap)
    rows = [Row("all", result.num_images, int(result.class_targets.sum()), total)]
    images = images_of_classes(gt, len(names))
    scores = np.stack(
        [
            result.class_precision,
            result.class_recall,
            result.class_f1,
            result.class_ap50,
            result.class_ap75,
            result.class_ap,
        ],
        axis=1,
    )
    for index, name in enumerate(names):
        rows.append(Row(name, int(images[index]), int(result.class_targets[index]), tuple(scores[index].tolist())))
    return rows


def images_of_classes(gt: GroundTruth, num_classes: int) -> np.ndarray:
    """Images that hold at least one object of each class, crowd left out: int64 (C,)."""
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    pairs = np.unique((image * num_classes + gt.classes)[~gt.crowd])
    return np.bincount(pairs % num_classes, minlength=num_classes)


def format_table(rows: Sequence[Row], *, verbose: bool = True) -> str:
    """Aligned text: the row for all classes and, with ``verbose``, those of the classes that have objects."""
    shown = [rows[0], *(r for r in rows[1:] if r.instances and verbose)]
    width = max(len(COLUMNS[0]), *(len(r.name) for r in shown)) + 2
    lines = [COLUMNS[0].rjust(width) + "".join(c.rjust(10 if i < 2 else 8) for i, c in enumerate(COLUMNS[1:]))]
    for row in shown:
        counts = f"{row.images:>10}{row.instances:>10}"
        lines.append(row.name.rjust(width) + counts + "".join(number_text(s).rjust(8) for s in row.scores))
    return "\n".join(lines)


def format_summary(result: EvalResult) -> str:
    """AP by size, the confidence behind P, R and F1, and the time, in two lines."""
    sizes = zip(("small", "medium", "large"), (result.ap_small, result.ap_medium, result.ap_large))
    lines = [
        "AP by size: " + ", ".join(f"{name} {number_text(value)}" for name, value in sizes)
        + f"; P, R and F1 at confidence {result.best_confidence:.3f}"
    ]  # fmt: skip
    times = [f"{k[3:]} {v:.1f}" for k, v in result.extras.items() if k.startswith("ms/")]
    if times:
        wait = (
            f"; {result.extras['data_wait']:.0%} of the time waiting for data" if "data_wait" in result.extras else ""
        )
        lines.append(f"ms an image: {', '.join(times)}{wait}")
    return "\n".join(lines)


def number_text(value: float) -> str:
    """Four places, or a dash for nan."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def write_class_csv(path: str | Path, rows: Sequence[Row]) -> None:
    """All rows, unrounded; cells that are nan stay empty."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([*row[:3], *("" if math.isnan(s) else repr(s) for s in row.scores)])
    write_whole(path, text.getvalue())


def write_results_json(
    path: str | Path, result: EvalResult, rows: Sequence[Row], settings: dict, analyses: dict | None = None
) -> None:
    """Scores, per-class scores, the confusion matrix, ``analyses`` by name, and the settings that led to them; nan is
    null."""
    overall = (
        "precision",
        "recall",
        "f1",
        "best_confidence",
        "ap",
        "ap50",
        "ap75",
        "ap_small",
        "ap_medium",
        "ap_large",
    )
    content = {
        **{name: plain_number(getattr(result, name)) for name in overall},
        "images": result.num_images,
        "classes": [
            dict(zip(COLUMNS, (*row[:3], *map(plain_number, row.scores)))) for row in rows[1:]
        ],
        "confusion": {
            "rows": "predicted, last: background",
            "columns": "true, last: background",
            "counts": result.confusion.tolist(),
        },
        **(analyses or {}),
        "extras": {name: plain_number(value) for name, value in result.extras.items()},
        "settings": settings,
    }  # fmt: skip
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def plain_number(value: float) -> float | None:
    """As JSON has it: None for nan."""
    return None if math.isnan(value) else float(value)
