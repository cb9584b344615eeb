"""The layouts of exported models: against the detector's own decoding and NMS."""

from __future__ import annotations

import pytest
import torch

from engine.export.layouts import CANDIDATES, best_pairs, kept_pairs, make_layout
from models.postprocess.detections import select_detections
from tests.helpers.exports import FAMILIES, lively, noise, small
from utils.boxes import cxcywh_to_xyxy

NAMES = tuple("abc")


@pytest.fixture(scope="module", params=[*FAMILIES, "yolo26n --nms"])
def fused(request: pytest.FixtureRequest):
    family, _, nms = request.param.partition(" ")
    return lively(small(family), NAMES).fuse(one_to_one=not nms)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return noise()[:2]


@torch.no_grad()
def test_raw_and_deepstream(fused, images):
    boxes, scores = fused.decode(fused(images))
    raw = make_layout(fused, "raw")(images)
    assert raw.shape == (2, 4 + 3, boxes.shape[1])
    torch.testing.assert_close(cxcywh_to_xyxy(raw[:, :4].transpose(1, 2)), boxes, rtol=1e-5, atol=1e-4)
    assert torch.equal(raw[:, 4:].transpose(1, 2), scores)
    rows = make_layout(fused, "deepstream")(images)
    assert torch.equal(rows[..., :4], boxes)
    assert torch.equal(rows[..., 4], scores.amax(-1))
    assert torch.equal(scores.gather(2, rows[..., 5:].long())[..., 0], rows[..., 4])


@torch.no_grad()
def test_end2end(fused, images):
    iou = fused.nms_iou
    rows = make_layout(fused, "end2end", nms_iou=iou)(images)
    assert rows.shape == (2, 300, 6)
    expected = select_detections(
        *fused.decode(fused(images)), conf_thres=0.001, iou_thres=iou, max_det=300, multi_label=True
    )
    for row, boxes, scores, count in zip(rows, expected.boxes_xyxy, expected.scores, expected.counts.tolist()):
        assert count > 10
        assert torch.equal(row[:count, 4], scores[:count])
        assert not row[count:][row[count:, 4] == 0].any()
        assert (row[count:, 4] <= 0.001).all()
        firsts = scores[:count].diff() != 0  # equal scores may change places
        alone = torch.cat((torch.tensor([True]), firsts)) & torch.cat((firsts, torch.tensor([True])))
        assert torch.equal(row[:count, :4][alone], boxes[:count][alone])


def test_an_image_without_detections_is_all_zeros():
    boxes, scores = torch.rand(2, 50, 4) * 60, torch.zeros(2, 50, 3)
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
