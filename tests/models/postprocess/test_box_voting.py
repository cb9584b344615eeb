"""Box voting compared with loops in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from models.postprocess import box_voting
from models.postprocess.detections import select_for_validation
from models.postprocess.selection import ValidationSettings
from tests.helpers.scoring import reference_iou
from tests.helpers.selection import select
from tests.models.postprocess.references import brute_force, several_boxes_per_object

IOU = {"conf_thres": 0.1, "iou_thres": 0.5, "max_det": 300}


def by_loops(boxes, scores, *, conf_thres, max_det, **settings):
    """Returns the detections of one image after votes, best first: scores (D,), boxes (D, 4), classes (D,), float64."""
    settings |= {"conf_thres": min(conf_thres, 0.01), "max_det": 300}
    kept = brute_force(boxes, scores, **settings)
    candidates = brute_force(boxes, scores, **settings | {"iou_thres": 1.0, "max_det": 1024, "agnostic": False})
    boxes = boxes.double().tolist()
    result = []
    for own_score, own_class, own in kept:
        total = own_score
        sums = [own_score * x for x in boxes[own]]
        miss = 1 - own_score
        for score, label, n in candidates:
            near = reference_iou(boxes[own], boxes[n])
            if (label, n) == (own_class, own) or score <= 0.01 or near <= settings["iou_thres"]:
                continue
            if settings.get("agnostic") or label == own_class:
                weight = score * math.exp(-((1 - near) ** 2) / 0.02)
                total += weight
                sums = [s + weight * x for s, x in zip(sums, boxes[n])]
                miss *= (1 - weight) ** 0.1 if own_score > 0.01 else 1
        result.append((1 - miss, [s / total for s in sums], own_class))
    result = sorted((row for row in result if row[0] > conf_thres), key=lambda row: -row[0])[:max_det]
    scores, moved, classes = ([row[n] for row in result] for n in range(3))
    return np.array(scores), np.array(moved).reshape(-1, 4), np.array(classes)


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("agnostic", [True, False])
@pytest.mark.parametrize(("iou_thres", "offset", "max_det"), [(0.05, 0, 300), (0.45, 0, 5), (0.7, 1e4, 300)])
def test_detections_equal_loops(monkeypatch, iou_thres, offset, max_det, agnostic, multi_label):
    """Few pairs are compared together, also of boxes far from the origin."""
    monkeypatch.setattr(box_voting, "_PAIRS_ON_CPU", 100)
    boxes, scores = several_boxes_per_object(2, 110, 3, seed=1)
    boxes -= offset
    settings = {"conf_thres": 0.2, "iou_thres": iou_thres, "agnostic": agnostic, "multi_label": multi_label}
    detections = select(boxes, scores, **settings, max_det=max_det)
    moved = []
    for b in range(len(boxes)):
        expected_scores, expected, classes = by_loops(boxes[b], scores[b], **settings, max_det=max_det)
        count = int(detections.counts[b])
        np.testing.assert_allclose(detections.scores[b, :count], expected_scores, rtol=1e-6)
        np.testing.assert_allclose(detections.boxes_xyxy[b, :count], expected, rtol=2e-7, atol=1e-5)
        np.testing.assert_array_equal(detections.classes[b, :count], classes)
        assert not any(t[b, count:].any() for t in detections[:3])
        moved += [not (boxes[b] == box).all(1).any() for box in detections.boxes_xyxy[b, :count]]
    assert np.mean(moved) >= 0.5


@pytest.mark.parametrize("box_voting", [True, False])
def test_a_validation_selects_for_ap_and_what_detect_py_finds_with_and_without_voting(box_voting):
    boxes, scores = several_boxes_per_object(3, 400, 4, seed=9)

    class Decoded(nn.Module):
        nms_iou = 0.7

        def decode(self, raw):
            return boxes, scores

    settings = ValidationSettings(classes=(3, 1), box_voting=box_voting)
    for_ap, detected = select_for_validation(Decoded(), [], settings)
    common = {"conf_thres": 0.001, "max_det": 300, "classes": [3, 1]}
    for found, chosen in (
        (for_ap, {"iou_thres": 0.7, "box_voting": box_voting}),
        (detected, {"iou_thres": 0.45, "multi_label": False, "box_voting": box_voting}),
    ):
        expected = select(boxes, scores, **common, **chosen)
        assert all(torch.equal(found[n], expected[n]) for n in (0, 1, 3))
        assert torch.equal(found.classes, torch.where(expected.classes == 1, 1, 0))  # numbered in the given order


@pytest.mark.parametrize("agnostic", [True, False])
def test_other_images_do_not_change_a_bit(agnostic):
    boxes, scores = several_boxes_per_object(5, 300, 3, seed=7)
    boxes[1] *= 1e4
    boxes[2] -= 200
    scores[3] = 0
    scores[4, 30:] = 0
    together = select(boxes, scores, **IOU, agnostic=agnostic)
    turned = select(boxes.flip(0), scores.flip(0), **IOU, agnostic=agnostic)
    for b in range(5):
        used = 30 if b == 4 else 300
        alone = select(boxes[b : b + 1, :used], scores[b : b + 1, :used], **IOU, agnostic=agnostic)
        assert all(torch.equal(x[b], y[0]) and torch.equal(x[b], z[4 - b]) for x, y, z in zip(together, alone, turned))
