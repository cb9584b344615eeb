"""YOLOv9: sizes, blocks, training steps, and the names of the MIT-licensed weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from models.detector import Detector, build_detector
from models.layers.conv import Conv, RepConv
from models.layers.gelan import AConv, ADown
from models.weights.layouts import ungrouped
from models.weights.load import load_detector
from tests.helpers.public_layouts import grouped, in_mit_names
from tests.helpers.tiny import randomize_batch_norms

TINY = """
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, ELAN1, [16, 16, 8]]
  - [-1, 1, AConv, [16]]
  - [-1, 1, RepNCSPELAN4, [16, 16, 8, 2]]
head:
  - [-1, 1, ADown, [24]]
  - [-1, 1, SPPELAN, [24, 8]]
  - [[3, 5], 1, Detect, [nc]]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Detector:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return build_detector(path, 3)


def test_every_block_trains_and_fuses(tiny: Detector) -> None:
    randomize_batch_norms(tiny)
    images = torch.rand(2, 3, 64, 96)
    keys = list(tiny.state_dict())
    raw = tiny(images)
    assert [tuple(x.shape) for x in raw] == [(2, 67, 16, 24), (2, 67, 8, 12)]
    sum(x.square().mean() for x in raw).backward()
    assert all(p.grad.any() for p in tiny.parameters() if p.requires_grad)
    fused = tiny.fuse()
    assert list(tiny.state_dict()) == keys
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    assert all(m.conv2 is None for m in fused.modules() if isinstance(m, RepConv))
    with torch.inference_mode():
        for a, b in zip(fused(images), tiny.eval()(images)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_yamls_activation_is_used_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "relu.yaml"
    path.write_text("activation: nn.ReLU()\n" + TINY)
    detector = build_detector(path, 3)
    acts = [m.act for m in detector.modules() if isinstance(m, Conv | RepConv) and not isinstance(m.act, nn.Identity)]
    assert all(type(act) is nn.ReLU for act in acts)


def test_downsampling_equals_its_formula() -> None:
    x = torch.randn(2, 6, 8, 10)
    mean = (x[..., :-1, :-1] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., 1:, 1:]) / 4
    conv = AConv(6, 4).eval()
    down = ADown(6, 4).eval()
    torch.testing.assert_close(conv(x), conv.cv1(mean))
    assert conv(x).shape == down(x).shape == (2, 4, 4, 5)
    pooled = nn.functional.max_pool2d(mean[:, 3:], 3, 2, 1)
    torch.testing.assert_close(down(x), torch.cat((down.cv1(mean[:, :3]), down.cv2(pooled)), 1))


# The MIT-licensed weights


@pytest.mark.slow
def test_mit_licensed_names_are_recognized(tmp_path: Path) -> None:
    original = build_detector("yolov9t", 5, seed=3)
    state = in_mit_names(original)
    assert {"4.conv2.0.bottleneck.0.conv1.conv2.bn.weight", "16.conv.bn.bias", "9.conv5.conv.weight"} <= state.keys()
    torch.save({f"model.model.{key}": tensor for key, tensor in state.items()}, tmp_path / "v9.pt")
    detector, _ = load_detector(tmp_path / "v9.pt")
    assert detector.spec["name"] == "yolov9t"
    kernels = re.compile(r"model\.22\.cv2\.\d\.(1\.conv|2)\.weight")
    state = original.state_dict()
    for key, tensor in detector.state_dict().items():
        expected = state[key]
        if kernels.fullmatch(key):
            expected = ungrouped(grouped(expected, 4), 64)
        assert torch.equal(tensor, expected), key


def test_an_expanded_grouped_kernel_gives_the_same_convolution() -> None:
    kernel = torch.randn(8, 3, 3, 3, dtype=torch.float64)
    x = torch.randn(2, 12, 5, 5, dtype=torch.float64)
    expected = nn.functional.conv2d(x, kernel, groups=4)
    torch.testing.assert_close(nn.functional.conv2d(x, ungrouped(kernel, 12)), expected)
