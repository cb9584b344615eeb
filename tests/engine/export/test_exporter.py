"""The confidence thresholds that an export stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.export.exporter import Thresholds, trained_thresholds
from engine.export.options import resolve_options
from engine.inference.model import CheckpointModel
from models.detector import build_detector
from tests.helpers.tiny import TINY_MODEL
from utils.config.settings import ExportConfig

PROGRESS = {"confidence": 0.4, "plain_confidence": 0.3, "scored_confidence": 0.5}


@pytest.mark.parametrize(
    ("needs_nms", "layout", "box_voting", "output"),
    [
        (True, "raw", True, 0.3),  # its readers have NMS, but no voting
        (True, "end2end", True, 0.5),  # validation's NMS and voting are in the graph
        (True, "end2end", False, 0.3),  # validation has scored boxes that voted
        (False, "raw", True, 0.3),  # only the best class of a box
        (False, "end2end", True, 0.5),  # every class of a box, as in validation
    ],
)
def test_the_threshold_of_training_is_that_of_the_output(needs_nms: bool, layout: str, box_voting: bool, output: float):
    """Without a check of all images, the thresholds are those of training's validation."""
    detector = build_detector(TINY_MODEL | {"end2end": not needs_nms}, 2, names=("a", "b")).fuse()
    assert (detector.nms_iou is not None) == needs_nms
    model = CheckpointModel(detector, {"imgsz": 64, "progress": PROGRESS}, Path("best.pt"), torch.device("cpu"))
    config = resolve_options(ExportConfig(weights="best.pt", layout=layout, box_voting=box_voting), detector, 64)
    assert trained_thresholds(model, config) == Thresholds(output, 0.4)
