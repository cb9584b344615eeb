"""The layouts of exported models: against the detector's own decoding and NMS."""

from __future__ import annotations

import pytest
import torch

from engine.formats.layouts import CANDIDATES, best_pairs, kept_pairs, make_layout
from tests.helpers.exports import FAMILIES, calibrated_detector, noise_images, shallow_spec
from tests.helpers.selection import select
from tests.models.postprocess.references import several_boxes_per_object
from utils.boxes import cxcywh_to_xyxy

NAMES = tuple("abc")
RULES = {"conf_thres": 0.001, "max_det": 300}


@pytest.fixture(scope="module", params=[*FAMILIES, "yolo26n --nms"])
def fused(request: pytest.FixtureRequest):
    family, _, nms = request.param.partition(" ")
    return calibrated_detector(shallow_spec(family), NAMES).fuse(one_to_one=not nms)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return noise_images()[:2]


@torch.no_grad()
def test_raw(fused, images):
    boxes, scores = fused.decode(fused(images))
    raw = make_layout(fused, "raw")(images)
    assert raw.shape == (2, 4 + 3, boxes.shape[1])
    torch.testing.assert_close(cxcywh_to_xyxy(raw[:, :4].transpose(1, 2)), boxes, rtol=1e-5, atol=1e-4)
    assert torch.equal(raw[:, 4:].transpose(1, 2), scores)


@pytest.mark.parametrize("box_voting", [True, False])
@torch.no_grad()
def test_end2end(fused, images, box_voting):
    iou = fused.nms_iou
    rows = make_layout(fused, "end2end", nms_iou=iou, box_voting=box_voting)(images)
    assert rows.shape == (2, 300, 6)
    found = fused.decode(fused(images))
    expected = select(*found, **RULES, iou_thres=iou, multi_label=True, box_voting=box_voting)
    for row, boxes, scores, count in zip(rows, expected.boxes_xyxy, expected.scores, expected.counts.tolist()):
        assert count > 10
        if box_voting:  # summed in float32, not in float64
            torch.testing.assert_close(row[:count, 4], scores[:count], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(row[:count, 4], scores[:count])
        assert not row[count:][row[count:, 4] == 0].any()
        assert (row[count:, 4] <= 0.001).all()
        firsts = scores[:count].diff().abs() > (1e-5 if box_voting else 0)  # equal scores may change places
        alone = torch.cat((torch.tensor([True]), firsts)) & torch.cat((firsts, torch.tensor([True])))
        if box_voting and iou is not None:
            torch.testing.assert_close(row[:count, :4][alone], boxes[:count][alone], rtol=1e-6, atol=1e-4)
        else:
            assert torch.equal(row[:count, :4][alone], boxes[:count][alone])


class Boxes(torch.nn.Module):
    """Stands in for a detector: returns the same boxes and scores for every image."""

    def __init__(self, boxes: torch.Tensor, scores: torch.Tensor) -> None:
        super().__init__()
        self.found = boxes, scores

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        return [images]

    def decode(self, raw: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.found


@pytest.mark.parametrize("strange", [None, float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("iou", [0.3, 0.7])
def test_box_voting_equals_that_of_the_pipeline(iou, strange):
    boxes, scores = several_boxes_per_object(3, 150, 3, seed=1)
    if strange is not None:
        boxes[0, 3] = strange
        boxes[1, 4, 2:] = strange
    rows = make_layout(Boxes(boxes, scores), "end2end", nms_iou=iou)(torch.zeros(3, 3, 32, 32))
    expected = select(boxes, scores, **RULES, iou_thres=iou)
    unmoved = select(boxes, scores, **RULES, iou_thres=iou, box_voting=False)
    assert (expected.boxes_xyxy != unmoved.boxes_xyxy).any(-1).sum() > 50
    torch.testing.assert_close(rows[..., 4], expected.scores, rtol=1e-5, atol=2e-6)
    alone = expected.scores.diff(prepend=torch.full((3, 1), 2.0)).abs() > 1e-5  # equal scores may change places
    alone &= alone.roll(-1, 1)
    assert alone.sum() > 80
    assert torch.equal(rows[..., 5][alone], expected.classes[alone].float())
    torch.testing.assert_close(rows[..., :4][alone], expected.boxes_xyxy[alone], rtol=1e-6, atol=1e-4, equal_nan=True)


def test_an_image_without_detections_is_all_zeros():
    boxes = torch.rand(2, 50, 4) * 60
    scores = torch.zeros(2, 50, 3)
    scores[1, 7, 2] = 0.5
    pairs, found, classes = best_pairs(boxes, scores, CANDIDATES)
    keep = kept_pairs(pairs, classes[..., 0], found[..., 0] > 0.001, 0.7)
    assert keep.sum(1).tolist() == [0, 1]
    assert classes[1, 0] == 2
    assert torch.equal(pairs[1, 0], boxes[1, 7])


def test_suppression_is_greedy_and_by_class():
    """Box i suppresses box i + 1 alone, so greedy suppression keeps every second one, however long the chain."""
    x = torch.arange(12.0) * 4
    boxes = torch.stack((x, x * 0, x + 10, x * 0 + 10), 1)[None]
    candidates = torch.ones(1, 12, dtype=torch.bool)
    keep = kept_pairs(boxes, torch.zeros(1, 12), candidates, 0.4)
    assert keep[0].tolist() == [True, False] * 6
    assert kept_pairs(boxes, torch.arange(12.0)[None], candidates, 0.4).all()
