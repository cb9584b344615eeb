"""OpenCV's DNN module reads the raw ONNX layout (opencv#21031), in each minor version from 4.7 on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.export.graphs import ModelGraphs
from tests.helpers.exports import calibrated_detector, noise_images, options, shallow_spec

NAMES = ("light", "dark", "green")
READER = """
import sys, cv2, numpy as np
for path in sys.argv[1:]:
    case = np.load(path + ".npz")
    network = cv2.dnn.readNetFromONNX(path)
    network.setInput(case["images"])
    output = network.forward()
    assert output.shape == case["output"].shape, (path, output.shape)
    pixels = np.abs(output - case["output"])[:, :4].max()
    scores = np.abs(output - case["output"])[:, 4:].max()
    assert pixels < 1 and scores < 0.01, (cv2.__version__, path, pixels, scores)
"""


@torch.no_grad()
def write_family(folder: Path, family: str) -> str:
    """Writes a shallow model as an ONNX file, and next to it an image with the detector's output."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    graphs = ModelGraphs(calibrated_detector(shallow_spec(family), NAMES), options())
    images = noise_images()[:1]
    path = folder / f"{family}.onnx"
    path.write_bytes(graphs.float_onnx.SerializeToString())
    np.savez(f"{path}.npz", images=images.numpy(), output=graphs.module(half=False)(images).numpy())
    return str(path)


def test_the_installed_opencv_reads_yolo11(tmp_path: Path):
    """It has all operators that OpenCV 4.7 or 4.8 misreads."""
    subprocess.run([sys.executable, "-c", READER, write_family(tmp_path, "yolo11n")], check=True)
