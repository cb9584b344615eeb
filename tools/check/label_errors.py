"""Finds the label errors of a whole data set with a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.dataset.spec import DatasetSpec
from engine.commands.val import score
from engine.inference.model import InferenceModel
from engine.report.label_errors import CheckedSplit, Issue, find_label_errors, unjudged_classes
from utils.config.settings import ValConfig
from utils.distributed.context import DistributedContext


@dataclass(frozen=True)
class LabelErrors:
    """The label errors that a model finds in all splits; empty without a model."""

    issues: list[Issue] = field(default_factory=list)  # the highest score first
    trust_notes: list[str] = field(default_factory=list)  # lines about how far to trust the model


def examine_labels(
    config: ValConfig, model: InferenceModel, spec: DatasetSpec, splits: Sequence[CheckedSplit], *, min_score: float
) -> LabelErrors:
    """Finds the label errors of all splits with a score of at least ``min_score``, by the detections that val.py scores
    with ``config``."""
    issues: list[Issue] = []
    notes: list[str] = []
    for split in splits:
        settings = replace(config, task=split.name)
        scores = score(settings, model, spec, DistributedContext.single(model.device), index=split.index)
        assert scores is not None, "the only process has the scores"
        result = scores.evaluation.result
        class_ap50 = result.class_metrics["AP50"]
        issues += find_label_errors(split, scores.evaluation.for_ap, class_ap50, min_score)
        if result.class_targets.any():
            unjudged = unjudged_classes(class_ap50, spec.names)
            note = f"{Path(config.weights).name} has AP {result.ap:.3f} on {split.name}"
            notes.append(f"{note}; {unjudged}." if unjudged else f"{note}.")
    issues.sort(key=lambda issue: issue.score or 0.0, reverse=True)
    return LabelErrors(issues, notes)
