"""Finds the label errors of a whole data set with a trained model."""

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

# Each image has at least this number of detections per label: a label that no detection is left for looks spurious.
DETECTIONS_PER_LABEL = 3


def label_issues(
    config: ValConfig, model: InferenceModel, spec: DatasetSpec, splits: Sequence[CheckedSplit], min_score: float
) -> tuple[list[Issue], dict[str, DrawnDetections], dict[str, EvalResult]]:
    """Finds the label errors of all splits with a score of at least ``min_score``.

    Returns them, the most probable first; by split, the detections that the report draws; and by split, the scores of
    the model, which are those of val.py with ``config``.
    """
    ctx = DistributedContext.single(model.device)
    issues: list[Issue] = []
    drawn: dict[str, DrawnDetections] = {}
    results: dict[str, EvalResult] = {}
    for split in splits:
        max_labels = int(np.diff(split.index.offsets).max(initial=0))
        max_det = min(max(MAX_DETECTIONS, DETECTIONS_PER_LABEL * max_labels), MAX_CANDIDATES)
        settings = replace(config, task=split.name, max_det=max_det)
        result, evaluator, _ = score(settings, model, spec, ctx, index=split.index)
        table = evaluator.detections
        shown = evaluator.shown
        # The only process of a run has all of them.
        assert result is not None
        assert table is not None
        assert shown is not None
        truth = evaluator.ground_truth
        classes = len(split.index.names)
        class_metrics = result.class_metrics
        if max_det > MAX_DETECTIONS:
            # Label errors need all detections; val.py scores fewer.
            class_metrics = score_detections(replace(truth, max_det=max_det), table, classes).class_metrics
            shown = shown.top_per_image(MAX_DETECTIONS)
            result = score_detections(truth, table.top_per_image(MAX_DETECTIONS), classes, shown=shown)
        issues += find_label_errors(split, table, class_metrics, min_score)
        is_known = model.confidence is not None
        threshold = model.threshold(box_voting=True) if is_known else result.confusion_confidence
        drawn[split.name] = DrawnDetections(shown, threshold)
        results[split.name] = result
    return sorted(issues, key=lambda issue: issue.score or 0.0, reverse=True), drawn, results
