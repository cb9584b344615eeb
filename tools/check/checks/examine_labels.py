"""Finds the label errors of a whole data set with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.dataset.spec import DatasetSpec
from engine.commands.scoring import score
from engine.evaluation.metrics import score_detections
from engine.evaluation.result import EvalResult
from engine.inference.model import InferenceModel
from engine.issues.issue import CheckedSplit, Issue
from engine.issues.label_errors import find_label_errors, trust_lines
from engine.report.gallery import DrawnDetections
from tools.check.result import LabelErrors
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS, ValConfig
from utils.detections import DetectionTable
from utils.distributed.context import DistributedContext
from utils.strings import counted

# Minimum detections per label of an image: a label that is left without any would look spurious.
DETECTIONS_PER_LABEL = 3


def examine_labels(
    config: ValConfig, model: InferenceModel, spec: DatasetSpec, splits: Sequence[CheckedSplit], *, min_score: float
) -> LabelErrors:
    """Finds the label errors of all splits with a score of at least ``min_score``. The model detects as in val.py with
    ``config``."""
    issues: list[Issue] = []
    detections: dict[str, DrawnDetections] = {}
    results: dict[str, EvalResult] = {}
    for split in splits:
        detected = _detect_in_split(config, model, spec, split)
        issues += find_label_errors(split, detected.detections, detected.class_metrics, min_score)
        is_known = model.confidence is not None
        threshold = model.threshold(box_voting=True) if is_known else detected.result.shown_confidence
        detections[split.name] = DrawnDetections(detected.shown, threshold)
        results[split.name] = detected.result
    issues.sort(key=lambda issue: issue.score or 0.0, reverse=True)
    title = Path(config.weights).name
    epochs = model.info.get("progress", {}).get("epoch", 0)
    if type(epochs) is int and epochs > 0:
        title += f" (after {counted(epochs, 'epoch')})"
    return LabelErrors(issues, detections, results, trust_lines(title, results, spec.names, issues))


class _SplitDetections(NamedTuple):
    """A model's detections in a split."""

    result: EvalResult  # scores of at most `MAX_DETECTIONS` detections per image, as in val.py
    class_metrics: dict[str, np.ndarray]  # metrics of each class, over all detections
    detections: DetectionTable  # all
    shown: DetectionTable  # as detect.py shows them, at most `MAX_DETECTIONS` per image


def _detect_in_split(
    config: ValConfig, model: InferenceModel, spec: DatasetSpec, split: CheckedSplit
) -> _SplitDetections:
    """Detects objects in a split, with enough detections per image for all its labels."""
    max_labels = int(np.diff(split.index.offsets).max(initial=0))
    max_det = min(max(MAX_DETECTIONS, DETECTIONS_PER_LABEL * max_labels), MAX_CANDIDATES)
    ctx = DistributedContext.single(model.device)
    settings = replace(config, task=split.name, max_det=max_det)
    scores = score(settings, model, spec, ctx, index=split.index)
    assert scores is not None, "the only process has the scores"
    result = scores.evaluation.result
    scored = scores.evaluation.scored
    shown = scores.evaluation.shown
    if max_det == MAX_DETECTIONS:
        return _SplitDetections(result, result.class_metrics, scored, shown)
    classes = len(split.index.names)
    unlimited = score_detections(replace(scores.truth, max_det=max_det), scored, classes)
    shown = shown.top_per_image(MAX_DETECTIONS)
    result = score_detections(scores.truth, scored.top_per_image(MAX_DETECTIONS), classes, shown=shown)
    return _SplitDetections(result, unlimited.class_metrics, scored, shown)
