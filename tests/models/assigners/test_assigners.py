"""Assignment compared with slow float64 loops in Python."""

import numpy as np
import pytest
import torch

from models.assigners.candidates import resolve_conflicts
from models.assigners.simota import cells_inside
from models.assigners.task_aligned import Assignment, TaskAlignedAssigner
from tests.models.assigners.scenes import CANVAS, Scene, assign, cell_centers_px, empty_scene, is_inside, random_scene
from utils.boxes import cxcywh_to_xyxy, iou

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


def test_every_small_target_has_a_candidate_and_large_ones_have_only_cells_inside():
    rng = np.random.default_rng(0)
    center = np.concatenate((rng.uniform(0, CANVAS, (500, 2)), rng.integers(0, CANVAS // 8 + 1, (100, 2)) * 8.0))
    size = rng.uniform(0.01, 8, (600, 2))
    boxes = cxcywh_to_xyxy(torch.from_numpy(np.concatenate((center, size), -1)).float())[None]
    assert cells_inside(cell_centers_px(), boxes, 8.0).any(-1).all()
    large = torch.tensor([[[10.0, 20, 50, 90]]])
    x, y = cell_centers_px().unbind(-1)
    exact = (x >= 10) & (x <= 50) & (y >= 20) & (y <= 90)
    assert torch.equal(cells_inside(cell_centers_px(), large, 8.0)[0, 0], exact)


def test_a_tiny_target_is_learned_from_an_untrained_head():
    """Boxes of an untrained head are far too large; the target must still be assigned to a cell."""
    centers = cell_centers_px()
    scene = Scene(
        logits=torch.full((1, len(centers), 1), -8.0),
        predicted=torch.cat((centers - 60, centers + 60), -1)[None],
        labels=torch.zeros(1, 1, dtype=torch.long),
        boxes=torch.tensor([[[61.0, 61, 63, 63]]]),
        mask=torch.ones(1, 1, dtype=torch.bool),
    )
    assignment = assign(TaskAlignedAssigner(topk=10), scene)
    assert iou(scene.predicted, scene.boxes, "ciou").max() < 0.001
    assert assignment.scores.max() == pytest.approx(0.01)


def test_equal_overlaps_are_assigned_to_the_earlier_target():
    cells = torch.tensor([[[4, 1], [4, 2], [4, 4]]])
    overlap = torch.tensor([[[0.5, 0.3], [0.5, 0.2], [0.4, 0.9]]])
    metric = torch.tensor([[[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]])
    assigned = resolve_conflicts(cells, metric, overlap, 6)
    assert assigned.tolist() == [[[True, True], [False, True], [False, False]]]


@pytest.mark.parametrize(("batch", "slots"), [(0, 16), (2, 1)])
def test_no_images_and_no_targets_give_empty_assignments(batch, slots):
    assignment = assign(TaskAlignedAssigner(topk=10), empty_scene(batch, slots))
    assert assignment.cells.shape == assignment.scores.shape == (batch, slots, 10)
    assert not assignment.scores.any()
