"""Assignment compared with slow float64 loops in Python."""

import numpy as np
import pytest
import torch

from models.assigners.candidates import resolve_conflicts
from models.assigners.simota import cells_inside
from models.assigners.task_aligned import Assignment, CandidatePairs, TaskAlignedAssigner, best_pairs, list_pairs
from models.box_coding import cell_centers
from models.losses.anchor import match_anchors
from utils.boxes import cxcywh_to_xyxy, iou, xyxy_to_cxcywh

STRIDES = (8, 16, 32)
CANVAS = 128
SHAPES = tuple((CANVAS // s, CANVAS // s) for s in STRIDES)
ALPHA = 0.5
BETA = 6.0


def pyramid() -> torch.Tensor:
    centers, strides = cell_centers(SHAPES, STRIDES, torch.device("cpu"))
    return centers * strides


def scene(batch: int, slots: int, classes: int, seed: int):
    """Targets (some tiny, some overlapping, some slots empty) and predictions near them."""
    rng = np.random.default_rng(seed)
    center = rng.uniform(10, 118, (batch, slots, 2))
    size = np.exp(rng.uniform(np.log(2), np.log(90), (batch, slots, 2)))
    boxes = cxcywh_to_xyxy(torch.from_numpy(np.concatenate((center, size), -1)).float()).clamp(0, CANVAS)
    mask = torch.from_numpy(np.arange(slots) < rng.integers(0, slots + 1, (batch, 1)))
    mask[0] = True
    boxes[~mask] = 0
    labels = torch.from_numpy(rng.integers(0, classes, (batch, slots)))
    centers = pyramid()
    reach = torch.from_numpy(np.exp(rng.uniform(np.log(2), np.log(40), (batch, len(centers), 4)))).float()
    predicted = torch.cat((centers - reach[..., :2], centers + reach[..., 2:]), -1)
    logits = torch.from_numpy(rng.normal(-2, 2, (batch, len(centers), classes))).float()
    return logits, predicted, centers, labels, boxes, mask


def pairs_of(boxes: torch.Tensor, mask: torch.Tensor) -> CandidatePairs:
    """The pairs of the targets that these boxes are made from."""
    image = mask.nonzero()[:, :1].float()
    boxes = xyxy_to_cxcywh(boxes[mask] / CANVAS)  # exact: a power of two
    targets = torch.cat((image, torch.zeros_like(image), boxes), 1).numpy()
    return list_pairs(targets, *mask.shape, SHAPES, STRIDES, torch.device("cpu"))


def assign(assigner: TaskAlignedAssigner, logits, predicted, centers, labels, boxes, mask) -> Assignment:
    assert len(centers) == predicted.shape[1]
    return assigner(logits, predicted, labels, boxes, pairs_of(boxes, mask))


def inside_by_hand(point, box, stride: float) -> bool:
    return all(
        abs(point[i] - (box[i] + box[i + 2]) / 2) <= max((box[i + 2] - box[i]) / 2, stride / 2 + 1e-3) for i in (0, 1)
    )


def assign_by_loops(logits, predicted, centers, labels, boxes, mask, stride, topk):
    """{(image, target, cell): score}, one comparison at a time."""
    overlaps = iou(predicted.double()[:, None], boxes.double()[:, :, None], "ciou").clamp(min=0.01)
    result = {}
    for b in range(len(boxes)):
        claims: dict[int, list[tuple[float, int, float]]] = {}
        for k in range(boxes.shape[1]):
            metric = {}
            for n in range(len(centers)):
                if mask[b, k] and inside_by_hand(centers[n].tolist(), boxes[b, k].tolist(), stride):
                    score = 1 / (1 + np.exp(-float(logits[b, n, labels[b, k]])))
                    metric[n] = score**ALPHA * float(overlaps[b, k, n]) ** BETA
            for n in sorted(metric, key=metric.get, reverse=True)[:topk]:
                if metric[n] > 0:
                    claims.setdefault(n, []).append((float(overlaps[b, k, n]), -k, metric[n]))
        owner = {n: max(claim) for n, claim in claims.items()}
        for k in range(boxes.shape[1]):
            mine = {n: (overlap, metric) for n, (overlap, k_, metric) in owner.items() if -k_ == k}
            for n, (_, metric) in mine.items():
                best_overlap, best_metric = (max(v[i] for v in mine.values()) for i in (0, 1))
                result[b, k, n] = metric / best_metric * best_overlap
    return result


def as_dictionary(assignment) -> dict:
    return {
        (b, k, int(n)): float(s)
        for (b, k, j), s in np.ndenumerate(assignment.scores.numpy())
        if s > 0
        for n in [assignment.cells[b, k, j]]
    }


@pytest.mark.parametrize(("topk", "seed"), [(10, 0), (3, 1), (1, 2), (1000, 3)])
def test_task_aligned_assignment_equals_loops(topk, seed):
    inputs = scene(3, 7, 4, seed)
    assigner = TaskAlignedAssigner(topk=topk)
    assignment = assign(assigner, *inputs)
    expected = assign_by_loops(*inputs, 8, topk)
    found = as_dictionary(assignment)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[k] for k in expected], list(expected.values()), rtol=2e-3, atol=1e-7)
    assert len({(b, n) for b, _, n in found}) == len(found), "a cell answers for one target"
    assert not assignment.scores[~inputs[-1]].any()


@pytest.mark.parametrize("seed", range(5))
def test_pairs_list_the_cells_inside_each_target_in_order(seed):
    _, _, centers, _, boxes, mask = scene(3, 9, 2, seed)
    boxes[0, 0] = torch.tensor([0.0, 0.0, CANVAS, CANVAS])
    boxes[0, 1] = torch.tensor([CANVAS, CANVAS, CANVAS, CANVAS])  # at the far corner, with no area left
    boxes[0, 2] = torch.tensor([4.0, 12.0, 36.0, 44.0])  # edges on centers of cells
    expected = (cells_inside(centers, boxes, 8.0) & mask[..., None]).flatten(0, 1)
    pairs = pairs_of(boxes, mask)
    assert torch.equal(pairs.ends, expected.sum(1).cumsum(0))
    slot, cell = expected.nonzero(as_tuple=True)
    assert torch.equal(pairs.slot[: len(slot)], slot)
    assert torch.equal(pairs.cell[: len(cell)], cell)
    assert not pairs.slot[len(slot) :].any()
    assert not pairs.cell[len(slot) :].any()


def test_selecting_the_best_pairs_equals_repeated_maximum():
    ends = torch.tensor([4, 4, 9, 10])
    metric = torch.tensor([0.5, 0.0, 0.7, 0.5, 1e-20, 3e-20, 2.0, 2.0, 0.0, 0.25, 9.0, 9.0])
    slot = torch.tensor([0, 0, 0, 0, 2, 2, 2, 2, 2, 3, 3, 3])  # the last two are no pairs
    best, exists = best_pairs(CandidatePairs(slot, slot, ends), metric, 3)
    assert exists.sum(1).tolist() == [3, 0, 3, 1]
    assert best[0].tolist() == [2, 0, 3]
    assert best[2].tolist() == [6, 7, 5]
    assert best[3, 0] == 9


def test_every_small_target_has_a_candidate_and_large_ones_have_only_cells_inside():
    rng = np.random.default_rng(0)
    center = np.concatenate((rng.uniform(0, CANVAS, (500, 2)), rng.integers(0, CANVAS // 8 + 1, (100, 2)) * 8.0))
    size = rng.uniform(0.01, 8, (600, 2))
    boxes = cxcywh_to_xyxy(torch.from_numpy(np.concatenate((center, size), -1)).float())[None]
    assert cells_inside(pyramid(), boxes, 8.0).any(-1).all()
    large = torch.tensor([[[10.0, 20, 50, 90]]])
    x, y = pyramid().unbind(-1)
    exact = (x >= 10) & (x <= 50) & (y >= 20) & (y <= 90)
    assert torch.equal(cells_inside(pyramid(), large, 8.0)[0, 0], exact)


def test_a_tiny_target_is_learned_from_an_untrained_head():
    """Boxes of an untrained head are far too large; the target must still be assigned to a cell."""
    centers = pyramid()
    predicted = torch.cat((centers - 60, centers + 60), -1)[None]
    boxes = torch.tensor([[[61.0, 61, 63, 63]]])
    assigner = TaskAlignedAssigner(topk=10)
    labels = torch.zeros(1, 1, dtype=torch.long)
    mask = torch.ones(1, 1, dtype=torch.bool)
    logits = torch.full((1, len(centers), 1), -8.0)
    assignment = assign(assigner, logits, predicted, centers, labels, boxes, mask)
    assert iou(predicted, boxes, "ciou").max() < 0.001
    assert assignment.scores.max() == pytest.approx(0.01)


def test_equal_overlaps_are_assigned_to_the_earlier_target():
    cells = torch.tensor([[[4, 1], [4, 2], [4, 4]]])
    overlap = torch.tensor([[[0.5, 0.3], [0.5, 0.2], [0.4, 0.9]]])
    metric = torch.tensor([[[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]])
    assigned = resolve_conflicts(cells, metric, overlap, 6)
    assert assigned.tolist() == [[[True, True], [False, True], [False, False]]]


@pytest.mark.parametrize(("batch", "slots"), [(0, 16), (2, 1)])
def test_no_images_and_no_targets_give_empty_assignments(batch, slots):
    centers = pyramid()
    logits, predicted = (torch.zeros(batch, len(centers), channels) for channels in (3, 4))
    labels, mask = (torch.zeros(batch, slots, dtype=dtype) for dtype in (torch.long, torch.bool))
    assigner = TaskAlignedAssigner(topk=10)
    assignment = assign(assigner, logits, predicted, centers, labels, torch.zeros(batch, slots, 4), mask)
    assert assignment.cells.shape == assignment.scores.shape == (batch, slots, 10)
    assert not assignment.scores.any()


def test_centers_on_the_far_edge_stay_in_the_grid_and_flat_boxes_match_nothing():
    targets = torch.tensor([[0.0, 0, 1.0, 1.0, 0.3, 0.3], [0, 0, 0.5, 0.5, 0.3, 0.0]])
    matches = match_anchors(targets, torch.tensor([[2.0, 2.0]]), (8, 8), 4.0)
    assert matches.valid.tolist() == [True, False, False, False, False, False]
    assert matches.cell[0] == 63
    nothing = match_anchors(targets[:0], torch.ones(3, 2), (4, 4), 4.0)
    assert (nothing.valid.shape, nothing.boxes_cxcywh_cells.shape) == ((0,), (0, 4))
