"""Detections by rank, as of models without NMS, compared with brute force."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kernel_count import NoSync
from tests.helpers.selection import select
from tests.models.postprocess.references import brute_force


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("classes", [None, [0, 2], []])
@pytest.mark.parametrize("max_det", [7, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_selection_equals_brute_force(multi_label: bool, classes, max_det: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    boxes = torch.rand(3, 60, 4, generator=generator) * 100
    scores = torch.rand(3, 60, 4, generator=generator)
    boxes[..., 2:] += boxes[..., :2]
    scores = (scores * 8).round() / 8 if ties else scores
    settings = {"conf_thres": 0.2, "max_det": max_det, "multi_label": multi_label, "classes": classes}
    scores[1] = 0.05  # an image with nothing above the threshold
    scores[0, 5] = float("nan")
    with NoSync():
        detections = select(boxes, scores, iou_thres=None, **settings)
    assert detections.boxes_xyxy.shape == (3, max_det, 4)
    for b in range(3):
        expected = brute_force(boxes[b], scores[b].nan_to_num(-1.0), iou_thres=1.0, **settings)  # suppresses none
        count = int(detections.counts[b])
        assert count == len(expected)
        assert detections.scores[b, :count].tolist() == [score for score, _, _ in expected]
        assert detections.classes[b, :count].tolist() == [label for _, label, _ in expected]
        assert torch.equal(detections.boxes_xyxy[b, :count], boxes[b][[n for _, _, n in expected]])
        assert not any(t[b, count:].any() for t in detections[:3])
        alone = select(boxes[b : b + 1], scores[b : b + 1], iou_thres=None, **settings)
        assert all(torch.equal(t[0], detections[i][b]) for i, t in enumerate(alone))


def test_sides_that_changed_places_enclose_nothing() -> None:
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 10], [30, 20, 20, 40]]])
    scores = torch.tensor([[[0.9], [0.8], [0.7]]])
    for iou_thres, expected in ((None, 3), (0.5, 2)):
        detections = select(boxes, scores, conf_thres=0.1, iou_thres=iou_thres, max_det=5)
        assert detections.counts.tolist() == [expected]
        assert detections.boxes_xyxy[0, expected - 1].tolist() == [30, 20, 30, 40]
