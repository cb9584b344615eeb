"""Checkpoints of other packages reproduce the outputs of these packages.

peers contains files with random weights, made with ``peers/write.py`` in the
packages' own environments (ultralytics 8.4, yolox 0.3) and compressed with xz. Both sides compute in float64; what is
left is the rounding error of YOLOX's first layer, whose inputs are 0 to 255 there and 0 to 1 here.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from models.weights.load import load_detector
from utils.boxes import xyxy_to_cxcywh

# Largest differences allowed of decoded boxes, of scores, and of the raw maps of all branches.
BOX_PX = 5e-3
SCORE = 1e-4
RAW = 1e-3
PEERS = Path(__file__).with_name("peers")


def differences(checkpoint: Path, reference: Path) -> tuple[str, int, dict[str, float]]:
    """Returns the recognized model, its classes, and the largest absolute differences from the peer's outputs."""
    detector = load_detector(checkpoint)[0].double()
    stored = {key: torch.from_numpy(value) for key, value in np.load(reference).items()}
    images = stored["image"].permute(2, 0, 1)[None].double() / 255
    with torch.inference_mode():
        raw = detector(images)
        # the peer decodes the one-to-many maps of a pair
        boxes, scores = detector.decode(raw[: len(detector.strides)])
    ours = torch.cat([level[0].flatten(1) for level in raw], 1)  # (channels, N), branch after branch
    theirs = torch.cat([value for key, value in stored.items() if key.startswith("raw")], 1)
    found = {
        "boxes, px": (xyxy_to_cxcywh(boxes)[0] - stored["boxes"]).abs().max(),
        "scores": (scores[0] - stored["scores"]).abs().max(),
        "raw": ((ours[:4] if "raw_boxes" in stored else ours) - theirs).abs().max(),
    }
    return detector.spec["name"], detector.num_classes, {key: float(value) for key, value in found.items()}


@pytest.mark.parametrize(
    ("file", "model"),
    [*((f"{name}.pt", name) for name in ("yolo11n", "yolo26n", "yolov9t")), ("yolox-nano.pth", "yoloxnano")],
)
def test_a_peers_checkpoint_reproduces_the_peers_outputs(tmp_path: Path, file: str, model: str) -> None:
    (tmp_path / file).write_bytes(lzma.decompress((PEERS / f"{file}.xz").read_bytes()))
    name, classes, found = differences(tmp_path / file, (PEERS / file).with_suffix(".npz"))
    assert (name, classes) == (model, 3)
    assert found["boxes, px"] < BOX_PX
    assert found["scores"] < SCORE
    assert found["raw"] < RAW
