"""Assignment of one cell to each target, compared with a loop."""

from __future__ import annotations

import pytest
import torch

from models.assigners.task_aligned import TaskAlignedAssigner
from tests.models.assigners.scenes import assign, cell_centers_px, random_scene
from utils.boxes import iou


def one_to_one_by_loops(logits: torch.Tensor, predicted: torch.Tensor, boxes: torch.Tensor) -> dict[int, int]:
    """Returns {target: cell} of one image: in rounds, unassigned targets request their best free candidate, and the
    best overlap wins."""
    centers = cell_centers_px()
    candidates = {}
    for k, box in enumerate(boxes):
        overlaps = iou(predicted, box, "ciou").clamp(min=0.01)
        inside = ((centers - (box[:2] + box[2:]) / 2).abs() <= ((box[2:] - box[:2]) / 2).clamp(min=4.001)).all(-1)
        metric = logits[:, 0].sigmoid() ** 0.5 * overlaps**6 * inside
        best = metric.argsort(descending=True)[:10].tolist()
        candidates[k] = [(n, float(overlaps[n])) for n in best if metric[n] > 0]
    owner: dict[int, int] = {}
    for _ in range(4):
        claims: dict[int, tuple[float, int]] = {}
        for k in candidates.keys() - owner.keys():
            free = [(n, overlap) for n, overlap in candidates[k] if n not in owner.values()]
            if free and (free[0][0] not in claims or (free[0][1], -k) > claims[free[0][0]]):
                claims[free[0][0]] = (free[0][1], -k)
        owner |= {-k: n for n, (_, k) in claims.items()}
    return owner


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
