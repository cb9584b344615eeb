"""The losses of all heads: closed forms, loops, additivity over shards, empty shards, no host sync."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.box_coding import cell_centers, distances_to_xyxy, expected_distances
from models.heads.anchor import AnchorHead
from models.heads.anchor_free import AnchorFreeHead
from tests.helpers.kernel_count import NoSync
from tests.helpers.tiny import as_targets
from tests.models.losses.cases import (
    CANVAS,
    HYP,
    KINDS,
    REG_MAX,
    STRIDES,
    channels,
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


@pytest.mark.parametrize(
    ("strides", "weights"),
    [
        ((8, 16, 32), (1.0, 1.0, 1.6)),
        ((32, 16, 8), (1.6, 1.0, 1.0)),  # a model YAML may list its levels in any order
        ((4, 8, 16), (1.0, 1.0, 1.0)),
        ((8, 16, 32, 64), (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_the_weight_of_objectness_depends_on_the_stride_of_a_level(strides, weights):
    head = AnchorHead((8,) * len(strides), strides, 3, 2)
    head.reset_parameters()
    sides = [64 // stride for stride in strides]
    raw = [torch.zeros(1, channels("anchor"), side, side, requires_grad=True) for side in sides]
    output = head.build_loss(HYP)(raw, as_targets(torch.zeros(0, 6)))
    for level, weight in zip(gradients(output, raw), weights):
        objectness = level.unflatten(1, (2, -1))[:, :, 4]
        # The derivative of a background cell's cross-entropy is its probability, here 1/2.
        torch.testing.assert_close(objectness, torch.full_like(objectness, HYP.obj * weight / 2))


# --- what the engine relies on


@pytest.mark.parametrize("kind", KINDS)
def test_shards_add_up_to_the_batch(kind):
    """Any sharding, also with a shard without targets or with fewer empty slots, gives the sums, normalizers and
    gradients of the whole batch."""
    raw = raw_maps(kind, 5)
    targets = some_targets((3, 0, 5, 1, 17))
    criterion = tiny_head(kind).build_loss(HYP, label_smoothing=0.05)
    with NoSync():
        whole = criterion(raw, as_targets(targets))
        whole_gradients = gradients(whole, raw)
    outputs = []
    shard_gradients = []
    for low, high in ((0, 1), (1, 2), (2, 4), (4, 4), (4, 5)):
        shard = [level.detach()[low:high].requires_grad_() for level in raw]
        inside = (targets[:, 0] >= low) & (targets[:, 0] < high)
        local_targets = targets[inside] - torch.tensor([low, 0, 0, 0, 0, 0])
        output = criterion(shard, as_targets(local_targets))
        outputs.append(output)
        shard_gradients.append(gradients(output, shard))
    torch.testing.assert_close(sum(o.total for o in outputs), whole.total, rtol=1e-6, atol=0)
    torch.testing.assert_close(sum(o.normalizer for o in outputs), whole.normalizer, rtol=1e-6, atol=0)
    torch.testing.assert_close(sum(o.parts for o in outputs), whole.parts, rtol=2e-6, atol=0)
    for level, expected in enumerate(whole_gradients):
        joined = torch.cat([g[level] for g in shard_gradients])
        torch.testing.assert_close(joined, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_targets_only_the_background_is_learned(kind):
    criterion = tiny_head(kind).build_loss(HYP)
    raw = raw_maps(kind, 2)
    assert not criterion.state_dict()
    assert not list(criterion.parameters())
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
    targets = as_targets(some_targets())
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
def test_extreme_maps_stay_finite(kind):
    for value in (-100.0, 100.0):
        raw = [torch.full_like(level, value).requires_grad_() for level in raw_maps(kind, 2)]
        output = tiny_head(kind).build_loss(HYP)(raw, as_targets(some_targets((3, 2))))
        assert output.total.isfinite()
        assert all(g.isfinite().all() for g in gradients(output, raw))


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
