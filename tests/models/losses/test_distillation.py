"""Distillation from an old model (--keep-old): against a loop, and cells without it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from models.box_coding import cell_centers, distances_to_xyxy, expected_distances, grid_shapes
from models.layers.ops import split_rows
from models.losses.distillation import MIN_TEACHER_SCORE, distill
from models.losses.ignored_cells import ignored_cells
from tests.helpers.tiny import as_targets
from tests.models.losses.cases import HYP, REG_MAX, STRIDES, gradients, raw_maps, tiny_head
from utils.boxes import iou

OLD = 2  # classes of the old model, the first of three
EVERYWHERE = np.float32([[i, c, 0.5, 0.5, 1, 1] for i in range(2) for c in range(OLD)])
TARGETS = torch.tensor([[0, 2, 0.3, 0.25, 0.3, 0.3], [1, 2, 0.7, 0.5, 0.4, 0.4]])


def old_maps(seed: int = 1) -> list[torch.Tensor]:
    return [level.detach() for level in raw_maps("anchor_free", 2, classes=OLD, seed=seed)]


class OldModel(nn.Module):
    """Stands in for a `Teacher` of the first classes, with outputs that the tests make."""

    distilled_classes = tuple(range(OLD))
    unlabeled_only = True
    is_dual = True


class WholeTeacher(OldModel):
    distilled_classes = (2, 0)
    unlabeled_only = False


def criterion(teacher: type[OldModel] = OldModel):
    return tiny_head("anchor_free").build_loss(HYP, teacher=teacher())


@pytest.mark.parametrize("bins", [REG_MAX, 1])
def test_the_terms_are_those_of_a_loop(bins):
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, 3), (1, 2))
    centers, strides = cell_centers(shapes, (8, 16), torch.device("cpu"))
    sizes = ((2, 8, 4 * bins), (2, 8, 3), (2, 8, 4 * bins), (2, 8, OLD))
    new_boxes, new, old_boxes, old = (torch.randn(size, generator=rng).double() * 2 for size in sizes)
    if bins == 1:
        new_boxes = new_boxes.abs() + 0.5
        old_boxes = old_boxes.abs() + 0.5
    unlabeled = torch.rand((2, 8, 3), generator=rng) < 0.6
    outputs = (new_boxes, new[..., :OLD])
    unlabeled = unlabeled[..., :OLD]
    found = distill(outputs, (old_boxes, old), unlabeled, centers.double(), strides.double())
    expected = np.zeros(4)
    for image in range(2):
        for cell in range(8):
            best = 0.0
            for c in range(OLD):
                if unlabeled[image, cell, c]:
                    p = old[image, cell, c].sigmoid().item()
                    q = new[image, cell, c].sigmoid().item()
                    expected[1] += p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
                    best = max(best, p)
            if best <= MIN_TEACHER_SCORE:
                continue
            sides = [b[image, cell].view(4, bins) for b in (new_boxes, old_boxes)]
            boxes = [distances_to_xyxy(expected_distances(s), centers[cell].double(), strides[cell]) for s in sides]
            expected[0] += best * (1 - iou(*boxes, kind="ciou").item())
            if bins == 1:
                error = (sides[0] - sides[1]).abs().mean().item()
            else:
                q, p = (s.softmax(-1).numpy() for s in sides)
                error = (p * np.log(p / q)).sum(-1).mean()
            expected[2] += best * error
            expected[3] += best
    np.testing.assert_allclose([term.item() for term in found], expected, rtol=1e-5)
    assert expected.min() > 0


def test_cells_of_labeled_objects_and_labeled_classes_learn_from_labels_alone():
    """Only ignored classes are taught, and none in a cell that is assigned to an object."""
    raw = raw_maps("anchor_free", 2)
    output = criterion()(raw, as_targets(TARGETS, EVERYWHERE), old_maps())
    plain = tiny_head("anchor_free").build_loss(HYP)(raw, as_targets(TARGETS, EVERYWHERE))
    grads = [split_rows(maps, 4 * REG_MAX) for maps in (gradients(output, raw), gradients(plain, raw))]
    differs = [(ours - theirs).abs().amax(-1) > 1e-7 for ours, theirs in zip(*grads)]
    assert torch.equal(grads[0][1][..., OLD], grads[1][1][..., OLD])  # the new class
    ignored = ignored_cells(EVERYWHERE, raw, STRIDES, 3).cells
    assert ignored[..., :OLD].all()
    positive = grads[1][1][..., :OLD].abs().amax(-1) > 0  # the plain loss has a gradient there at positive cells alone
    assert 0 < positive.sum() <= 2 * HYP.tal_topk
    assert not (differs[0] | differs[1])[positive].any()
    assert differs[1][~positive].all()


def test_a_teacher_of_labeled_classes_is_compared_in_all_cells():
    """The teacher has two of the three classes, in another order, with the same number of bins or none."""
    raw = raw_maps("anchor_free", 2)
    targets = as_targets(TARGETS)
    plain = tiny_head("anchor_free").build_loss(HYP)(raw, targets)
    centers, strides = cell_centers(grid_shapes(raw), STRIDES, torch.device("cpu"))
    boxes, classes = split_rows(raw, 4 * REG_MAX)
    distances = [torch.cat((level[:, :4].abs(), level[:, -OLD:]), 1) for level in old_maps()]
    for maps in (old_maps(), distances):
        teacher = split_rows(maps, maps[0].shape[1] - OLD)
        output = criterion(WholeTeacher)(raw, targets, maps)
        box, cls, sides, _ = distill((boxes, classes[..., [2, 0]]), teacher, None, centers, strides)
        expected = HYP.distill * (HYP.box * box + HYP.cls * cls + HYP.dfl * sides)
        torch.testing.assert_close(output.parts, torch.cat((plain.parts, expected[None].detach())))
        assert torch.equal(output.normalizer, plain.normalizer)
        assert expected > 0
