"""Out-of-fold detections: every image is scored by the model that has not seen it, and all are scored together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.commands.val import open_model_and_data, score
from engine.evaluation.metrics import METRICS
from engine.evaluation.tables import number_text
from utils.config.search_settings import KfoldConfig
from utils.config.settings import FIND_BATCH_SIZE, ValConfig
from utils.distributed.context import DistributedContext
from utils.files.safe_io import atomic_write
from utils.strings import aligned
from utils.structures import DetectionTable, EvalResult, GroundTruth

_SHARED = ("imgsz", "batch_size", "single_cls", "max_bad", "cache_dir", "device", "workers", "offline")
_TRUTH = ("offsets", "boxes_xywh_px", "classes", "crowd", "area_px", "image_hw")
_FOUND = DetectionTable.__slots__


@dataclass(frozen=True)
class ScoredFold:
    truth: GroundTruth
    found: DetectionTable


def score_fold(config: KfoldConfig, weights: Path, data: Path, out: Path) -> ScoredFold:
    """Detects in the validation images of the fold ``data`` with ``weights``, and writes the result to ``out``."""
    device = config.device.split(",")[0]
    ctx = DistributedContext.from_environment(device)
    shared = {name: getattr(config, name) for name in _SHARED} | {"device": device}
    if config.batch_size == FIND_BATCH_SIZE:
        del shared["batch_size"]
    validation = ValConfig(weights=str(weights), data=str(data), **shared)
    model, spec = open_model_and_data(validation, ctx)
    _, evaluator, _ = score(validation, model, spec, ctx)
    fold = ScoredFold(evaluator.ground_truth, evaluator.detections)
    arrays = {f"truth_{name}": getattr(fold.truth, name) for name in _TRUTH}
    arrays |= {f"found_{name}": getattr(fold.found, name) for name in _FOUND}
    with atomic_write(out) as file:
        np.savez_compressed(file, category_ids=fold.truth.category_ids, max_det=fold.truth.max_det, **arrays)
    if ctx.device.type == "cuda":
        torch.cuda.empty_cache()
    return fold


def read_fold(path: Path) -> ScoredFold:
    """What `score_fold` has written."""
    with np.load(path, allow_pickle=False) as arrays:
        truth = {name: arrays[f"truth_{name}"] for name in _TRUTH}
        found = {name: arrays[f"found_{name}"] for name in _FOUND}
        limits = {"max_det": int(arrays["max_det"]), "category_ids": tuple(arrays["category_ids"].tolist())}
    images = tuple(range(len(truth["offsets"]) - 1))
    truth = GroundTruth(**truth, **limits, image_ids=images)
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


def format_folds(results: Sequence[EvalResult], pooled: EvalResult, names: Sequence[str]) -> list[str]:
    """Lines: `METRICS` of each fold, their mean and deviation, and those of all images scored together; then for each
    class with boxes AP of all images together, and the lowest and highest AP of a fold."""
    values = np.array([[result.metrics[metric.name] for metric in METRICS] for result in results])
    folds = [("", "images", *(metric.column for metric in METRICS))]
    for number, (result, row) in enumerate(zip(results, values), 1):
        folds.append((f"fold {number}", str(result.num_images), *map(number_text, row)))
    folds += [
        (name, "", *map(number_text, row)) for name, row in (("mean", values.mean(0)), ("std", values.std(0, ddof=1)))
    ]
    folds.append(("pooled", str(pooled.num_images), *(number_text(pooled.metrics[m.name]) for m in METRICS)))
    by_fold = np.array([result.class_ap for result in results])
    classes = [("class", "boxes", "pooled AP", "lowest", "highest")]
    for c in np.flatnonzero(pooled.class_targets):
        scores = pooled.class_ap[c], np.nanmin(by_fold[:, c]), np.nanmax(by_fold[:, c])
        classes.append((names[c], str(pooled.class_targets[c]), *map(number_text, scores)))
    return aligned(folds) + aligned(classes)
