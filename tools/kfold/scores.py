"""Out-of-fold scores: of each fold's images, by the model that was not trained on them, and of all images together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from engine.evaluation.metrics import METRICS, score_detections
from engine.evaluation.result import EvalResult
from engine.evaluation.tables import number_text
from utils.detections import DetectionTable
from utils.files.safe_io import atomic_write
from utils.labels import GroundTruth
from utils.strings import aligned

DETECTIONS_FILE = "detections.npz"  # file in the folder of a scored fold
# Fields that a file of detections stores.
_TRUTH_ARRAYS = ("offsets", "boxes_xywh_px", "classes", "crowd", "area_px", "image_hw")
_TABLE_ARRAYS = tuple(column.name for column in fields(DetectionTable))


@dataclass(frozen=True)
class ScoredFold:
    """Labels of a fold's images, and detections in them."""

    truth: GroundTruth
    for_ap: DetectionTable  # detections whose AP is computed
    detected: DetectionTable  # detections as detect.py finds them

    def result(self) -> EvalResult:
        """Scores the detections."""
        return score_detections(self.truth, self.for_ap, len(self.truth.category_ids), detected=self.detected).result


def write_fold(path: Path, fold: ScoredFold) -> None:
    """Writes the labels and the detections of a fold."""
    arrays = {f"truth_{name}": getattr(fold.truth, name) for name in _TRUTH_ARRAYS}
    arrays |= {f"ap_{name}": getattr(fold.for_ap, name) for name in _TABLE_ARRAYS}
    arrays |= {f"detected_{name}": getattr(fold.detected, name) for name in _TABLE_ARRAYS}
    with atomic_write(path, durable=True) as file:
        np.savez_compressed(file, category_ids=fold.truth.category_ids, max_det=fold.truth.max_det, **arrays)


def read_fold(path: Path) -> ScoredFold:
    """Reads a file of `write_fold`."""
    with np.load(path, allow_pickle=False) as arrays:
        truth_arrays = {name: arrays[f"truth_{name}"] for name in _TRUTH_ARRAYS}
        truth = GroundTruth(
            **truth_arrays,
            image_ids=tuple(range(len(truth_arrays["offsets"]) - 1)),
            category_ids=tuple(arrays["category_ids"].tolist()),
            max_det=int(arrays["max_det"]),
        )
        for_ap, detected = (
            DetectionTable(**{name: arrays[f"{kind}_{name}"] for name in _TABLE_ARRAYS}) for kind in ("ap", "detected")
        )
    return ScoredFold(truth, for_ap, detected)


def join_folds(folds: Sequence[ScoredFold]) -> ScoredFold:
    """Joins the images of all folds into one split, in the order of the folds, with their positions as ids."""
    first_images = np.cumsum([0, *(fold.truth.num_images for fold in folds)])
    counts = np.concatenate([np.diff(fold.truth.offsets) for fold in folds])
    joined = {
        name: np.concatenate([getattr(fold.truth, name) for fold in folds])
        for name in _TRUTH_ARRAYS
        if name != "offsets"
    }
    truth = GroundTruth(
        offsets=np.r_[0, np.cumsum(counts)].astype(np.int64),
        **joined,
        image_ids=tuple(range(int(first_images[-1]))),
        category_ids=tuple(range(len(folds[0].truth.category_ids))),
        max_det=max(fold.truth.max_det for fold in folds),
    )
    for_ap = _concatenate([fold.for_ap for fold in folds], first_images)
    detected = _concatenate([fold.detected for fold in folds], first_images)
    return ScoredFold(truth, for_ap, detected)


def _concatenate(tables: Sequence[DetectionTable], first_images: np.ndarray) -> DetectionTable:
    """Joins the tables of all folds. ``first_images``: position of each fold's first image in the joined split."""
    moved = (replace(table, image_index=table.image_index + first) for table, first in zip(tables, first_images))
    return DetectionTable.concatenate(moved)


def format_folds(results: Sequence[EvalResult], pooled: EvalResult, names: Sequence[str]) -> list[str]:
    """Returns the lines of two tables: the `METRICS` of each fold, their mean and standard deviation, and the metrics
    of all images scored together; and the AP of each class that has boxes, over all images, with the lowest and highest
    of a fold. A note counts the folds of a mean if a metric is undefined in the others."""
    values = np.array([[result.metrics[metric.name] for metric in METRICS] for result in results])
    rows = [("", "images", *(metric.column for metric in METRICS))]
    for number, (result, row) in enumerate(zip(results, values), 1):
        rows.append((f"fold {number}", str(result.num_images), *map(number_text, row)))
    defined = [column[~np.isnan(column)] for column in values.T]  # float64 (n,), n <= K, of each metric
    rows.append(("mean", "", *(number_text(column.mean() if len(column) else np.nan) for column in defined)))
    rows.append(("std", "", *(number_text(column.std(ddof=1) if len(column) > 1 else np.nan) for column in defined)))
    rows.append(("pooled", str(pooled.num_images), *(number_text(pooled.metrics[m.name]) for m in METRICS)))
    lines = aligned(rows)
    partial = [f"{m.column} {len(column)}" for m, column in zip(METRICS, defined) if 0 < len(column) < len(results)]
    if partial:
        lines.append(f"mean and std are over fewer than {len(results)} folds: {', '.join(partial)}")
    by_fold = np.array([result.class_ap for result in results])
    class_rows: list[tuple[str, ...]] = [("class", "boxes", "pooled AP", "lowest", "highest")]
    for c in np.flatnonzero(pooled.class_targets).tolist():
        scores = (pooled.class_ap[c], np.nanmin(by_fold[:, c]), np.nanmax(by_fold[:, c]))
        class_rows.append((names[c], str(pooled.class_targets[c]), *map(number_text, scores)))
    return lines + aligned(class_rows)
