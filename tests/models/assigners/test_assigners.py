"""Assignment compared with slow float64 loops in Python."""

import numpy as np
import pytest
import torch

from models.assigners.task_aligned import Assignment, TaskAlignedAssigner
from tests.models.assigners.scenes import Scene, assign, cell_centers_px, is_inside, owners_in_rounds, random_scene
from utils.boxes import iou

ALPHA = 0.5
BETA = 6.0


def assign_by_loops(scene: Scene, *, stride: float, topk: int) -> dict[tuple[int, int, int], float]:
    """Returns {(image, target, cell): score}, one comparison at a time."""
    overlaps = iou(scene.predicted.double()[:, None], scene.boxes.double()[:, :, None], "ciou").clamp(min=0.01)
    centers = cell_centers_px().tolist()
    result = {}
    for b in range(len(scene.boxes)):
        claims: dict[int, list[tuple[float, int, float]]] = {}  # cell to (overlap, -target, metric)
        for k, box in enumerate(scene.boxes[b].tolist()):
            metric = {}
            for n, center in enumerate(centers):
                if scene.mask[b, k] and is_inside(center, box, stride):
                    score = 1 / (1 + np.exp(-float(scene.logits[b, n, scene.labels[b, k]])))
                    metric[n] = score**ALPHA * float(overlaps[b, k, n]) ** BETA
            for n in sorted(metric, key=metric.get, reverse=True)[:topk]:
                if metric[n] > 0:
                    claims.setdefault(n, []).append((float(overlaps[b, k, n]), -k, metric[n]))
        owner = {n: max(claim) for n, claim in claims.items()}
        for k in range(scene.boxes.shape[1]):
            own_cells = {n: (overlap, metric) for n, (overlap, minus_k, metric) in owner.items() if -minus_k == k}
            best_overlap = max((overlap for overlap, _ in own_cells.values()), default=0)
            best_metric = max((metric for _, metric in own_cells.values()), default=0)
            for n, (_, metric) in own_cells.items():
                result[b, k, n] = metric / best_metric * best_overlap
    return result


def as_dictionary(assignment: Assignment) -> dict[tuple[int, int, int], float]:
    scores = np.ndenumerate(assignment.scores.numpy())
    return {(b, k, int(assignment.cells[b, k, j])): float(score) for (b, k, j), score in scores if score > 0}


@pytest.mark.parametrize(("topk", "seed"), [(10, 0), (3, 1), (1, 2), (1000, 3)])
def test_task_aligned_assignment_equals_loops(topk, seed):
    scene = random_scene(3, 7, 4, seed)
    assignment = assign(TaskAlignedAssigner(topk=topk), scene)
    expected = assign_by_loops(scene, stride=8, topk=topk)
    found = as_dictionary(assignment)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[k] for k in expected], list(expected.values()), rtol=2e-3, atol=1e-7)
    assert len({(b, n) for b, _, n in found}) == len(found), "a cell answers for one target"
    assert not assignment.scores[~scene.mask].any()


def one_to_one_by_loops(logits: torch.Tensor, predicted: torch.Tensor, boxes: torch.Tensor) -> dict[int, int]:
    """Returns {target: cell} of one image."""
    centers = cell_centers_px()
    candidates = {}
    for k, box in enumerate(boxes):
        overlaps = iou(predicted, box, "ciou").clamp(min=0.01)
        inside = ((centers - (box[:2] + box[2:]) / 2).abs() <= ((box[2:] - box[:2]) / 2).clamp(min=4.001)).all(-1)
        metric = logits[:, 0].sigmoid() ** 0.5 * overlaps**6 * inside
        best = metric.argsort(descending=True)[:10].tolist()
        candidates[k] = [(n, float(overlaps[n])) for n in best if metric[n] > 0]
    return owners_in_rounds(candidates)


@pytest.mark.parametrize("topk", [10, 1])
def test_each_target_gets_the_best_cell_that_no_other_has(topk: int) -> None:
    """A one-to-one match chooses among ten candidates, also if a one-to-many match would select fewer."""
    scene = random_scene(3, 8, 1, seed=0)
    boxes = scene.boxes
    mask = scene.mask
    boxes[0, :4] = torch.tensor([40.0, 40.0, 56.0, 56.0]) + torch.arange(4)[:, None] / 2  # they request the same cells
    assigners = (TaskAlignedAssigner(topk=topk, one_to_one=True), TaskAlignedAssigner(topk=1))
    one_to_one, first = (assign(assigner, scene) for assigner in assigners)
    assert one_to_one.cells.shape == (*mask.shape, 1)
    num_assigned = 0
    for b in range(3):
        expected = one_to_one_by_loops(scene.logits[b], scene.predicted[b], boxes[b, mask[b]])
        assigned = {k: int(one_to_one.cells[b, k, 0]) for k in range(mask.shape[1]) if one_to_one.scores[b, k, 0] > 0}
        assert assigned == expected
        num_assigned += len(assigned)
        for k, n in assigned.items():
            overlap = iou(scene.predicted[b, n], boxes[b, k], "ciou").clamp(min=0.01)
            torch.testing.assert_close(one_to_one.scores[b, k, 0], overlap)
    assert num_assigned > (first.scores > 0).sum(), "a top-1 match leaves more of them without a cell"
