"""Exported files, decoded by the rules of other programs, against the detector that they were made of."""

from __future__ import annotations

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from engine.export.graphs import EndToEnd, ModelGraphs
from tests.helpers.exports import (
    NAMES,
    calibrated_detector,
    noise_images,
    options,
    shallow_spec,
    tiny_graph,
    write_exports,
)
from tests.helpers.repository import ROOT
from tests.helpers.selection import select
from tests.helpers.tiny import TINY_MODEL

HEIGHT, WIDTH = 64, 96  # size of the canvas
Found = tuple[np.ndarray, np.ndarray, np.ndarray]  # boxes (D, 4) xyxy, scores (D,), classes (D,)


def documented_code() -> str:
    """Returns the block of docs/export.md that runs an ONNX file with onnxruntime."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "onnxruntime.InferenceSession" in block]
    return code


@pytest.fixture(scope="module")
def detector():
    return calibrated_detector(TINY_MODEL, NAMES)


@torch.no_grad()
def best(detector, pixels: torch.Tensor, *, confidence: float, iou: float) -> Found:
    """Returns the detections in one image after NMS without box voting, which keeps a box's best class only."""
    fused = detector.fuse()
    boxes, scores = fused.decode(fused(pixels))
    rules = {"conf_thres": confidence, "iou_thres": iou, "max_det": 300, "multi_label": False, "box_voting": False}
    found = select(boxes, scores, **rules)
    count = int(found.counts[0])
    return tuple(part[0, :count].numpy() for part in found[:3])


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2},  # the graph of test_files.py
        pytest.param({"end2end": True, "dynamic": True}, marks=pytest.mark.slow),
    ],
)
def test_the_page_runs_an_onnx_file(detector, changes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    code = documented_code()
    write_exports(tmp_path, detector, ["best.onnx"], graph=tiny_graph(NAMES, **changes), **changes)
    picture = (noise_images()[0, :, :32].permute(1, 2, 0) * 255).byte().numpy()  # half as high as the canvas
    cv2.imwrite(str(tmp_path / "a.png"), cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    monkeypatch.chdir(tmp_path)
    program: dict = {}
    exec(code, program)
    assert program["names"] == dict(enumerate(NAMES))
    boxes, scores, classes = program["detect"]("a.png", 0.5, 0.7)

    canvas = torch.full((1, 3, HEIGHT, WIDTH), 114 / 255)
    canvas[0, :, 16:48] = torch.from_numpy(picture).permute(2, 0, 1) / 255
    if not changes.get("end2end"):
        expected_boxes, expected_scores, expected_classes = best(detector, canvas, confidence=0.5, iou=0.7)
    else:
        with torch.no_grad():
            rows = EndToEnd(detector.fuse(), half=False, nms_iou=0.7)(canvas)[0].numpy()
        rows = rows[rows[:, 4] > 0.5]
        expected_boxes = rows[:, :4]
        expected_scores = rows[:, 4]
        expected_classes = rows[:, 5]
    assert len(scores) == len(expected_scores) > 2
    np.testing.assert_allclose(scores, expected_scores, atol=1e-5)
    np.testing.assert_array_equal(classes, expected_classes)
    expected_boxes = (expected_boxes - (0, 16, 0, 16)).clip(0, picture.shape[1::-1] * 2)
    np.testing.assert_allclose(boxes, expected_boxes, atol=1e-2)
    assert program["detect"]("a.png", 1.0)[0].shape == (0, 4)


def test_an_openvino_file_says_what_intels_model_api_reads(detector, tmp_path: Path):
    """Its NMS does not vote, as that does for which the metadata have a confidence."""
    openvino = pytest.importorskip("openvino")
    write_exports(tmp_path, detector, ["a_openvino_model"], graph=tiny_graph(NAMES, batch=2), batch=2)
    model = openvino.Core().read_model(tmp_path / "a_openvino_model" / "a.xml")
    expected = {"model_type": "YOLOv8", "confidence_threshold": "0.25", "iou_threshold": "0.7", "scale_values": "255"}
    assert {key: model.get_rt_info(["model_info", key]).astype(str) for key in expected} == expected


@pytest.mark.slow
@torch.no_grad()
def test_the_installed_opencv_reads_yolo11(tmp_path: Path):
    """It has all operators that OpenCV 4.7 or 4.8 misreads."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    graphs = ModelGraphs(calibrated_detector(shallow_spec("yolo11n"), NAMES), options())
    images = noise_images()[:1]
    network = cv2.dnn.readNetFromONNX(np.frombuffer(graphs.float_onnx.SerializeToString(), np.uint8))
    network.setInput(images.numpy())
    difference = np.abs(network.forward() - graphs.module(half=False)(images).numpy())
    assert difference[:, :4].max() < 1  # pixels
    assert difference[:, 4:].max() < 0.01
