"""Model graphs and heads: parameter counts, keys, geometry, initial weights, determinism."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from models.detector import Detector, build_detector, build_on_meta
from models.spec import load_spec
from tests.helpers.tiny import randomize_batch_norms

PARAMETERS = {
    "yolov5": (1_872_157, 7_235_389, 21_190_557, 46_563_709, 86_749_405),
    "yolov8": (3_157_200, 11_166_560, 25_902_640, 43_691_520, 68_229_648),
    "yolo11": (2_624_080, 9_458_752, 20_114_688, 25_372_160, 56_966_176),
    "yolo26": (2_572_280, 10_009_784, 21_896_248, 26_299_704, 58_993_368),
}
COUNTS = {f"{family}{scale}": n for family, row in PARAMETERS.items() for scale, n in zip("nsmlx", row)}
COUNTS |= {"yolov9t": 2_128_720, "yolov9s": 7_318_368, "yolov9m": 20_216_160, "yolov9c": 25_590_912}
COUNTS |= {"yoloxnano": 912_159, "yoloxtiny": 5_055_855, "yoloxs": 8_968_255, "yoloxm": 25_326_495}
COUNTS |= {"yoloxl": 54_208_895, "yoloxx": 99_071_455}
NANO = ("yolov5n", "yolov8n", "yolo11n", "yolov9t", "yoloxnano")


@pytest.fixture(scope="module")
def nano() -> dict[str, Detector]:
    return {name: build_detector(name, 5, seed=1) for name in NANO}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_equal_the_published_ones(name: str) -> None:
    detector = build_on_meta(load_spec(name), 80)
    assert sum(p.numel() for p in detector.parameters()) == COUNTS[name]
    assert detector.strides == (8, 16, 32)


@pytest.mark.parametrize("name", NANO)
def test_every_model_runs_forward_and_backward(nano: dict[str, Detector], name: str) -> None:
    detector = copy.deepcopy(nano[name]).train().to(memory_format=torch.channels_last)
    raw = detector(torch.rand(2, 3, 64, 96).to(memory_format=torch.channels_last))
    channels = {"yolov5n": 3 * (5 + 5), "yoloxnano": 5 + 5}.get(name, 4 * 16 + 5)
    assert [tuple(x.shape) for x in raw] == [(2, channels, 64 // s, 96 // s) for s in (8, 16, 32)]
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in raw)
    sum(x.square().mean() for x in raw).backward()
    for key, parameter in detector.named_parameters():
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all(), key
            assert parameter.grad.abs().sum() > 0, key
        else:
            assert key.endswith("dfl.conv.weight")


@pytest.mark.parametrize("name", NANO)
def test_an_empty_batch_gives_zero_gradients(nano: dict[str, Detector], name: str) -> None:
    detector = copy.deepcopy(nano[name]).train()
    before = {k: v.clone() for k, v in detector.named_buffers() if "running" in k}
    raw = detector(torch.zeros(0, 3, 64, 64))
    sum(x.sum() for x in raw).backward()
    assert all((p.grad == 0).all() for p in detector.parameters() if p.requires_grad)
    assert all(torch.equal(v, before[k]) for k, v in detector.named_buffers() if k in before)
    boxes, scores = detector.decode(raw)
    assert boxes.shape[:2] == scores.shape[:2] == (0, boxes.shape[1])


@pytest.mark.parametrize("name", NANO)
def test_batch_of_images_equals_single_images_also_fused(nano: dict[str, Detector], name: str) -> None:
    detector = copy.deepcopy(nano[name]).eval()
    randomize_batch_norms(detector)
    keys = list(detector.state_dict())
    fused = detector.fuse()
    assert list(detector.state_dict()) == keys
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    images = torch.rand(3, 3, 64, 96)
    with torch.inference_mode():
        together = detector(images)
        apart = [torch.cat(level) for level in zip(*(detector(images[i : i + 1]) for i in range(3)))]
        for a, b, c in zip(together, apart, fused(images)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
        detector = detector.double()
        images = images.double()
        for a, b in zip(detector.fuse(one_to_one=None)(images), detector(images), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Initialization


def test_initial_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = build_detector("yolo11n", 3, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    torch.rand(5)
    again, other = (build_detector("yolo11n", 3, seed=s).state_dict() for s in (7, 8))
    assert all(torch.equal(v, again[k]) for k, v in first.items())
    key = "model.0.conv.weight"
    assert not torch.equal(first[key], other[key])
    assert 0.9 * 27**-0.5 < first[key].abs().max() <= 27**-0.5


def test_head_biases_start_with_the_documented_values(nano: dict[str, Detector]) -> None:
    free, anchor, yolox = (nano[name].head for name in ("yolo11n", "yolov5n", "yoloxnano"))
    assert (free.cv2[0][-1].bias == 1).all()
    # 5 objects over 80x80 cells, divided evenly over 5 classes
    assert free.cv3[0][-1].bias.sigmoid().mean().item() == pytest.approx(5 / 5 / 6400, rel=1e-3)
    bias = anchor.m[2].bias.view(3, 10)
    assert (bias[:, :4] == 0).all()
    assert bias[:, 4].sigmoid().tolist() == pytest.approx([8 / 400 / (1 + 8 / 400)] * 3, rel=1e-4)
    assert yolox.obj_preds[0].bias.sigmoid().item() == pytest.approx(8 / 6400, rel=1e-2)
    assert yolox.reg_preds[2].bias.tolist() == pytest.approx([0.5, 0.5, math.log(2), math.log(2)])


# Geometry


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_anchor_decoding_equals_a_loop(nano: dict[str, Detector]) -> None:
    detector = nano["yolov5n"]
    raw = [torch.randn(1, 30, *hw) * 2 for hw in ((4, 2), (2, 1), (1, 1))]
    boxes, scores = detector.decode(raw)
    pixels = [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]]
    row = 0
    for level, stride, anchors in zip(raw, (8, 16, 32), pixels):
        for a in range(3):
            for gy in range(level.shape[2]):
                for gx in range(level.shape[3]):
                    v = [_sigmoid(t) for t in level[0, a * 10 : a * 10 + 10, gy, gx].double().tolist()]
                    cx, cy = (v[0] * 2 - 0.5 + gx) * stride, (v[1] * 2 - 0.5 + gy) * stride
                    w, h = (v[2] * 2) ** 2 * anchors[2 * a], (v[3] * 2) ** 2 * anchors[2 * a + 1]
                    expected = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]
                    assert boxes[0, row].tolist() == pytest.approx(expected, abs=2e-3)
                    assert scores[0, row].tolist() == pytest.approx([v[4] * c for c in v[5:]], abs=1e-6)
                    row += 1
    assert row == boxes.shape[1]
