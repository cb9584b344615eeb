"""Confidence thresholds stored in exported files. For those of a validation, see models/postprocess/selection.py."""

from __future__ import annotations

from typing import NamedTuple

from engine.evaluation.result import EvalResult
from engine.formats.resolved_export import ResolvedExport
from engine.inference.model import CheckpointModel


class Thresholds(NamedTuple):
    """Confidence thresholds of a file; None: unknown."""

    output: float | None  # for the output as it is, after NMS if it needs that
    voting: float | None  # for the output after NMS with box voting


def trained_thresholds(model: CheckpointModel, options: ResolvedExport) -> Thresholds:
    """Returns the thresholds of training's validation; None for the branch that it does not validate."""
    output = output_threshold(model, options, votes=model.nms_iou is not None)
    return Thresholds(model.confidence if output is None else output, model.confidence)


def output_threshold(scores: EvalResult | CheckpointModel, options: ResolvedExport, *, votes: bool) -> float | None:
    """Returns the threshold for the output of a file as it is; None: unknown.

    No stored threshold matches a file's output exactly. An end2end file is closest to the detections for AP if both use
    box voting or neither does; everything else is closest to those of detect.py without box voting. That the NMS
    differs matters less: for yolov8n on COCO128, the threshold is 0.289 with votes, and without votes 0.203 under one
    kind of NMS, 0.205 under the other.

    ``votes``: whether boxes have voted in the scored detections.
    """
    has_final_rows = options.layout == "end2end"
    if has_final_rows and options.box_voting == votes:
        return scores.scored_confidence
    return scores.plain_confidence
