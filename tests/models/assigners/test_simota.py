"""SimOTA compared with plain loops in float64, and properties that the step relies on."""

import math
from dataclasses import replace

import numpy as np
import torch

from models.assigners.simota import Cells, Predictions, SimOtaAssigner, SimOtaAssignment, TargetSlots
from tests.helpers.scoring import reference_iou
from tests.models.assigners.scenes import (
    STRIDES,
    Scene,
    cell_centers_px,
    cell_strides,
    is_inside,
    random_scene,
    sigmoid,
)


def crowded_scene(batch: int, slots: int, classes: int, seed: int) -> tuple[Scene, torch.Tensor]:
    """Returns a random scene whose predictions are moved toward targets, so that targets request many cells, and
    objectness logits (B, N, 1)."""
    scene = random_scene(batch, slots, classes, seed)
    rng = np.random.default_rng(seed)
    chosen = torch.from_numpy(rng.integers(0, slots, (batch, scene.num_cells)))
    target = scene.boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
    pull = torch.from_numpy(rng.uniform(0, 1, (batch, scene.num_cells, 1))).float()
    moved = torch.lerp(scene.predicted, target, pull)
    predicted = torch.where(target.any(-1, keepdim=True), moved, scene.predicted)
    objectness = torch.from_numpy(rng.normal(-1, 2, (batch, scene.num_cells, 1))).float()
    return replace(scene, predicted=predicted), objectness


def assign(scene: Scene, objectness: torch.Tensor, *, one_to_one: bool = False) -> SimOtaAssignment:
    predictions = Predictions(objectness, scene.logits, scene.predicted)
    objects = TargetSlots(scene.labels, scene.boxes, scene.mask)
    cells = Cells(cell_centers_px(), cell_strides(), min(STRIDES))
    return SimOtaAssigner(one_to_one=one_to_one)(predictions, objects, cells)


def assign_by_loops(scene: Scene, objectness: torch.Tensor) -> tuple[dict, int]:
    """Returns {(image, cell): (target, IoU)}, one pair at a time; and how many cells several targets request."""
    result = {}
    contested = 0
    for b, boxes in enumerate(scene.boxes.double().tolist()):
        predicted = scene.predicted[b].double().tolist()
        claims: dict[int, list[tuple[float, int, float]]] = {}  # cell to (cost, target, overlap)
        scores = [
            [math.sqrt(sigmoid(o) * sigmoid(z)) for z in row]
            for (o,), row in zip(objectness[b].double().tolist(), scene.logits[b].double().tolist())
        ]
        for k, box in enumerate(boxes):
            if not scene.mask[b, k]:
                continue
            costs, overlaps = candidate_costs(box, int(scene.labels[b, k]), predicted, scores)
            count = max(1, int(sum(sorted(overlaps.values(), reverse=True)[:10])))
            for n in sorted(costs, key=costs.get)[:count]:
                claims.setdefault(n, []).append((costs[n], k, overlaps[n]))
        for n, rivals in claims.items():
            _, k, overlap = min(rivals)
            result[b, n] = (k, overlap)
            contested += len(rivals) > 1
    return result, contested


def candidate_costs(
    box: list[float], label: int, predicted: list[list[float]], scores: list[list[float]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the costs and the IoUs of one target's candidate cells, by cell."""
    middle = [(box[i] + box[i + 2]) / 2 for i in (0, 1)]
    costs = {}
    overlaps = {}
    for n, (center, (stride,)) in enumerate(zip(cell_centers_px().double().tolist(), cell_strides().tolist())):
        inside = is_inside(center, box, min(STRIDES))
        near = all(abs(center[i] - middle[i]) < 2.5 * stride for i in (0, 1))
        if inside or near:
            overlaps[n] = reference_iou(predicted[n], box)
            entropy = -sum(math.log(p if c == label else 1 - p) for c, p in enumerate(scores[n]))
            costs[n] = entropy - 3 * math.log(overlaps[n] + 1e-8) + (0 if inside and near else 1e5)
    return costs, overlaps


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
        scene, objectness = crowded_scene(3, 7, 4, seed)
        assignment = assign(scene, objectness)
        expected, contested = assign_by_loops(scene, objectness)
        found = as_dictionary(assignment)
        assert {key: k for key, (k, _) in found.items()} == {key: k for key, (k, _) in expected.items()}
        overlaps = [found[k][1] for k in expected]
        np.testing.assert_allclose(overlaps, [v[1] for v in expected.values()], rtol=1e-4, atol=1e-6)
        per_target = assignment.assigned.sum(-1)
        assert not per_target[~scene.mask].any()
        assert per_target.max() > 3, "some target requests several cells"
        all_contested += contested
    assert all_contested > 0


def test_one_to_one_keeps_the_cheapest_cell_of_each_target() -> None:
    scene, objectness = crowded_scene(4, 6, 3, 1)
    mask = scene.mask
    one = assign(scene, objectness, one_to_one=True)
    assert one.cells.shape == (4, 6, 1)
    assert torch.equal(one.assigned[..., 0], mask), "each target has a cell, also where others contest it"
    for b in range(4):
        taken = one.cells[b, one.assigned[b]].tolist()
        assert len(taken) == len(set(taken))
    for k in range(6):  # a single target gets its cheapest candidate
        only = torch.zeros_like(mask)
        only[:, k] = mask[:, k]
        alone = replace(scene, mask=only)
        many, single = (assign(alone, objectness, one_to_one=one_to_one) for one_to_one in (False, True))
        first = many.cells[:, k, :1]  # cells are ordered by cost
        assert torch.equal(single.cells[:, k][only[:, k]], first[only[:, k]])
