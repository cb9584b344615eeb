"""YOLOX: sizes, head, training steps, and its public checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.detector import Detector, build_detector
from models.weights.layouts import STEM, without_focus
from models.weights.load import load_detector
from tests.helpers.public_layouts import in_yolox_names
from tests.helpers.tiny import randomize_batch_norms


@pytest.fixture(scope="module")
def nano() -> Detector:
    return build_detector("yoloxnano", 4, seed=1)


def test_biases_start_at_the_priors(nano: Detector) -> None:
    head = nano.head
    assert head.obj_preds[0].bias.sigmoid().item() == pytest.approx(8 / 6400, rel=1e-2)
    assert head.reg_preds[2].bias.tolist() == pytest.approx([0.5, 0.5, math.log(2), math.log(2)])


# Public checkpoints


def focus(images: Tensor) -> Tensor:
    """(B, C, H, W) to (B, 4C, H/2, W/2): upper left, lower left, upper right, lower right pixels."""
    return torch.cat([images[..., y::2, x::2] for x in (0, 1) for y in (0, 1)], 1)


def test_a_focus_and_a_convolution_equal_one_larger_kernel() -> None:
    kernel = torch.randn(5, 12, 3, 3, dtype=torch.float64)
    images = torch.rand(2, 3, 10, 14, dtype=torch.float64)
    expected = nn.functional.conv2d(focus(images), kernel, padding=1)
    torch.testing.assert_close(nn.functional.conv2d(images, without_focus(kernel), stride=2, padding=2), expected)


def test_a_public_checkpoint_is_recognized_and_converted_to_rgb(tmp_path: Path) -> None:
    """Its first layer takes BGR up to 255; ours takes RGB up to 1."""
    original = build_detector("yoloxnano", 80, seed=3)
    randomize_batch_norms(original)
    state = in_yolox_names(original)
    kernel = torch.randn(16, 12, 3, 3, generator=torch.Generator().manual_seed(4)) / 255
    state[f"{STEM}conv.weight"] = kernel
    torch.save({"start_epoch": 300, "model": state, "optimizer": {"state": {}}}, tmp_path / "yolox_nano.pth")
    detector, content = load_detector(tmp_path / "yolox_nano.pth")
    assert detector.spec["name"] == "yoloxnano"
    assert detector.names[:2] == ("person", "bicycle")
    assert (content["format"], content["imgsz"]) == ("foreign", 416)
    pictures = torch.randint(0, 256, (1, 3, 64, 64), generator=torch.Generator().manual_seed(5)).float()
    stem = original.eval().model[0]
    expected = stem.act(stem.bn(nn.functional.conv2d(focus(pictures.flip(1)), kernel, padding=1)))
    with torch.inference_mode():
        torch.testing.assert_close(detector.model[0](pictures / 255), expected, rtol=1e-4, atol=1e-4)
    unchanged = original.state_dict()
    for name, tensor in detector.state_dict().items():
        if name != "model.0.conv.weight":
            assert torch.equal(tensor, unchanged[name]), name
