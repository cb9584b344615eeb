"""A validation's result for people and for other programs: tables, JSON, a line a class and size as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.evaluation.analysis import SIZES, Analysis, Calibration, Reliability, SizeScores, size_limits
from engine.evaluation.average_precision import mean_known
from engine.evaluation.tide import KINDS, ErrorSplit
from utils.files.safe_io import write_whole
from utils.structures import EvalResult, GroundTruth

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


SIZE_COLUMNS = ("class", "size", "instances", "AP50", "AP75", "AP", "AR")


def format_errors(errors: ErrorSplit) -> str:
    """A line a kind of error: how many there are, and the AP50 that is lost by them."""
    rows = [(kind, f"{count:,}", cost) for kind, count, cost in zip(KINDS, errors.counts.sum(0), errors.cost)]
    rows += [("all false positives", "", errors.false_positive_cost), ("all not found", "", errors.false_negative_cost)]
    lines = ["error at IoU 0.5".rjust(22) + "count".rjust(10) + "costs AP50".rjust(12)]
    lines += [f"{name:>22}{count:>10}{number_text(cost):>12}" for name, count, cost in rows]
    return "\n".join(lines)


def format_calibration(calibration: Calibration) -> str:
    """How far confidence is from precision, in one line."""
    scored, shown, threshold = calibration
    if not scored.counts.any():
        return "calibration: nothing was found"
    text = f"calibration: error (ECE) {number_text(scored.error)} over {scored.counts.sum():,} detections"
    if shown.counts.any():
        way = "above" if shown.bias > 0 else "below"
        text += (
            f"; from confidence {threshold:.3f} on {number_text(shown.error)} over {shown.counts.sum():,}, "
            f"whose confidence is {abs(shown.bias):.4f} {way} their precision"
        )
    return text


def size_rows(sizes: SizeScores, names: Sequence[str]) -> Iterator[tuple[str, str, int, tuple[float, ...]]]:
    """Class, size, instances, and AP50, AP75, AP and AR: all classes together, then each."""
    scores = np.stack([sizes.ap50, sizes.ap75, sizes.ap, sizes.recall], -1)
    for at, size in enumerate(SIZES):
        yield "all", size, int(sizes.targets[:, at].sum()), tuple(mean_known(scores[:, at], axis=0).tolist())
    for number, name in enumerate(names):
        for at, size in enumerate(SIZES):
            yield name, size, int(sizes.targets[number, at]), tuple(scores[number, at].tolist())


def format_sizes(sizes: SizeScores, names: Sequence[str], *, verbose: bool = True) -> str:
    """A line a size, and with ``verbose`` a line a size of each class that has such objects."""
    rows = [row for row in size_rows(sizes, names) if row[0] == "all" or (row[2] and verbose)]
    width = max(len(SIZE_COLUMNS[0]), *(len(row[0]) for row in rows)) + 2
    lines = [
        SIZE_COLUMNS[0].rjust(width) + "".join(c.rjust(10 if i < 2 else 8) for i, c in enumerate(SIZE_COLUMNS[1:]))
    ]
    for name, size, count, scores in rows:
        lines.append(f"{name:>{width}}{size:>10}{count:>10}" + "".join(number_text(s).rjust(8) for s in scores))
    return "\n".join(lines)


def write_size_csv(path: str | Path, sizes: SizeScores, names: Sequence[str]) -> None:
    """All rows, unrounded; cells that are nan stay empty."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(SIZE_COLUMNS)
    for *place, scores in size_rows(sizes, names):
        writer.writerow([*place, *("" if math.isnan(s) else repr(s) for s in scores)])
    write_whole(path, text.getvalue())


def analysis_content(analysis: Analysis, names: Sequence[str]) -> dict[str, Any]:
    """As plain data for results.json; nan is None."""
    errors, calibration, sizes = analysis
    content: dict[str, Any] = {
        "errors": {
            "iou": 0.5,
            "ap50": plain_number(errors.ap),
            "kinds": _kinds(errors.counts.sum(0), errors.cost),
            "false_positives_cost": plain_number(errors.false_positive_cost),
            "not_found_cost": plain_number(errors.false_negative_cost),
            "classes": [
                {"class": name, **_kinds(count, cost)}
                for name, count, cost in zip(names, errors.counts, errors.class_cost)
            ],
        },
        "calibration": {
            "threshold": calibration.threshold,
            "scored": _reliability(calibration.scored),
            "shown": _reliability(calibration.shown),
        },
    }
    if sizes is not None:
        content["sizes"] = {
            "areas_px": {name: list(limits) for name, limits in size_limits().items()},
            "rows": [
                dict(zip(SIZE_COLUMNS, (*place, *map(plain_number, scores))))
                for *place, scores in size_rows(sizes, names)
            ],
        }
    return content


def _kinds(counts: np.ndarray, costs: np.ndarray) -> dict[str, dict[str, Any]]:
    return {kind: {"count": int(count), "cost": plain_number(cost)} for kind, count, cost in zip(KINDS, counts, costs)}


def _reliability(part: Reliability) -> dict[str, Any]:
    return {
        "error": plain_number(part.error),
        "bias": plain_number(part.bias),
        "detections": int(part.counts.sum()),
        "edges": part.edges.tolist(),
        "counts": part.counts.tolist(),
        "confidence": [plain_number(v) for v in part.confidence],
        "precision": [plain_number(v) for v in part.precision],
    }
