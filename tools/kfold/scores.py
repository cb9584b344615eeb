"""Out-of-fold detections: every image is scored by the model that has not seen it, and all are scored together."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.evaluation.metrics import METRICS, score_detections
from engine.evaluation.report import number_text
from engine.validate import open_models, score
from utils.config.search_settings import KfoldConfig
from utils.config.settings import FIND_BATCH_SIZE, ValConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.safe_io import atomic_write
from utils.strings import aligned
from utils.structures import DetectionTable, EvalResult, GroundTruth

_SHARED = ("imgsz", "batch_size", "single_cls", "max_bad", "cache_dir", "device", "workers", "offline")
_TRUTH = ("offsets", "boxes_xywh_px", "classes", "crowd", "area_px", "image_hw")
_FOUND = DetectionTable.__slots__


@dataclass(frozen=True)
class ScoredFold:
    """The labels of a fold's images and what its model found in them."""

    truth: GroundTruth
    found: DetectionTable


def score_fold(config: KfoldConfig, weights: Path, data: Path, out: Path) -> ScoredFold:
    """Detects in the validation images of the fold ``data`` with ``weights``, and keeps the result in the file
    ``out``."""
    device = config.device.split(",")[0]
    ctx = DistributedContext.from_environment(device)
    shared = {name: getattr(config, name) for name in _SHARED} | {"device": device}
    if config.batch_size == FIND_BATCH_SIZE:
        del shared["batch_size"]
    validation = ValConfig(weights=[str(weights)], data=str(data), **shared)
    (model,), spec = open_models(validation, ctx)
    _, evaluator, _ = score(validation, model, spec, None, ctx)
    fold = ScoredFold(evaluator.ground_truth, evaluator.detections)
    arrays = {f"truth_{name}": getattr(fold.truth, name) for name in _TRUTH}
    arrays |= {f"found_{name}": getattr(fold.found, name) for name in _FOUND}
    with atomic_write(out) as file:
        np.savez_compressed(file, category_ids=fold.truth.category_ids, max_det=fold.truth.max_det, **arrays)
    if ctx.device.type == "cuda":
        torch.cuda.empty_cache()
    return fold


def read_fold(path: Path) -> ScoredFold:
    """What `score_fold` has written. Raises UserError for a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            truth = {name: arrays[f"truth_{name}"] for name in _TRUTH}
            found = {name: arrays[f"found_{name}"] for name in _FOUND}
            limits = {"max_det": int(arrays["max_det"])} if "max_det" in arrays else {}
            categories = tuple(arrays["category_ids"].tolist())
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        raise UserError(f"{path}: damaged; remove it, and the same command scores this fold again") from None
    images = tuple(range(len(truth["offsets"]) - 1))
    truth = GroundTruth(**truth, **limits, image_ids=images, category_ids=categories)
    return ScoredFold(truth, DetectionTable(**found))


def pool(folds: Sequence[ScoredFold]) -> ScoredFold:
    """The images of all folds as one split, in the order of the folds; ids of images are their positions."""
    images = np.cumsum([0, *(fold.truth.num_images for fold in folds)])
    counts = np.concatenate([np.diff(fold.truth.offsets) for fold in folds])
    joined = {
        name: np.concatenate([getattr(fold.truth, name) for fold in folds]) for name in _TRUTH if name != "offsets"
    }
    truth = GroundTruth(
        offsets=np.r_[0, np.cumsum(counts)].astype(np.int64),
        **joined,
        image_ids=tuple(range(int(images[-1]))),
        category_ids=tuple(range(len(folds[0].truth.category_ids))),
        max_det=max(fold.truth.max_det for fold in folds),
    )
    found = (replace(fold.found, image_index=fold.found.image_index + first) for fold, first in zip(folds, images))
    return ScoredFold(truth, DetectionTable.concatenate(found))


def result_of(fold: ScoredFold, num_classes: int) -> EvalResult:
    return score_detections(fold.truth, fold.found, num_classes)


def fold_rows(results: Sequence[EvalResult], pooled: EvalResult) -> list[tuple[str, int | None, list[float]]]:
    """A row a fold, their mean and standard deviation, and all images scored together: name, images, and `METRICS`."""
    values = np.array([[result.metrics[metric.name] for metric in METRICS] for result in results])
    rows = [(f"fold {number}", r.num_images, row) for number, (r, row) in enumerate(zip(results, values.tolist()), 1)]
    rows += [("mean", None, values.mean(0).tolist()), ("std", None, values.std(0, ddof=1).tolist())]
    return [*rows, ("pooled", pooled.num_images, [pooled.metrics[metric.name] for metric in METRICS])]


def class_rows(
    results: Sequence[EvalResult], pooled: EvalResult, names: Sequence[str]
) -> list[tuple[str, int, float, float, float]]:
    """For each class with boxes: name, boxes, AP of all images together, lowest and highest AP of a fold."""
    by_fold = np.array([result.class_ap for result in results])
    return [
        (names[c], int(pooled.class_targets[c]), float(pooled.class_ap[c]),
         float(np.nanmin(by_fold[:, c])), float(np.nanmax(by_fold[:, c])))
        for c in np.flatnonzero(pooled.class_targets)
    ]  # fmt: skip


def format_folds(results: Sequence[EvalResult], pooled: EvalResult, names: Sequence[str]) -> list[str]:
    """The lines of `fold_rows`, then `class_rows`."""
    folds = [("", "images", *(metric.column for metric in METRICS))]
    for name, images, row in fold_rows(results, pooled):
        folds.append((name, "" if images is None else str(images), *map(number_text, row)))
    classes = [("class", "boxes", "pooled AP", "lowest", "highest")]
    for name, boxes, *values in class_rows(results, pooled, names):
        classes.append((name, str(boxes), *map(number_text, values)))
    return aligned(folds) + aligned(classes)
