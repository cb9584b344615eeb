"""The scores of a validation as tables for the terminal, and as JSON and CSV files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.render.letterbox import CanvasRule
from engine.evaluation.analysis import FOREGROUND_IOU, KINDS, ErrorSplit
from engine.evaluation.matching import AREA_RANGES, SIZES
from engine.evaluation.metrics import METRICS, nanmean
from engine.evaluation.result import EvalResult, SizeScores
from utils.boxes import xyxy_to_xywh
from utils.detections import DetectionTable
from utils.files.safe_io import atomic_write, write_csv, write_whole
from utils.labels import GroundTruth
from utils.strings import aligned, counted, listed

COLUMNS = ("class", "images", "instances", *(metric.column for metric in METRICS))
SIZE_COLUMNS = ("class", "size", "instances", "AP50", "AP75", "AP", "AR")


class Row(NamedTuple):
    """A row of a table; scores are nan where there is nothing to score."""

    name: str
    subset: int | str  # number of images, or the size of the objects
    instances: int
    scores: tuple[float, ...]


def result_rows(result: EvalResult, gt: GroundTruth, names: Sequence[str]) -> list[Row]:
    """Creates a row for all classes together, then one for each, in the order of the classes. Columns: `COLUMNS`."""
    total = Row("all", result.num_images, int(result.class_targets.sum()), tuple(result.metrics.values()))
    scores = np.stack(list(result.class_metrics.values()), axis=1).tolist()
    images = gt.images_per_class(len(names)).tolist()
    targets = result.class_targets.tolist()
    by_class = zip(names, images, targets, scores)
    return [total, *(Row(name, count, objects, tuple(values)) for name, count, objects, values in by_class)]


def size_rows(sizes: SizeScores, names: Sequence[str]) -> list[Row]:
    """Creates a row for each size of all classes together, then of each class. Columns: `SIZE_COLUMNS`."""
    scores = np.stack([sizes.ap50, sizes.ap75, sizes.ap, sizes.recall], -1)
    totals = sizes.targets.sum(0)
    means = nanmean(scores, axis=0)
    return [
        Row(name, size, count, tuple(row))
        for name, by_size, values in zip(["all", *names], [totals, *sizes.targets], [means, *scores])
        for size, count, row in zip(SIZES, by_size.tolist(), values.tolist())
    ]


def protocol_text(canvases: CanvasRule, *, box_voting: bool, tile: int = 0, tta: bool = False) -> str:
    """Formats the protocol of an AP, which differs on other canvases and without box voting: "640 px
    rectangles, box voting". ``tile``: side of tiles, pixels; 0: whole images."""
    if tile:
        canvas = f"tiles of {tile} px"
    elif canvases.fixed_hw is not None or canvases.is_square:
        height, width = canvases.canvas_hw((1, 1))
        canvas = f"{height}x{width} squares" if height == width else f"{height}x{width} (height x width)"
    else:
        canvas = f"{canvases.imgsz} px rectangles"
    return ", ".join([canvas, "box voting" if box_voting else "no box voting", *(["several views"] if tta else [])])


def format_table(rows: Sequence[Row]) -> list[str]:
    """Aligns the lines of `result_rows`. Classes without objects are left out."""
    shown_rows = [row for row in rows if row.name == "all" or row.instances]
    cells = [(row.name, str(row.subset), str(row.instances), *map(number_text, row.scores)) for row in shown_rows]
    return aligned([COLUMNS, *cells])


def format_summary(result: EvalResult, names: Sequence[str]) -> list[str]:
    """Returns lines: AP by size, the confidence of P, R and F1, the classes missed at this confidence, and the time per
    image."""
    sizes = {"small": result.ap_small, "medium": result.ap_medium, "large": result.ap_large}
    by_size = ", ".join(f"{name} {number_text(value)}" for name, value in sizes.items())
    lines = [f"AP by size: {by_size}; P, R and F1 at confidence {result.shown_confidence:.3f}"]
    missed_classes = missed_classes_text(result, names)
    if missed_classes:
        lines.append(missed_classes)
    milliseconds = {name.removeprefix("ms/"): value for name, value in result.extras.items() if name.startswith("ms/")}
    times = ", ".join(f"{name} {value:.1f}" for name, value in milliseconds.items())
    if times:
        lines.append(f"ms per image: {times}; {result.extras['data_wait']:.0%} of the time waiting for data")
    return lines


def missed_classes_text(result: EvalResult, names: Sequence[str]) -> str:
    """Describes the classes without a true positive at the best confidence, and the confidence of each class's best F1.
    Returns "" if there is none."""
    missed = result.missed_at_best_confidence
    if not missed.size:
        return ""
    f1, confidence = (values[1:] for values in result.best_f1)
    best = [f"{names[c]} (best F1 {f1[c]:.3f} at {confidence[c]:.3f})" for c in missed.tolist()]
    classes = listed(best, 5)
    count = counted(missed.size, "class")
    return f"No object of {count} is found at confidence {result.shown_confidence:.3f}: {classes}"


def number_text(value: float) -> str:
    """Formats with four decimals; nan as a dash."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def plain_number(value: float) -> float | None:
    """Converts to a number for JSON, which has no nan: None instead."""
    return None if math.isnan(value) else float(value)


def write_rows(path: str | Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Writes all rows to a CSV file, unrounded; nan is an empty cell."""
    lines: list[Sequence[object]] = [columns]
    for *cells, scores in rows:
        lines.append([*cells, *("" if math.isnan(score) else score for score in scores)])
    write_csv(path, lines)


def write_results_json(
    path: str | Path,
    result: EvalResult,
    *,
    rows: Sequence[Row],
    sizes: Sequence[Row],
    errors: ErrorSplit,
    settings: dict[str, Any],
) -> None:
    """Writes all scores, the confusion matrix, and the ``settings`` of the validation; nan is null.

    ``rows`` and ``sizes``: see `result_rows` and `size_rows`.
    """
    overall = {name.lower(): value for name, value in result.metrics.items()}
    overall |= {name: getattr(result, name) for name in ("ap_small", "ap_medium", "ap_large")}
    _, *class_rows = rows
    class_errors = zip(class_rows, errors.counts, errors.class_cost)
    content = {
        **{name: plain_number(value) for name, value in overall.items()},
        "best_confidence": result.threshold,  # null: no detection is correct
        "protocol": result.protocol,
        "images": result.num_images,
        "classes": _json_rows(COLUMNS, class_rows),
        "confusion": {
            "rows": "predicted, last: background",
            "columns": "true, last: background",
            "confidence": result.shown_confidence,
            "counts": result.confusion.tolist(),
        },
        "errors": {
            "iou": FOREGROUND_IOU,
            "confidence": result.shown_confidence,  # the errors of the detections above it
            "ap50": plain_number(errors.ap),
            "kinds": _kinds(errors.counts.sum(0), errors.cost),
            "false_positives_cost": plain_number(errors.false_positive_cost),
            "not_found_cost": plain_number(errors.false_negative_cost),
            "classes": [{"class": row.name, **_kinds(count, cost)} for row, count, cost in class_errors],
        },
        "sizes": {
            "areas_px": dict(zip(SIZES, AREA_RANGES.tolist())),  # smallest and largest
            "rows": _json_rows(SIZE_COLUMNS, sizes),
        },
        "extras": {name: plain_number(value) for name, value in result.extras.items()},
        "settings": settings,
    }
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _json_rows(columns: Sequence[str], rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [dict(zip(columns, (*cells, *map(plain_number, scores)))) for *cells, scores in rows]


def _kinds(counts: np.ndarray, costs: np.ndarray) -> dict[str, dict[str, Any]]:
    return {kind: {"count": int(count), "cost": plain_number(cost)} for kind, count, cost in zip(KINDS, counts, costs)}


def write_predictions(path: str | Path, table: DetectionTable, gt: GroundTruth) -> None:
    """Writes COCO JSON with one detection per line, which pycocotools reads with ``loadRes``.

    Keys: image_id, category_id, bbox (x, y, w, h in pixels), score. Ids are taken from ``gt``.
    """
    image_ids = [json.dumps(i) for i in gt.image_ids]
    boxes = np.round(xyxy_to_xywh(table.boxes_xyxy_px), 5)
    scores = np.round(table.scores, 8)
    categories = np.asarray(gt.category_ids, dtype=np.int64)[table.classes]
    with atomic_write(path) as file:
        for number, (i, category, box, score) in enumerate(zip(table.image_index, categories, boxes, scores)):
            row = f'"image_id": {image_ids[i]}, "category_id": {category}, "bbox": {box.tolist()}, "score": {score}'
            file.write(f"{',' if number else '['}\n{{{row}}}".encode())
        file.write(b"\n]\n" if scores.size else b"[]\n")
