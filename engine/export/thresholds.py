"""The confidence thresholds that a file states. models/postprocess/detections.py explains those of a validation."""

from __future__ import annotations

from typing import NamedTuple

from engine.evaluation.result import EvalResult
from engine.inference.model import CheckpointModel
from utils.config.settings import ExportConfig


class Thresholds(NamedTuple):
    """Confidence thresholds of a file; None: unknown."""

    output: float | None  # for the output as it is, after NMS if it needs that
    voting: float | None  # for the output after NMS with box voting


def trained_thresholds(model: CheckpointModel, config: ExportConfig) -> Thresholds:
    """Returns the thresholds of training's validation; None for the branch that it does not validate."""
    output = output_threshold(model, config, votes=model.nms_iou is not None)
    return Thresholds(model.confidence if output is None else output, model.confidence)


def output_threshold(scores: EvalResult | CheckpointModel, config: ExportConfig, *, votes: bool) -> float | None:
    """Returns the threshold for the output of a file as it is; None: unknown.

    A file returns neither of the detections that ``scores`` has thresholds for. Those of an end2end file are most like
    the scored ones if these were voted on alike (``votes``: whether boxes voted in them); all others are most like the
    shown ones without votes. That the NMS differs matters less: for yolov8n on COCO128, the threshold is 0.289 with
    votes, and without votes 0.203 under one kind of NMS, 0.205 under the other.
    """
    has_final_rows = config.layout == "end2end"
    if has_final_rows and config.box_voting == votes:
        return scores.scored_confidence
    return scores.plain_confidence
