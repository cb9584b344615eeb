"""Selections of boxes, with and without non-maximum suppression, compared with brute force."""

import sys
from functools import cache

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
    settings = {"conf_thres": 0.2, "max_det": 300, "multi_label": multi_label, **settings}
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


MANY = 4200  # more than the first NMS takes


@cache
def many_boxes(kind: str) -> np.ndarray:
    """Returns boxes of one class, float32 (4200, 4)."""
    rng = np.random.default_rng(7)
    if kind == "chain":  # each overlaps its neighbors only
        left = np.arange(float(MANY)) * 4
        return np.stack((left, 0 * left, left + 10, 0 * left + 10), -1).astype(np.float32)
    corner = rng.uniform(0, 600 if kind == "scattered" else 60, (MANY, 2))
    return np.concatenate((corner, corner + rng.uniform(4, 40, (MANY, 2))), -1).astype(np.float32)


@cache
def greedy(kind: str, iou_thres: float) -> list[int]:
    """Returns the kept boxes, the best first, by a greedy loop in float32."""
    boxes = many_boxes(kind)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    kept: list[int] = []
    for n, box in enumerate(boxes):
        better = boxes[kept]
        overlap = (np.minimum(better[:, 2:], box[2:]) - np.maximum(better[:, :2], box[:2])).clip(0).prod(1)
        if not (overlap > (areas[kept] + areas[n] - overlap) * np.float32(iou_thres)).any():
            kept.append(n)
    return kept


@pytest.mark.parametrize(
    ("kind", "iou_thres", "max_det"), [("chain", 0.4, MANY), ("scattered", 0.7, 300), ("crowded", 0.4, MANY)]
)
def test_groups_of_thousands_of_boxes_equal_brute_force(kind, iou_thres, max_det):
    boxes = torch.from_numpy(many_boxes(kind))
    scores = torch.linspace(0.9, 0.1, MANY)[None, :, None].repeat(2, 1, 1)
    scores[1, 40:] = 0
    settings = {"conf_thres": 0.05, "iou_thres": iou_thres, "max_det": max_det, "box_voting": False}
    detections = select(torch.stack((boxes, boxes)), scores, **settings)
    kept = greedy(kind, iou_thres)
    for b, expected in enumerate((kept[:max_det], [n for n in kept if n < 40])):
        assert detections.counts[b] == len(expected)
        assert torch.equal(detections.boxes_xyxy[b, : len(expected)], boxes[expected])


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


@pytest.mark.parametrize("precision", [np.float64, np.float32])
@pytest.mark.parametrize(("iou_thres", "overlap"), [(0.3, 6), (0.45, 9), (0.5, 10), (0.7, 14), (1.0, 20)])
def test_an_iou_of_exactly_the_threshold_is_kept_on_any_device(monkeypatch, iou_thres, overlap, precision):
    """CUDA's kernel rounds the threshold to float32: 0.45 and 0.7 become lower, 0.3 becomes higher."""
    whole = torch.tensor([0.0, 0, 20, 20])
    same = torch.tensor([0.0, 0, overlap, 20])  # an IoU of overlap / 20 with the whole
    higher = torch.tensor([0.0, 0, min(overlap + 0.001, 20), 20])
    on_cpu = nms.load_nms(torch.device("cpu"))
    monkeypatch.setattr(
        nms, "load_nms", lambda device: lambda boxes, scores, limit: on_cpu(boxes, scores, float(precision(limit)))
    )
    for box, is_kept in ((same, True), (higher, overlap == 20)):
        keep = nms.nms_keep(torch.stack((whole, box)), torch.zeros(2, dtype=torch.int64), iou_thres, 1)
        assert keep.tolist() == [True, is_kept]
