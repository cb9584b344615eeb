"""Finds the label errors of a whole data set with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from data.dataset.spec import DatasetSpec
from engine.commands.val import score
from engine.evaluation.metrics import score_detections
from engine.evaluation.result import EvalResult
from engine.inference.model import InferenceModel
from engine.issues.issue import CheckedSplit, Issue
from engine.issues.label_errors import find_label_errors, trust_lines
from engine.report.gallery import DrawnDetections
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS, ValConfig
from utils.distributed.context import DistributedContext
from utils.strings import counted

# Minimum detections per label of an image: a label that is left without any would look spurious.
DETECTIONS_PER_LABEL = 3


@dataclass(frozen=True)
class LabelErrors:
    """The label errors that a model finds in all splits, and what it detects; empty without a model."""

    issues: list[Issue] = field(default_factory=list)  # the most probable first
    detections: dict[str, DrawnDetections] = field(default_factory=dict)  # by split, as detect.py shows them
    results: dict[str, EvalResult] = field(default_factory=dict)  # by split: scores as computed by val.py
    trust_notes: list[str] = field(default_factory=list)  # lines about how far to trust the model


def examine_labels(
    config: ValConfig, model: InferenceModel, spec: DatasetSpec, splits: Sequence[CheckedSplit], *, min_score: float
) -> LabelErrors:
    """Finds the label errors of all splits with a score of at least ``min_score``. The model detects as in val.py with
    ``config``, but with enough detections per image for all its labels."""
    issues: list[Issue] = []
    detections: dict[str, DrawnDetections] = {}
    results: dict[str, EvalResult] = {}
    for split in splits:
        max_labels = int(np.diff(split.index.offsets).max(initial=0))
        max_det = min(max(MAX_DETECTIONS, DETECTIONS_PER_LABEL * max_labels), MAX_CANDIDATES)
        settings = replace(config, task=split.name, max_det=max_det)
        scores = score(settings, model, spec, DistributedContext.single(model.device), index=split.index)
        assert scores is not None, "the only process has the scores"
        scored = scores.evaluation.for_ap
        shown = scores.evaluation.detected
        result = scores.evaluation.result
        class_metrics = result.class_metrics
        if max_det > MAX_DETECTIONS:  # labels are judged by all detections; the scores are those of val.py
            num_classes = len(split.index.names)
            truth = replace(scores.truth, max_det=max_det)
            class_metrics = score_detections(truth, scored, num_classes).class_metrics
            shown = shown.top_per_image(MAX_DETECTIONS)
            result = score_detections(scores.truth, scored.top_per_image(MAX_DETECTIONS), num_classes, detected=shown)
        issues += find_label_errors(split, scored, class_metrics, min_score)
        is_known = model.confidence is not None
        threshold = model.threshold(box_voting=True) if is_known else result.shown_confidence
        detections[split.name] = DrawnDetections(shown, threshold)
        results[split.name] = result
    issues.sort(key=lambda issue: issue.score or 0.0, reverse=True)
    title = Path(config.weights).name
    epochs = model.info.get("progress", {}).get("epoch", 0)
    if type(epochs) is int and epochs > 0:
        title += f" (after {counted(epochs, 'epoch')})"
    return LabelErrors(issues, detections, results, trust_lines(title, results, spec.names, issues))
