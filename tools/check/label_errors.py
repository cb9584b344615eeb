"""Asks a trained model for the label errors of a whole data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data.source.dataset_spec import DatasetSpec
from engine.commands.val import score
from engine.evaluation.issues import CheckedSplit, Issue
from engine.evaluation.label_errors import find_label_errors
from engine.evaluation.metrics import score_detections
from engine.inference.model import InferenceModel
from engine.report.gallery import DrawnDetections
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS, ValConfig
from utils.distributed.context import DistributedContext
from utils.structures import EvalResult

PER_LABEL = 3  # detections per image for each of its labels, at least: a label that none is left for looks spurious


def label_issues(
    config: ValConfig, model: InferenceModel, spec: DatasetSpec, splits: Sequence[CheckedSplit], least_score: float
) -> tuple[list[Issue], dict[str, DrawnDetections], dict[str, EvalResult]]:
    """The label errors of all splits with a score of at least ``least_score``, the most probable first; and by split
    what is drawn, and the scores of the model, which are those of val.py with ``config``."""
    ctx = DistributedContext.single(model.device)
    issues: list[Issue] = []
    drawn: dict[str, DrawnDetections] = {}
    results: dict[str, EvalResult] = {}
    for split in splits:
        most_labels = int(np.diff(split.index.offsets).max(initial=0))
        max_det = min(max(MAX_DETECTIONS, PER_LABEL * most_labels), MAX_CANDIDATES)
        settings = replace(config, task=split.name, max_det=max_det)
        result, evaluator, _ = score(settings, model, spec, ctx, index=split.index)
        table, shown = evaluator.detections, evaluator.shown
        truth, classes = evaluator.ground_truth, len(split.index.names)
        class_metrics = result.class_metrics
        if max_det > MAX_DETECTIONS:
            # All detections tell of labels; val.py scores fewer.
            class_metrics = score_detections(replace(truth, max_det=max_det), table, classes).class_metrics
            shown = shown.top_per_image(MAX_DETECTIONS)
            result = score_detections(truth, table.top_per_image(MAX_DETECTIONS), classes, shown=shown)
        issues += find_label_errors(split, table, class_metrics, least_score)
        is_known = model.confidence is not None
        threshold = model.threshold(box_voting=True) if is_known else result.confusion_confidence
        drawn[split.name] = DrawnDetections(shown, threshold)
        results[split.name] = result
    return sorted(issues, key=lambda issue: -issue.score), drawn, results
