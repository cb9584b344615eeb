"""An analysis for people and for other programs: text, JSON, a line a class and size as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.analysis import Analysis
from utils.calibration import Calibration, Reliability
from utils.error_split import KINDS, ErrorSplit
from utils.eval_report import number_text, plain_number
from utils.metrics import mean_known
from utils.size_scores import SIZES, SizeScores, size_limits
from utils.whole_file import write_whole

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
