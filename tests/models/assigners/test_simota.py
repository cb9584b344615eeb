"""SimOTA compared with plain loops in float64, and properties that the step relies on."""

import math

import numpy as np
import pytest
import torch

from models.assigners import simota
from models.assigners.simota import Cells, Predictions, SimOtaAssigner, SimOtaAssignment, TargetSlots
from models.box_coding import cell_centers
from tests.helpers.scoring import reference_iou
from tests.models.assigners.test_assigners import CANVAS, STRIDES, inside_by_hand, scene


def pyramid_strides() -> torch.Tensor:
    shapes = tuple((CANVAS // s, CANVAS // s) for s in STRIDES)
    return cell_centers(shapes, STRIDES, torch.device("cpu"))[1]


def simota_scene(batch: int, slots: int, classes: int, seed: int) -> tuple:
    """Like `scene`, with objectness, and with predictions moved toward targets, so that targets request many cells."""
    logits, predicted, centers, labels, boxes, mask = scene(batch, slots, classes, seed)
    rng = np.random.default_rng(seed)
    chosen = torch.from_numpy(rng.integers(0, slots, (batch, len(centers))))
    target = boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
    pull = torch.from_numpy(rng.uniform(0, 1, (batch, len(centers), 1))).float()
    predicted = torch.where(target.any(-1, keepdim=True), torch.lerp(predicted, target, pull), predicted)
    objectness = torch.from_numpy(rng.normal(-1, 2, (batch, len(centers), 1))).float()
    return objectness, logits, predicted, centers, pyramid_strides(), labels, boxes, mask


def assign(
    objectness, logits, predicted, centers, strides, labels, boxes, mask, *, one_to_one: bool = False
) -> SimOtaAssignment:
    """The assignment of what `simota_scene` returns."""
    predictions = Predictions(objectness, logits, predicted)
    objects = TargetSlots(labels, boxes, mask)
    return SimOtaAssigner(one_to_one=one_to_one)(predictions, objects, Cells(centers, strides, min(STRIDES)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def assign_by_loops(objectness, logits, predicted, centers, strides, labels, boxes, mask) -> tuple[dict, int]:
    """{(image, cell): (target, IoU)}, one pair at a time; and how many cells several targets request."""
    result = {}
    contested = 0
    places = list(zip(centers.double().tolist(), strides[:, 0].tolist()))
    for b in range(len(boxes)):
        rows = predicted[b].double().tolist()
        claims = {}
        scores = [
            [math.sqrt(sigmoid(o) * sigmoid(z)) for z in row]
            for (o,), row in zip(objectness[b].double().tolist(), logits[b].double().tolist())
        ]
        for k, box in enumerate(boxes[b].double().tolist()):
            if not mask[b, k]:
                continue
            middle = [(box[i] + box[i + 2]) / 2 for i in (0, 1)]
            costs = {}
            overlaps = {}
            for n, (center, stride) in enumerate(places):
                inside = inside_by_hand(center, box, min(STRIDES))
                near = all(abs(center[i] - middle[i]) < 2.5 * stride for i in (0, 1))
                if not (inside or near):
                    continue
                overlaps[n] = reference_iou(rows[n], box)
                entropy = -sum(math.log(p if c == labels[b, k] else 1 - p) for c, p in enumerate(scores[n]))
                costs[n] = entropy - 3 * math.log(overlaps[n] + 1e-8) + (0 if inside and near else 1e5)
            count = max(1, int(sum(sorted(overlaps.values(), reverse=True)[:10])))
            for n in sorted(costs, key=costs.get)[:count]:
                claims.setdefault(n, []).append((costs[n], k, overlaps[n]))
        for n, rivals in claims.items():
            _, k, overlap = min(rivals)
            result[b, n] = (k, overlap)
            contested += len(rivals) > 1
    return result, contested


def as_dictionary(assignment) -> dict:
    found = {}
    for b, k, t in assignment.assigned.nonzero().tolist():
        key = b, int(assignment.cells[b, k, t])
        assert key not in found, "a cell answers for one target"
        found[key] = k, float(assignment.overlap[b, k, t])
    return found


def test_assignment_equals_loops() -> None:
    all_contested = 0
    for seed in range(8):
        inputs = simota_scene(3, 7, 4, seed)
        assignment = assign(*inputs)
        expected, contested = assign_by_loops(*inputs)
        found = as_dictionary(assignment)
        assert {key: k for key, (k, _) in found.items()} == {key: k for key, (k, _) in expected.items()}
        overlaps = [found[k][1] for k in expected]
        np.testing.assert_allclose(overlaps, [v[1] for v in expected.values()], rtol=1e-4, atol=1e-6)
        per_target = assignment.assigned.sum(-1)
        assert not per_target[~inputs[-1]].any()
        assert per_target.max() > 3, "some target requests several cells"
        all_contested += contested
    assert all_contested > 0


def test_one_to_one_keeps_the_cheapest_cell_of_each_target() -> None:
    inputs = simota_scene(4, 6, 3, 1)
    mask = inputs[-1]
    one = assign(*inputs, one_to_one=True)
    assert one.cells.shape == (4, 6, 1)
    assert torch.equal(one.assigned[..., 0], mask), "each target has a cell, also where others contest it"
    for b in range(4):
        taken = one.cells[b, one.assigned[b]].tolist()
        assert len(taken) == len(set(taken))
    for k in range(6):  # a single target gets its cheapest candidate
        only = torch.zeros_like(mask)
        only[:, k] = mask[:, k]
        many, single = (assign(*inputs[:-1], only, one_to_one=o) for o in (False, True))
        first = many.cells[:, k, :1]  # cells are ordered by cost
        assert torch.equal(single.cells[:, k][only[:, k]], first[only[:, k]])


def test_grouping_images_does_not_change_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = simota_scene(5, 6, 3, 4)
    whole = assign(*inputs)
    monkeypatch.setattr(simota, "_GROUP_ELEMENTS_CPU", 1)
    single = assign(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(whole, single))


def test_a_single_target_always_gets_a_cell() -> None:
    rng = np.random.default_rng(0)
    center = rng.uniform(0, CANVAS, (200, 1, 2))
    size = rng.uniform(0.01, 100, (200, 1, 2))
    boxes = torch.from_numpy(np.concatenate((center - size / 2, center + size / 2), -1)).float()
    _, logits, predicted, centers, strides, *_ = simota_scene(1, 1, 2, 0)
    logits = logits.expand(200, -1, -1)
    far = (predicted + 1000).expand(200, -1, -1)
    labels = torch.zeros(200, 1, dtype=torch.long)
    mask = torch.ones(200, 1, dtype=torch.bool)
    assignment = assign(logits[..., :1], logits, far, centers, strides, labels, boxes, mask)
    assert assignment.assigned.sum(-1).eq(1).all()
    assert (assignment.overlap == 0).all()


@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_extreme_scores_stay_finite(value: float) -> None:
    inputs = simota_scene(2, 3, 3, 0)
    assignment = assign(torch.full_like(inputs[0], value), torch.full_like(inputs[1], value), *inputs[2:])
    assert assignment.assigned[inputs[-1]].any()
    assert assignment.overlap.isfinite().all()


@pytest.mark.parametrize(("batch", "slots"), [(0, 16), (2, 1)])
def test_no_images_and_no_targets_give_empty_assignments(batch: int, slots: int) -> None:
    _, _, _, centers, strides, *_ = simota_scene(1, 1, 2, 0)
    maps = [torch.zeros(batch, len(centers), channels) for channels in (1, 3, 4)]
    labels, mask = (torch.zeros(batch, slots, dtype=dtype) for dtype in (torch.long, torch.bool))
    assignment = assign(*maps, centers, strides, labels, torch.zeros(batch, slots, 4), mask)
    assert assignment.cells.shape == assignment.assigned.shape == (batch, slots, 10)
    assert not assignment.assigned.any()
