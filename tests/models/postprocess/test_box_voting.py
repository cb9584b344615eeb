"""Box voting compared with loops in float64."""

import math

import numpy as np
import pytest
import torch

from models.postprocess import box_voting
from models.postprocess.detections import select_with_and_without_voting
from models.postprocess.selection import PostprocessSettings
from tests.helpers.scoring import reference_iou
from tests.helpers.selection import select
from tests.models.postprocess.references import brute_force, several_boxes_per_object

IOU = {"conf_thres": 0.1, "iou_thres": 0.5, "max_det": 300}


def by_loops(boxes, scores, *, conf_thres, max_det, voters=1024, **settings):
    """Returns the detections of one image after votes, best first: scores (D,), boxes (D, 4), classes (D,), float64."""
    settings |= {"conf_thres": min(conf_thres, 0.01), "max_det": max(max_det, 300)}
    kept = brute_force(boxes, scores, **settings)
    rules = settings | {"iou_thres": 1.0, "max_det": voters, "agnostic": False}
    candidates = brute_force(boxes, scores, **rules)  # none is suppressed
    boxes = boxes.double().tolist()
    result = []
    for rank, (own_score, own_class, own) in enumerate(kept):
        total = own_score
        sums = [own_score * x for x in boxes[own]]
        miss = 1 - own_score
        votes = rank < 300 and (own_score, own_class, own) in candidates
        for score, label, n in candidates if votes else []:
            if score <= 0.01:
                continue
            near = reference_iou(boxes[own], boxes[n])
            is_own = (label, n) == (own_class, own)
            if not is_own and near > settings["iou_thres"] and (settings.get("agnostic") or label == own_class):
                weight = score * math.exp(-((1 - near) ** 2) / 0.02)
                total += weight
                sums = [s + weight * x for s, x in zip(sums, boxes[n])]
                miss *= (1 - weight) ** 0.1 if own_score > 0.01 else 1
        result.append((1 - miss, [s / total for s in sums], own_class))
    result = sorted((row for row in result if row[0] > conf_thres), key=lambda row: -row[0])[:max_det]
    scores, moved, classes = ([row[n] for row in result] for n in range(3))
    return np.array(scores), np.array(moved).reshape(-1, 4), np.array(classes)


def assert_equals_loops(boxes, scores, *, min_moved_fraction=0.5, **settings):
    detections = select(boxes, scores, **{k: v for k, v in settings.items() if k != "voters"})
    moved = []
    for b in range(len(boxes)):
        expected_scores, expected, classes = by_loops(boxes[b], scores[b], **settings)
        count = int(detections.counts[b])
        assert count == len(expected)
        np.testing.assert_allclose(detections.scores[b, :count], expected_scores, rtol=1e-6)
        error = 1e-8 * float(boxes.abs().max())
        order = np.lexsort((classes, *expected.round(2).T, -expected_scores.astype(np.float32)))
        of_found = detections.boxes_xyxy[b, :count].double().numpy()
        found_classes = detections.classes[b, :count].numpy()
        found_order = np.lexsort((found_classes, *of_found.round(2).T, -detections.scores[b, :count].numpy()))
        np.testing.assert_allclose(of_found[found_order], expected[order], rtol=2e-7, atol=error)
        np.testing.assert_array_equal(found_classes[found_order], classes[order])
        assert not detections.boxes_xyxy[b, count:].any()
        assert not detections.scores[b, count:].any()
        moved += [not (boxes[b] == box).all(1).any() for box in detections.boxes_xyxy[b, :count]]
    assert np.mean(moved) >= min_moved_fraction
    return detections


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("agnostic", [True, False])
@pytest.mark.parametrize("iou_thres", [0.05, 0.3, 0.45, 0.7, 0.9])
def test_equals_loops(iou_thres, agnostic, multi_label):
    boxes, scores = several_boxes_per_object(2, 110, 3, seed=1)
    settings = {"iou_thres": iou_thres, "agnostic": agnostic, "multi_label": multi_label, "max_det": 300}
    assert_equals_loops(boxes, scores, conf_thres=0.2, **settings, min_moved_fraction=0.02 if iou_thres > 0.8 else 0.5)


def test_the_mean_of_two_boxes_is_that_of_the_paper():
    """An IoU of 0.8 gives a weight of exp(-2)."""
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 8], [0, 0, 10, 4]]])
    scores = torch.tensor([[[0.5], [0.25], [0.2]]])
    detections = select(boxes, scores, conf_thres=0.1, iou_thres=0.5, max_det=5)
    weight = 0.25 * math.exp(-2)
    assert detections.counts.tolist() == [2]
    np.testing.assert_allclose(detections.boxes_xyxy[0, 0], [0, 0, 10, (5 + 8 * weight) / (0.5 + weight)], rtol=1e-7)
    assert detections.boxes_xyxy[0, 1].tolist() == [0, 0, 10, 4]  # overlaps the second box by exactly the threshold


def test_a_vote_raises_the_score_by_a_tenth_of_a_noisy_or():
    """It needs no score above the confidence threshold, which is one of the new scores."""
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 8], [50, 50, 60, 60], [50, 50, 60, 60], [90, 90, 95, 95]]])
    scores = torch.tensor([[[0.5], [0.25], [0.38], [0.36], [0.38]]])
    settings = {"iou_thres": 0.5, "max_det": 5}
    detections = select(boxes, scores, conf_thres=0.4, **settings)
    assert detections.counts.tolist() == [2]
    expected = [1 - 0.5 * (1 - 0.25 * math.exp(-2)) ** 0.1, 1 - 0.62 * 0.64**0.1]
    np.testing.assert_allclose(detections.scores[0, :2], expected, rtol=1e-6)
    assert detections.boxes_xyxy[0, 1].tolist() == [50, 50, 60, 60]
    assert select(boxes, scores, conf_thres=0.4, **settings, box_voting=False).counts.tolist() == [1]
    assert select(boxes, scores, conf_thres=0.1, **settings).scores[0, 2] == scores[0, 4, 0]  # nobody voted


def test_a_box_below_the_least_vote_is_not_raised_by_votes_for_another_one():
    """The last box overlaps the voters, which the first one suppresses, but not the first one."""
    voters = [[10 + i * 0.02, 0, 110 + i * 0.02, 100] for i in range(30)]
    boxes = torch.tensor([[[0, 0, 100, 100], *voters, [20, 0, 120, 100]]], dtype=torch.float)
    scores = torch.tensor([[[0.9]] + [[0.6]] * 30 + [[0.005]]])
    for conf_thres, count in ((0.001, 2), (0.01, 1), (0.25, 1)):
        detections = select(boxes, scores, conf_thres=conf_thres, iou_thres=0.7, max_det=300)
        assert detections.counts.tolist() == [count]
        assert detections.scores[0, 0] > 0.92
        assert count == 1 or detections.scores[0, 1] == scores[0, -1, 0]


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("agnostic", [True, False])
@pytest.mark.parametrize("count", [60, 2000])
def test_max_det_and_class_filter_change_no_detection(count, agnostic, multi_label):
    """Among 2000 boxes, more than `VOTERS` are candidates, and far more than 300 are kept."""
    rng = np.random.default_rng(13)
    corner = torch.from_numpy(rng.uniform(0, 12 * count**0.5, (2, count, 2)))
    boxes = torch.cat((corner, corner + torch.from_numpy(rng.uniform(20, 40, (2, count, 2)))), -1).float()
    scores = torch.from_numpy(rng.uniform(0, 1, (2, count, 3)) ** 3).float()
    settings = {"conf_thres": 0.05, "iou_thres": 0.5, "agnostic": agnostic, "multi_label": multi_label}
    everything = select(boxes, scores, **settings, max_det=9000)
    assert (everything.counts > (700 if count == 2000 else 5)).all()
    for classes, max_det in ((None, 5), (None, 300), (None, 700), ([2], 300), ([0, 2], 700), ([0, 1, 2], 5)):
        detections = select(boxes, scores, **settings, max_det=max_det, classes=classes)
        for b in range(2):
            chosen = torch.isin(everything.classes[b], torch.tensor(classes or [0, 1, 2])) & (everything.scores[b] > 0)
            expected = [t[b][chosen][:max_det] for t in everything[:3]]
            assert detections.counts[b] == len(expected[0])
            assert all(torch.equal(t[b, : len(e)], e) for t, e in zip(detections[:3], expected))


def test_ties_of_scores_and_of_places():
    rng = np.random.default_rng(0)
    corner = rng.integers(-5, 25, (2, 150, 2))
    grid = torch.from_numpy(np.concatenate((corner, corner + rng.integers(3, 12, (2, 150, 2))), -1)).float()
    coarse = torch.from_numpy(rng.integers(0, 4, (2, 150, 2)) / 4).float()
    assert_equals_loops(grid, coarse, conf_thres=0.1, iou_thres=0.5, max_det=300, min_moved_fraction=0.2)


def test_only_the_best_candidates_vote_and_move(monkeypatch):
    monkeypatch.setattr("models.postprocess.suppression.VOTERS", 20)
    boxes, scores = several_boxes_per_object(3, 90, 2, seed=5)
    scores[1, 40:] = 0
    settings = {"conf_thres": 0.05, "iou_thres": 0.6, "max_det": 300}
    detections = assert_equals_loops(boxes, scores, **settings, voters=20, min_moved_fraction=0.1)
    assert (detections.counts > 20).any()


def test_the_number_of_pairs_compared_together_does_not_change_the_result(monkeypatch):
    boxes, scores = several_boxes_per_object(4, 120, 3, seed=6)
    expected = select(boxes, scores, **IOU)
    monkeypatch.setattr(box_voting, "_PAIRS_ON_CPU", 100)
    assert all(torch.equal(a, b) for a, b in zip(select(boxes, scores, **IOU), expected))


@pytest.mark.parametrize("conf_thres", [0.004, 0.3, 0.6])
def test_the_confidence_threshold_changes_no_detection(conf_thres):
    boxes, scores = several_boxes_per_object(3, 200, 2, seed=12)
    scores = scores * torch.linspace(0.001, 1, 200)[:, None] ** 2
    boxes = torch.cat((boxes, torch.tensor([600.0, 600, 620, 620]).expand(3, 1, 4)), 1)
    scores = torch.cat((scores, torch.full((3, 1, 2), 0.002)), 1)
    lower = select(boxes, scores, conf_thres=0.0, iou_thres=0.5, max_det=300)
    detections = select(boxes, scores, conf_thres=conf_thres, iou_thres=0.5, max_det=300)
    shown = (lower.scores > conf_thres).sum(1)
    assert torch.equal(detections.counts, shown)
    assert (shown > 0).all()
    assert (shown < lower.counts).all()
    for b, count in enumerate(shown.tolist()):
        assert all(torch.equal(x[b, :count], y[b, :count]) for x, y in zip(detections[:3], lower[:3]))


@pytest.mark.parametrize("conf_thres", [0.001, 0.3])
@pytest.mark.parametrize("classes", [None, [2, 0]])
@pytest.mark.parametrize("agnostic", [True, False])
def test_one_nms_serves_detections_with_and_without_voting(conf_thres, classes, agnostic):
    boxes, scores = several_boxes_per_object(3, 400, 3, seed=9)
    settings = {"conf_thres": conf_thres, "iou_thres": 0.5, "classes": classes, "agnostic": agnostic, "max_det": 30}
    together = select_with_and_without_voting(boxes, scores, PostprocessSettings(**settings))
    for detections, box_voting_is_on in zip(together, (True, False)):
        expected = select(boxes, scores, **settings, box_voting=box_voting_is_on)
        assert all(torch.equal(*tensors) for tensors in zip(detections, expected))
    assert not torch.equal(together[0].boxes_xyxy, together[1].boxes_xyxy)


@pytest.mark.parametrize("agnostic", [True, False])
def test_other_images_do_not_change_a_bit(agnostic):
    """Neither do boxes of other classes, padding, or the image's position in the batch."""
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
    if not agnostic:
        only = select(boxes, torch.where(torch.tensor([False, True, False]), scores, 0.0), **IOU)
        of_class = together.boxes_xyxy[0][(together.classes[0] == 1) & (together.scores[0] > 0)]
        assert torch.equal(only.boxes_xyxy[0, : only.counts[0]], of_class)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 3e38, -1e20])
def test_boxes_that_are_no_boxes_stay_and_do_not_vote(strange):
    boxes, scores = several_boxes_per_object(2, 60, 2, seed=9)
    expected = select(boxes, scores, **IOU)
    for corner in range(4):
        box = torch.tensor([10.0, 20, 300, 300])
        box[corner] = strange
        more = torch.cat((boxes, box.expand(2, 3, 4)), 1), torch.cat((scores, torch.full((2, 3, 2), 1.5)), 1)
        detections = select(*more, **IOU)
        unmoved = select(*more, **IOU, box_voting=False)
        extra = int(detections.counts[0] - expected.counts[0])
        assert extra >= 2
        for b in range(2):
            count = int(expected.counts[b])
            assert torch.equal(detections.boxes_xyxy[b, extra : extra + count], expected.boxes_xyxy[b, :count])
            first = detections.boxes_xyxy[b, :extra]
            own = unmoved.boxes_xyxy[b, :extra]
            assert torch.equal(first.nan_to_num(), own.nan_to_num())


@pytest.mark.parametrize("side", [1e-3, 1.0, 1e4])
def test_boxes_far_from_the_origin(side):
    """The pairs to compare are found by sides; a threshold is not crossed by their rounding."""
    boxes, scores = several_boxes_per_object(2, 100, 2, seed=11)
    boxes = boxes * side - 180 * side
    assert_equals_loops(boxes, scores, conf_thres=0.2, iou_thres=0.45, max_det=300)
