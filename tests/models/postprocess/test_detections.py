"""Selections of boxes, with and without non-maximum suppression, compared with brute force."""

import sys

import numpy as np
import pytest
import torch

from models.postprocess import nms
from tests.helpers.messages import refused
from tests.helpers.selection import select
from tests.models.postprocess.references import brute_force


def crowd(batch: int, count: int, num_classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns clustered boxes, so that there are chains of suppression."""
    rng = np.random.default_rng(seed)
    center = rng.uniform(50, 270, (batch, 6, 2))[:, rng.integers(0, 6, count)] + rng.normal(0, 8, (batch, count, 2))
    half = rng.uniform(8, 30, (batch, count, 2))
    boxes = torch.from_numpy(np.concatenate((center - half, center + half), -1)).float()
    return boxes, torch.from_numpy(rng.uniform(0, 1, (batch, count, num_classes))).float()


def ties() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns boxes with whole numbers, many of them with an IoU of exactly 0.5, and few different scores."""
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 30, (2, 100, 2))
    boxes = torch.from_numpy(np.concatenate((corner, corner + rng.integers(1, 12, (2, 100, 2))), -1)).float()
    scores = torch.from_numpy(rng.integers(0, 4, (2, 100, 3)) / 4).float()
    scores[1, 5] = float("nan")
    return boxes, scores


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"iou_thres": 0.3},
        {"iou_thres": 0.7, "agnostic": True},
        {"iou_thres": 0.5, "max_det": 5},
        {"iou_thres": 0.5, "classes": [0, 2]},
        {"iou_thres": 0.5, "classes": []},
        {"iou_thres": None},
        {"iou_thres": None, "classes": [2], "max_det": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("boxes", ["crowd", "ties"])
def test_detections_equal_brute_force(boxes, settings, multi_label):
    boxes, scores = ties() if boxes == "ties" else crowd(3, 150, 3, seed=1)
    scores[0] *= 0.1  # an image with little above the threshold
    check_detections(boxes, scores, multi_label=multi_label, **settings)


@pytest.mark.parametrize("max_det", [5, 300])
def test_more_candidates_than_the_first_nms_takes_equal_brute_force(max_det):
    """The second one runs if slots are empty after the first."""
    boxes, scores = crowd(2, 1000, 3, seed=2)
    check_detections(boxes, scores, iou_thres=0.3, max_det=max_det)


def check_detections(boxes: torch.Tensor, scores: torch.Tensor, **settings) -> None:
    settings = {"conf_thres": 0.2, "max_det": 300, **settings}
    detections = select(boxes, scores, **settings, box_voting=False)
    iou_thres = 1.0 if settings["iou_thres"] is None else settings["iou_thres"]  # 1.0 suppresses none
    for b in range(len(boxes)):
        expected = brute_force(boxes[b], scores[b].nan_to_num(-1.0), **settings | {"iou_thres": iou_thres})
        count = int(detections.counts[b])
        assert detections.classes[b, :count].tolist() == [c for _, c, _ in expected]
        assert detections.scores[b, :count].tolist() == [s for s, _, _ in expected]
        assert torch.equal(detections.boxes_xyxy[b, :count], boxes[b][[n for _, _, n in expected]])
        assert not any(t[b, count:].any() for t in detections[:3])


@pytest.mark.parametrize("shape", [(0, 10, 3), (2, 0, 3), (2, 10, 3)])
def test_no_candidates_give_no_detections(shape):
    detections = select(torch.rand(*shape[:2], 4), torch.full(shape, 0.1), conf_thres=0.5, iou_thres=0.5, max_det=7)
    assert detections.boxes_xyxy.shape == (shape[0], 7, 4)
    assert detections.classes.dtype == detections.counts.dtype == torch.int64
    assert not any(t.any() for t in detections)


@pytest.mark.parametrize("iou_thres", [None, 0.5])
def test_sides_that_changed_places_enclose_nothing_and_half_precision_is_read(iou_thres):
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 10], [30, 20, 20, 40]]]).half()
    scores = torch.tensor([[[0.9], [0.8], [0.7]]]).half()
    detections = select(boxes, scores, conf_thres=0.1, iou_thres=iou_thres, max_det=5)
    count = 3 if iou_thres is None else 2
    assert detections.counts.tolist() == [count]
    assert detections.boxes_xyxy[0, count - 1].tolist() == [30, 20, 30, 40]
    assert detections.scores.dtype == detections.boxes_xyxy.dtype == torch.float32


def test_a_torchvision_for_another_torch_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    (tmp_path / "torchvision" / "_C.so").write_bytes(b"built for another torch")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    nms.load_nms.cache_clear()
    with refused("torchvision in ... was not built for torch ...; pip install --upgrade torch torchvision"):
        nms.load_nms(torch.device("cpu"))


def test_a_torchvision_without_cuda_kernels_is_refused_at_the_start(monkeypatch):
    """One that was built for CPUs defines the operator all the same."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: key != "CUDA" and has_kernel(name, key)
    )
    nms.load_nms.cache_clear()
    with refused("torchvision in ... has no CUDA kernels, ...; pip install --force-reinstall torch torchvision"):
        nms.load_nms(torch.device("cuda", 0))
    nms.load_nms(torch.device("cpu"))
