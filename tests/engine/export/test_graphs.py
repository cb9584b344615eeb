"""The layouts of exported models: against the detector's own decoding and NMS."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.export.graphs import EndToEnd, Raw, kept_pairs
from tests.helpers.exports import FAMILIES, calibrated_detector, noise_images, shallow_spec
from tests.helpers.selection import select
from utils.boxes import cxcywh_to_xyxy

RULES = {"conf_thres": 0.001, "max_det": 300, "multi_label": True, "box_voting": False}


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, "yolo26n --nms"])
def test_both_layouts_have_the_detectors_boxes(family: str):
    family, _, nms = family.partition(" ")
    fused = calibrated_detector(shallow_spec(family), tuple("abc")).fuse(one_to_one=not nms)
    images = noise_images()[:2]
    boxes, scores = fused.decode(fused(images))
    raw = Raw(fused, half=False, nms_iou=fused.nms_iou)(images)
    torch.testing.assert_close(cxcywh_to_xyxy(raw[:, :4].transpose(1, 2)), boxes, rtol=1e-5, atol=1e-4)
    assert torch.equal(raw[:, 4:].transpose(1, 2), scores)

    rows = EndToEnd(fused, half=False, nms_iou=fused.nms_iou)(images)
    assert rows.shape == (2, 300, 6)
    expected = select(boxes, scores, **RULES, iou_thres=fused.nms_iou)
    for row, wanted, score, count in zip(rows, expected.boxes_xyxy, expected.scores, expected.counts.tolist()):
        assert count > 10
        assert torch.equal(row[:count, 4], score[:count])
        assert (row[count:, 4] <= 0.001).all()
        changes = score[:count].diff() != 0  # equal scores may change places
        alone = torch.cat((torch.tensor([True]), changes)) & torch.cat((changes, torch.tensor([True])))
        assert torch.equal(row[:count, :4][alone], wanted[:count][alone])


def test_suppression_is_greedy_and_by_class():
    """Box i suppresses box i + 1 alone, so greedy suppression keeps every second one, however long the chain."""
    x = torch.arange(12.0) * 4
    boxes = torch.stack((x, x * 0, x + 10, x * 0 + 10), 1)[None]
    candidates = torch.ones(1, 12, dtype=torch.bool)
    keep = kept_pairs(boxes, torch.zeros(1, 12), candidates, 0.4)
    assert keep[0].tolist() == [True, False] * 6
    assert kept_pairs(boxes, torch.arange(12.0)[None], candidates, 0.4).all()


class Fixed(nn.Module):
    """Stands in for a detector that finds the same objects in each image."""

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        return [images]

    def decode(self, raw: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [40, 0, 50, 10], [0, 40, 10, 50]])
        scores = torch.tensor([[0.9, 0.0], [0.8, 0.0], [0.0, 0.5], [0.0005, 0.0]])
        return boxes.expand(len(raw[0]), -1, -1), scores.expand(len(raw[0]), -1, -1)


def test_rows_after_the_last_detection_are_zeros():
    """Neither a suppressed box nor one of a score below validation's is a row."""
    for rows in EndToEnd(Fixed(), half=False, nms_iou=0.5)(torch.zeros(2, 3, 64, 64)):
        assert rows[0].tolist() == pytest.approx([0, 0, 10, 10, 0.9, 0])
        assert rows[1].tolist() == pytest.approx([40, 0, 50, 10, 0.5, 1])
        assert not rows[2:].any()
