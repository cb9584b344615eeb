"""Non-maximum suppression compared with brute force, with the table sizes of CPUs and GPUs."""

from functools import cache

import numpy as np
import pytest
import torch

from models.postprocess import box_voting, nms, suppression
from models.postprocess.detections import detections_to_score
from models.postprocess.selection import ValidationSettings
from tests.helpers.dense_detections import make_detections
from tests.helpers.kernel_count import KernelCount
from tests.helpers.messages import refused
from tests.helpers.selection import select
from tests.models.postprocess.references import brute_force


@pytest.fixture(params=["ON_CPU", "ON_GPU"])
def sizes(request, monkeypatch):
    chosen = getattr(nms, request.param)
    monkeypatch.setattr(nms, "sizes_for", lambda device: chosen)
    return chosen


def greedy(boxes: torch.Tensor, iou_thres: float, max_det: int) -> list[int]:
    """Indices of the kept boxes of (N, 4), best first, by a greedy loop in float32."""
    boxes = boxes.numpy()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    for n, box in enumerate(boxes):
        better = boxes[kept]
        width = (np.minimum(better[:, 2], box[2]) - np.maximum(better[:, 0], box[0])).clip(0)
        height = (np.minimum(better[:, 3], box[3]) - np.maximum(better[:, 1], box[1])).clip(0)
        overlap = width * height
        union = areas[kept] + areas[n] - overlap
        if not (overlap > union * np.float32(iou_thres)).any():
            kept.append(n)
    return kept[:max_det]


def crowd(batch: int, count: int, num_classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns clustered boxes, so that there are chains of suppression."""
    rng = np.random.default_rng(seed)
    center = rng.uniform(50, 270, (batch, 6, 2))[:, rng.integers(0, 6, count)] + rng.normal(0, 8, (batch, count, 2))
    half = rng.uniform(8, 30, (batch, count, 2))
    boxes = torch.from_numpy(np.concatenate((center - half, center + half), -1)).float()
    return boxes, torch.from_numpy(rng.uniform(0, 1, (batch, count, num_classes))).float()


def assert_equals_brute_force(boxes, scores, **settings):
    detections = select(boxes, scores, **settings, box_voting=False)
    for b in range(len(boxes)):
        expected = brute_force(boxes[b], scores[b], **settings)
        count = int(detections.counts[b])
        assert count == len(expected)
        assert detections.classes[b, :count].tolist() == [c for _, c, _ in expected]
        assert detections.scores[b, :count].tolist() == [s for s, _, _ in expected]
        assert torch.equal(detections.boxes_xyxy[b, :count], boxes[b][[n for _, _, n in expected]])
        assert not detections.boxes_xyxy[b, count:].any()
        assert not detections.scores[b, count:].any()
        assert not detections.classes[b, count:].any()
    return detections


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("agnostic", [True, False])
@pytest.mark.parametrize("iou_thres", [0.3, 0.7])
def test_equals_brute_force(multi_label, agnostic, iou_thres):
    boxes, scores = crowd(3, 150, 3, seed=1)
    assert_equals_brute_force(
        boxes, scores, conf_thres=0.3, iou_thres=iou_thres, max_det=300, agnostic=agnostic, multi_label=multi_label
    )


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("first", [4, 40, 10_000])
def test_block_and_table_sizes_do_not_change_the_result(monkeypatch, block, first):
    sizes = nms.TableSizes(length_classes=(1, 3), block=block, max_comparisons=2 * block**2, rounds=1)
    monkeypatch.setattr(nms, "sizes_for", lambda device: sizes)
    monkeypatch.setattr(suppression, "_FIRST_CANDIDATES", first)
    boxes, scores = crowd(3, 80, 3, seed=2)
    scores[1, 5:] = 0.0  # few candidates beside many, of classes with one, several and many
    scores[2, 9:, 1] = 0.0
    for max_det in (5, 300):
        for agnostic in (False, True):
            assert_equals_brute_force(boxes, scores, conf_thres=0.2, iou_thres=0.5, max_det=max_det, agnostic=agnostic)


@pytest.mark.usefixtures("sizes")
def test_ties_and_exact_thresholds_follow_the_rules():
    """Integer boxes: IoU of exactly the threshold does not suppress, equal scores keep the order of boxes."""
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 20], [0, 0, 10, 10], [50, 50, 60, 60], [0, 0, 10, 9]]])
    scores = torch.full((1, 5, 2), 0.5)
    detections = assert_equals_brute_force(boxes, scores, conf_thres=0.1, iou_thres=0.5, max_det=10)
    assert detections.counts.tolist() == [6]
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 30, (2, 100, 2))
    grid = torch.from_numpy(np.concatenate((corner, corner + rng.integers(1, 12, (2, 100, 2))), -1)).float()
    coarse = torch.from_numpy(rng.integers(0, 4, (2, 100, 3)) / 4).float()
    assert_equals_brute_force(grid, coarse, conf_thres=0.1, iou_thres=0.5, max_det=300)


@pytest.mark.usefixtures("sizes")
def test_the_class_filter_keeps_only_its_classes():
    boxes, scores = crowd(2, 60, 4, seed=6)
    for multi_label in (True, False):
        detections = assert_equals_brute_force(
            boxes, scores, conf_thres=0.3, iou_thres=0.5, max_det=99, classes=[0, 3], multi_label=multi_label
        )
        assert set(torch.cat([c[:n] for c, n in zip(detections.classes, detections.counts)]).tolist()) == {0, 3}
    assert not select(boxes, scores, conf_thres=0.1, iou_thres=0.5, max_det=9, classes=[]).counts.any()
    with refused("class 4: the model has classes 0 to 3"):
        select(boxes, scores, conf_thres=0.1, iou_thres=0.5, max_det=9, classes=[1, 4])


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("shape", [(0, 10, 3), (2, 0, 3), (2, 10, 3)])
def test_no_candidates_give_no_detections_and_need_few_host_syncs(shape):
    boxes = torch.rand(*shape[:2], 4)
    scores = torch.full(shape, 0.1)
    with KernelCount() as count:
        select(boxes, scores * 0, conf_thres=0.5, iou_thres=0.5, max_det=7)
    assert count.waits.total() <= 4
    detections = select(boxes, scores, conf_thres=0.5, iou_thres=0.5, max_det=7)
    assert detections.boxes_xyxy.shape == (shape[0], 7, 4)
    assert detections.classes.dtype == detections.counts.dtype == torch.int64
    assert not any(t.any() for t in detections)


@pytest.mark.usefixtures("sizes")
def test_only_the_best_candidates_are_examined(monkeypatch):
    monkeypatch.setattr(suppression, "MAX_CANDIDATES", 20)
    left = torch.arange(50.0) * 20
    boxes = torch.stack((left, left, left + 10, left + 10), -1)[None]
    scores = torch.rand(1, 50, 1, generator=torch.Generator().manual_seed(0))
    detections = select(boxes, scores, conf_thres=0.0, iou_thres=0.5, max_det=300)
    assert detections.counts.tolist() == [20]
    assert torch.equal(detections.scores[0, :20], scores[0, :, 0].sort(descending=True).values[:20])


@pytest.mark.usefixtures("sizes")
def test_nan_scores_flat_boxes_and_half_precision_are_handled():
    boxes = torch.tensor([[[5.0, 5, 5, 5], [5, 5, 5, 5], [0, 0, 9, 9], [0, 0, 9, 9]]])
    scores = torch.tensor([[[0.9], [0.8], [0.7], [float("nan")]]])
    detections = select(boxes, scores, conf_thres=0.1, iou_thres=0.5, max_det=10)
    assert detections.counts.tolist() == [3]
    half = select(boxes.half(), scores.half(), conf_thres=0.1, iou_thres=0.5, max_det=10)
    assert half.scores.dtype == half.boxes_xyxy.dtype == torch.float32
    assert half.counts.tolist() == [3]


def many_boxes(kind: str) -> torch.Tensor:
    """Boxes (4096, 4) of one class."""
    rng = np.random.default_rng(7)
    if kind == "chain":  # each overlaps its neighbors only
        left = np.arange(4096.0) * 4
        return torch.from_numpy(np.stack((left, 0 * left, left + 10, 0 * left + 10), -1)).float()
    if kind == "ties":  # whole numbers: many pairs at exactly the threshold, many boxes twice
        corner = rng.integers(0, 60, (4096, 2))
        return torch.from_numpy(np.concatenate((corner, corner + rng.integers(1, 12, (4096, 2))), -1)).float()
    if kind == "nested":  # one in another
        side = np.linspace(400, 1, 4096)
        return torch.from_numpy(np.stack((0 * side, 0 * side, side, side), -1)).float()
    spread = 600 if kind == "scattered" else 60
    corner = rng.uniform(0, spread, (4096, 2))
    return torch.from_numpy(np.concatenate((corner, corner + rng.uniform(4, 40, (4096, 2))), -1)).float()


@cache
def greedy_of_many(kind: str, iou_thres: float) -> list[int]:
    return greedy(many_boxes(kind)[:2048], iou_thres, 2048)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("kind", ["chain", "ties", "nested", "scattered", "crowded"])
@pytest.mark.parametrize(("iou_thres", "max_det"), [(0.7, 300), (0.4, 2048)])
def test_groups_of_thousands_of_boxes_equal_brute_force(kind, iou_thres, max_det):
    boxes = many_boxes(kind)[:2048]
    few = crowd(1, 2048, 1, seed=8)[0][0]
    scores = torch.linspace(0.9, 0.1, 2048)[None, :, None].repeat(3, 1, 1)
    scores[1] = 0
    scores[2, 40:] = 0
    settings = {"conf_thres": 0.05, "iou_thres": iou_thres, "max_det": max_det}
    detections = select(torch.stack((boxes, boxes, few)), scores, **settings, box_voting=False)
    expected = [greedy_of_many(kind, iou_thres)[:max_det], [], greedy(few[:40], iou_thres, max_det)]
    assert detections.counts.tolist() == [len(kept) for kept in expected]
    for b, (kept, source) in enumerate(zip(expected, (boxes, boxes, few))):
        assert torch.equal(detections.boxes_xyxy[b, : len(kept)], source[kept])
        assert detections.boxes_xyxy.is_contiguous()


@pytest.mark.parametrize("max_det", [10, 300])
def test_the_number_of_simultaneous_comparisons_is_bounded(monkeypatch, max_det):
    bounded = nms.TableSizes(length_classes=(1,), block=32, max_comparisons=1 << 14, rounds=2)
    compared = []

    def recorded(a, b, iou_thres):
        result = overlaps(a, b, iou_thres)
        compared.append(result.numel())
        return result

    overlaps = nms.overlaps
    monkeypatch.setattr(nms, "sizes_for", lambda device: bounded)
    monkeypatch.setattr(nms, "overlaps", recorded)
    boxes = torch.stack([many_boxes("scattered")] * 4)
    scores = torch.rand(4, 4096, 3, generator=torch.Generator().manual_seed(0))
    scores[..., 1] *= 0.05
    select(boxes, scores, conf_thres=0.04, iou_thres=0.5, max_det=max_det)
    assert bounded.max_comparisons / 4 < max(compared) <= 2 * bounded.max_comparisons


@pytest.mark.parametrize("classes", [80, 1])
def test_a_batch_takes_few_kernels_and_host_syncs(monkeypatch, sizes, classes):
    """The bounds are far below what one table per class would take."""
    given = make_detections(batch=16, boxes=8400, classes=classes, objects=30)
    with KernelCount() as count:
        select(**given, conf_thres=0.001, iou_thres=0.7, max_det=300, box_voting=False)
    on_gpu = sizes is nms.ON_GPU
    assert count.kernels.total() <= (300 if on_gpu else 2000)
    assert count.waits.total() <= (20 if on_gpu else 250)
    monkeypatch.setattr(box_voting, "_PAIRS_ON_CPU", box_voting._PAIRS_ON_GPU)
    with KernelCount() as voting:
        select(**given, conf_thres=0.001, iou_thres=0.7, max_det=300)
    assert 20 < voting.kernels.total() - count.kernels.total() <= 150
    assert voting.waits.total() - count.waits.total() == 3  # the voters, the pairs to compare, those that overlap


def test_the_classes_of_a_validation_may_be_a_tuple():
    boxes, scores = crowd(1, 20, 4, seed=6)

    class Decoded(torch.nn.Module):
        nms_iou = 0.7

        def decode(self, raw):
            return boxes, scores

    for single_cls in (True, False):
        by_list, by_tuple = (
            detections_to_score(Decoded(), [], ValidationSettings(classes=classes, single_cls=single_cls))
            for classes in ([0, 2], (0, 2))
        )
        assert all(torch.equal(first, second) for first, second in zip(by_list, by_tuple))
