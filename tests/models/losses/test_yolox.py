"""YOLOX's loss compared with float64 loops, and its gains."""

import math

import numpy as np
import pytest
import torch

from models.assigners.simota import Cells, Predictions, SimOtaAssigner, TargetSlots
from models.box_coding import cell_centers
from models.losses.base import pad_targets
from tests.helpers.scoring import reference_iou
from tests.helpers.tiny import as_targets
from tests.models.assigners.scenes import sigmoid
from tests.models.losses.cases import CANVAS, HYP, STRIDES, raw_maps, some_targets, tiny_head
from utils.boxes import cxcywh_to_xyxy


def bce(logit: float, target: float) -> float:
    return -target * math.log(sigmoid(logit)) - (1 - target) * math.log(1 - sigmoid(logit))


def cells_by_hand(raw: list[torch.Tensor]) -> list[list[tuple[list[float], list[float], int]]]:
    """Returns the cells of each image: outputs, decoded box (xyxy, pixels) and stride."""
    images = []
    for b in range(len(raw[0])):
        cells = []
        for level, stride in zip(raw, STRIDES):
            for y in range(level.shape[2]):
                for x in range(level.shape[3]):
                    out = level[b, :, y, x].detach().double().tolist()
                    cx, cy = (x + out[0]) * stride, (y + out[1]) * stride
                    w, h = math.exp(out[2]) * stride, math.exp(out[3]) * stride
                    cells.append((out, [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], stride))
        images.append(cells)
    return images


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_the_loss_equals_loops(eps: float, closing: bool) -> None:
    raw = raw_maps("yolox", 4)
    targets = some_targets((3, 0, 5, 1))
    classes = 3
    criterion = tiny_head("yolox").build_loss(HYP, label_smoothing=eps)
    criterion.set_no_mosaic(closing)
    output = criterion(raw, as_targets(targets))
    images = cells_by_hand(raw)
    shapes = tuple((CANVAS // s, CANVAS // s) for s in STRIDES)
    centers, strides = cell_centers(shapes, STRIDES, torch.device("cpu"))
    padded, mask = pad_targets(targets, 4, 16)
    boxes = cxcywh_to_xyxy(padded[..., 1:]) * CANVAS
    table = torch.tensor([[out for out, _, _ in cells] for cells in images])
    decoded = torch.tensor([[box for _, box, _ in cells] for cells in images])
    assignment = SimOtaAssigner()(  # has a separate test
        Predictions(table[..., 4:5], table[..., 5:], decoded),
        TargetSlots(padded[..., 0].long(), boxes, mask),
        Cells(centers * strides, strides, 8),
    )
    owner = {(b, int(assignment.cells[b, k, t])): k for b, k, t in assignment.assigned.nonzero().tolist()}
    box = obj = cls = l1 = 0.0
    for b, cells in enumerate(images):
        for n, (out, predicted, stride) in enumerate(cells):
            obj += bce(out[4], float((b, n) in owner))
            if (b, n) in owner:
                k = owner[b, n]
                overlap = reference_iou(predicted, boxes[b, k].double().tolist())
                box += 1 - overlap**2
                wanted = [overlap * (eps / classes + (1 - eps) * (c == int(padded[b, k, 0]))) for c in range(classes)]
                if closing:
                    x1, y1, x2, y2 = (boxes[b, k].double() / stride).tolist()
                    corner = (centers[n].double() - 0.5).tolist()
                    exact = [(x1 + x2) / 2 - corner[0], (y1 + y2) / 2 - corner[1], math.log(x2 - x1), math.log(y2 - y1)]
                    l1 += sum(abs(o - e) for o, e in zip(out, exact))
                cls += sum(bce(z, t) for z, t in zip(out[5:], wanted))
    assert len(owner) >= 9
    assert output.normalizer.item() == len(owner)
    np.testing.assert_allclose(output.parts.numpy(), [5 * box, obj, cls, l1], rtol=1e-4)
    assert output.total.item() == pytest.approx(float(output.parts.sum()), rel=1e-6)
