"""The losses of all heads: closed forms, loops, additivity over shards, empty shards, no host sync."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.assigners.simota import Cells, Predictions, SimOtaAssigner, TargetSlots
from models.box_coding import cell_centers, distances_to_xyxy, expected_distances
from models.heads.anchor_free import AnchorFreeHead
from models.losses.base import pad_targets
from tests.helpers.scoring import reference_iou
from tests.helpers.tiny import as_targets
from tests.models.losses.cases import (
    CANVAS,
    HYP,
    KINDS,
    REG_MAX,
    STRIDES,
    check_that_shards_add_up,
    gradients,
    raw_maps,
    some_targets,
    tiny_head,
)
from utils.boxes import cxcywh_to_xyxy, iou

# --- whole losses against loops


def bce(logit: float, target: float) -> float:
    return max(logit, 0) - logit * target + math.log1p(math.exp(-abs(logit)))


@pytest.mark.parametrize("bins", [REG_MAX, 4, 1])
def test_anchor_free_loss_equals_loops_over_the_assignment(bins):
    """Of four bins, the last is for all larger distances; a single one is the distance itself."""
    eps = 0.1
    head = AnchorFreeHead((8, 8, 8), STRIDES, 3, bins)
    raw = [torch.cat((level[:, : 4 * bins], level[:, -3:]), 1) for level in raw_maps("anchor_free", 4)]
    targets = some_targets()
    criterion = head.build_loss(HYP, label_smoothing=eps)
    seen = {}
    inner = criterion.assigner

    def spy(*args, **kwargs):
        seen["labels"] = args[2]
        seen["boxes"] = args[3]
        seen["assignment"] = inner(*args, **kwargs)
        return seen["assignment"]

    criterion.assigner = spy
    output = criterion(raw, as_targets(targets))

    flat = torch.cat([level.detach().double().flatten(2) for level in raw], 2)  # (B, channels, N)
    centers, strides = cell_centers(tuple((CANVAS // s,) * 2 for s in STRIDES), STRIDES, torch.device("cpu"))
    wanted = np.zeros((4, flat.shape[2], 3))
    box = dfl = normalizer = 0.0
    for (b, k, j), score in np.ndenumerate(seen["assignment"].scores.double().numpy()):
        if score == 0:
            continue
        n = int(seen["assignment"].cells[b, k, j])
        label = int(seen["labels"][b, k])
        target = seen["boxes"][b, k].double()
        wanted[b, n] = score * eps / 3
        wanted[b, n, label] += score * (1 - eps)
        logits = flat[b, : 4 * bins, n].view(4, bins)
        predicted = distances_to_xyxy(expected_distances(logits), centers[n].double(), strides[n].double())
        box += score * (1 - float(iou(predicted, target, "ciou")))
        middle = (centers[n] * strides[n]).double()
        true = torch.cat((middle - target[:2], target[2:] - middle)) / strides[n]
        if bins == 1:
            dfl += score * float((logits[:, 0] - true).abs().mean())
        for side in range(4 if bins > 1 else 0):
            p = logits[side].softmax(-1).tolist()
            d = min(max(float(true[side]), 0.0), bins - 1.0)
            left = min(int(d), bins - 2)
            dfl -= score * ((left + 1 - d) * math.log(p[left]) + (d - left) * math.log(p[left + 1])) / 4
        normalizer += score
    logits = flat[:, 4 * bins :].transpose(1, 2).numpy()
    cls = sum(bce(x, t) for x, t in zip(logits.ravel(), wanted.ravel()))
    expected = [HYP.box * box, HYP.cls * cls, HYP.dfl * dfl]
    np.testing.assert_allclose(output.parts.numpy(), expected, rtol=1e-5)
    assert criterion.names == ("box", "cls", "dfl" if bins > 1 else "l1")
    assert output.total.item() == pytest.approx(sum(expected), rel=1e-5)
    assert output.normalizer.item() == pytest.approx(normalizer, rel=1e-6)


def test_anchor_loss_equals_loops():
    eps = 0.1
    classes = 3
    head = tiny_head("anchor")
    raw = raw_maps("anchor", 4)
    targets = some_targets()
    targets[0, 2:4] = 0.001  # corners have no neighbors outside
    targets[3, 2:4] = 0.999
    targets = torch.cat((targets, targets[-1:]))  # two equal boxes: the same cells and anchors twice
    targets[-1, 1] = (targets[-1, 1] + 1) % classes
    output = head.build_loss(HYP, label_smoothing=eps)(raw, as_targets(targets))
    box = obj = cls = positives = 0.0
    for level, stride, anchors, weight in zip(raw, STRIDES, head.anchors.double(), (1.0, 1.0, 1.6)):
        grid = CANVAS // stride
        maps = level.detach().double().view(4, 2, 5 + classes, grid, grid)
        objectness = np.zeros((4, 2, grid, grid))
        for b, label, *place in targets.double().tolist():
            b = int(b)
            cx, cy, w, h = (v * grid for v in place)
            x, y = int(cx), int(cy)
            cells = {(x, y), (x + (1 if cx - x >= 0.5 else -1), y), (x, y + (1 if cy - y >= 0.5 else -1))}
            for a in range(2):
                aw, ah = anchors[a].tolist()
                if max(w / aw, aw / w, h / ah, ah / h) >= HYP.anchor_t:
                    continue
                for i, j in cells:
                    if not (0 <= i < grid and 0 <= j < grid):
                        continue
                    out = maps[b, a, :, j, i]
                    sig = out[:4].sigmoid() * 2
                    predicted = torch.stack((sig[0] - 0.5 + i, sig[1] - 0.5 + j, sig[2] ** 2 * aw, sig[3] ** 2 * ah))
                    true = torch.tensor([cx, cy, w, h], dtype=torch.float64)
                    overlap = float(iou(cxcywh_to_xyxy(predicted), cxcywh_to_xyxy(true), "ciou"))
                    box += 1 - overlap
                    objectness[b, a, j, i] = max(objectness[b, a, j, i], overlap, 0.0)
                    wanted = [eps / classes + (1 - eps) * (c == label) for c in range(classes)]
                    cls += sum(bce(z, t) for z, t in zip(out[5:].tolist(), wanted))
                    positives += 1
        obj += weight * sum(bce(z, t) for z, t in zip(maps[:, :, 4].numpy().ravel(), objectness.ravel()))
    assert positives > 30
    assert output.normalizer.item() == positives
    np.testing.assert_allclose(output.parts.numpy(), [HYP.box * box, HYP.obj * obj, 2 * HYP.cls * cls], rtol=1e-5)
    assert output.total.item() == pytest.approx(float(output.parts.sum()), rel=1e-6)


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
def test_yolox_loss_equals_loops(eps: float, closing: bool) -> None:
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


# --- what the engine relies on


@pytest.mark.parametrize("kind", KINDS)
def test_shards_add_up_to_the_batch(kind):
    criterion = tiny_head(kind).build_loss(HYP, label_smoothing=0.05)
    check_that_shards_add_up(criterion, raw_maps(kind, 5), some_targets((3, 0, 5, 1, 17)))


@pytest.mark.parametrize("kind", KINDS)
def test_without_targets_only_the_background_is_learned(kind):
    criterion = tiny_head(kind).build_loss(HYP)
    raw = raw_maps(kind, 2)
    output = criterion(raw, as_targets(torch.zeros(0, 6)))
    assert output.normalizer.item() == 0
    background = "cls" if kind == "anchor_free" else "obj"
    for name, part in zip(criterion.names, output.parts.tolist()):
        assert (part > 0) == (name == background)
    assert all(g.isfinite().all() and g.any() for g in gradients(output, raw))
    no_images = raw_maps(kind, 0)
    output = criterion(no_images, as_targets(torch.zeros(0, 6)))
    assert not any((output.total, output.normalizer, output.parts.any()))
    assert [g.shape for g in gradients(output, no_images)] == [level.shape for level in no_images]


class Traffic(TorchDispatchMode):
    """Records operations on tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if len({t.device.type for t in tensors}) > 1:
            self.mixed.append(str(func))
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_only_pinned_memory_is_copied_from_the_host_in_the_loss(monkeypatch, kind):
    """On a GPU the host waits for any other copy, even of a single number. The GPU's tensors are fake tensors here."""
    everywhere = np.float32([[i, -1, 0.5, 0.5, 1, 1] for i in range(4)])
    targets = as_targets(some_targets(), everywhere)
    criterion = tiny_head(kind).build_loss(HYP)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    on_host = targets.on_host
    with FakeTensorMode(allow_non_fake_inputs=True):
        criterion = criterion.to("cuda")
        raw = [torch.empty(level.shape, device="cuda") for level in raw_maps(kind, 4)]
        rows = torch.empty(on_host.shape, device="cuda")
        with Traffic() as traffic:
            criterion(raw, dataclasses.replace(targets, rows=rows, host_rows=on_host))
    assert traffic.mixed == ["aten._to_copy.default"] * len(pinned)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_maps_and_autocast_give_the_float32_loss_of_the_same_values(kind):
    low = [level.detach().bfloat16() for level in raw_maps(kind, 4)]
    criterion = tiny_head(kind).build_loss(HYP)
    targets = some_targets()
    expected = criterion([level.float() for level in low], as_targets(targets))
    with torch.autocast("cpu", torch.bfloat16):
        output = criterion(low, as_targets(targets))
    assert output.total.dtype == torch.float32
    torch.testing.assert_close(output.total, expected.total)


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_weight_multiplies_the_gradient_of_its_scores_and_nothing_else(kind):
    raw = raw_maps(kind, 4)
    weights = torch.tensor([0.25, 1.0, 1.75])
    targets = some_targets()
    plain = gradients(tiny_head(kind).build_loss(HYP)(raw, as_targets(targets)), raw)
    weighted = gradients(tiny_head(kind).build_loss(HYP, class_weights=weights)(raw, as_targets(targets)), raw)
    groups = 2 if kind == "anchor" else 1
    for before, after in zip(plain, weighted):
        expected = before.clone().unflatten(1, (groups, -1))
        expected[:, :, -3:] *= weights[:, None, None]
        torch.testing.assert_close(after, expected.flatten(1, 2), rtol=1e-4, atol=1e-6)
    assert any((p[:, -3] != 0).any() for p in plain)
