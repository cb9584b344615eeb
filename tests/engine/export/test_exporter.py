"""The confidence thresholds that an export stores, and the names of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.export.exporter import file_path
from engine.export.options import resolve_options
from engine.export.thresholds import Thresholds, trained_thresholds
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


@pytest.mark.parametrize(
    ("format_name", "flags", "file"),
    [
        ("onnx", {}, "best.onnx"),
        ("onnx", {"half": True}, "best_half.onnx"),
        ("openvino", {"int8": True}, "best_int8_openvino_model"),
        ("ncnn", {"half": True}, "best_half_ncnn_model"),
        ("torchscript", {"layout": "end2end", "half": True}, "best_end2end_half.torchscript"),
    ],
)
def test_files_of_other_layouts_and_precisions_have_other_names(format_name: str, flags: dict, file: str):
    config = ExportConfig(weights="run/best.pt", **flags)
    assert file_path(Path("run/best.pt"), config, format_name) == Path("run", file)
