"""Models of two heads, which need no NMS: what each branch learns from, and their losses."""

from __future__ import annotations

import pytest
import torch

from models.detector import build_detector
from models.heads.base import ONE_TO_ONE
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, as_targets, make_batch
from tests.models.assigners.scenes import owners_in_rounds
from tests.models.losses.cases import HYP, check_that_shards_add_up
from utils.boxes import cxcywh_to_xyxy, iou

PAIR = {"end2end": True}
MODELS = {
    "bins": TINY_MODEL | PAIR,
    "no bins": TINY_MODEL | PAIR | {"reg_max": 1},
    "anchors": TINY_ANCHOR_MODEL | PAIR,
    "yolox": TINY_MODEL | PAIR | {"head": [[[2, 3, 4], 1, "YOLOXDetect", ["nc", 16]]]},
}
CANVAS = 64


def raw_maps(model, batch: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        shapes = [x.shape for x in model(torch.zeros(batch, 3, CANVAS, CANVAS))]
    return [torch.randn(shape, generator=generator) for shape in shapes]


# The two branches


@pytest.mark.parametrize("family", ["yolov5n", "yolov8n", "yolo11n", "yolov9t", "yoloxnano"])
def test_end2end_adds_the_second_head_to_any_family(family: str) -> None:
    single = build_detector(family, 3, seed=1)
    pair = build_detector(single.spec | PAIR, 3, seed=1)
    first = single.state_dict()
    both = pair.state_dict()
    assert all(torch.equal(value, both[key]) for key, value in first.items())
    added = {key.replace(ONE_TO_ONE, ""): value for key, value in both.items() if ONE_TO_ONE in key}
    head = f"model.{len(single.model) - 1}."
    common = ("dfl.conv.weight", ".anchors")  # what both branches depend on
    assert added.keys() == {key for key in first if key.startswith(head) and not key.endswith(common)}
    assert all(torch.equal(value, first[key]) for key, value in added.items())  # they start equal
    assert len(pair.head.class_rows()) == 2 * len(single.head.class_rows())


@pytest.mark.parametrize("kind", MODELS)
def test_backbone_and_neck_learn_only_from_the_one_to_many_branch(kind: str) -> None:
    pair = build_detector(MODELS[kind], 2, seed=1)
    single = build_detector({k: v for k, v in MODELS[kind].items() if k != "end2end"}, 2, seed=1)
    batch = make_batch(4)
    images = batch.images.float() / 255
    output = pair.head.build_loss(HYP)(pair(images), batch.targets)
    many = single.head.build_loss(HYP)(single(images), batch.targets)
    assert torch.equal(output.normalizer, many.normalizer)
    assert torch.equal(output.parts[: len(many.parts)], many.parts)
    output.total.backward()
    many.total.backward()
    wanted = {key: p.grad for key, p in single.named_parameters() if p.requires_grad}
    for key, p in pair.named_parameters():
        if key in wanted:
            torch.testing.assert_close(p.grad, wanted[key], rtol=1e-5, atol=1e-6)
        elif p.requires_grad:
            assert p.grad is not None, key
    learned = [p.grad.abs().sum() > 0 for key, p in pair.named_parameters() if ONE_TO_ONE in key]
    assert sum(learned) > len(learned) / 2  # box layers of a level without targets get no gradient


@pytest.mark.parametrize("kind", MODELS)
def test_a_fused_copy_has_the_requested_branch(kind: str) -> None:
    pair = build_detector(MODELS[kind], 2, seed=1).eval()
    images = torch.rand(2, 3, CANVAS, CANVAS)
    with torch.no_grad():
        for key, p in pair.named_parameters():
            if ONE_TO_ONE in key:
                p += 0.1
        raw = pair(images)
        one = pair.fuse()
        many = pair.fuse(one_to_one=False)
        assert not torch.equal(raw[0], raw[3])
        for model, maps in ((one, raw[3:]), (many, raw[:3])):
            for found, expected in zip(model.decode(model(images)), pair.head.decode_branch(maps)):
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)
    assert (pair.nms_iou, one.nms_iou, many.nms_iou) == (None, None, many.head.validation_iou)


# The best anchor


def best_anchor_by_loops(model, raw: list[torch.Tensor], targets: torch.Tensor) -> set[tuple[int, ...]]:
    """Returns (image, level, anchor, row, column) of each target's best-aligned match at a position that no other
    target has."""
    claims = []
    for k, (image, label, cx, cy, w, h) in enumerate(targets.double().tolist()):
        for level, (maps, stride) in enumerate(zip(raw, model.strides)):
            grid = CANVAS // stride
            x, y, wide, high = cx * grid, cy * grid, w * grid, h * grid
            i, j = int(x), int(y)
            places = {(i, j), (i + (1 if x - i >= 0.5 else -1), j), (i, j + (1 if y - j >= 0.5 else -1))}
            for a, (aw, ah) in enumerate(model.head.anchors[level].tolist()):
                if max(wide / aw, aw / wide, high / ah, ah / high) >= HYP.anchor_t:
                    continue
                for column, row in places:
                    if not (0 <= column < grid and 0 <= row < grid):
                        continue
                    out = maps[int(image)].double().view(3, -1, grid, grid)[a, :, row, column].sigmoid()
                    middle = (out[0] * 2 - 0.5 + column, out[1] * 2 - 0.5 + row)
                    box = torch.stack((*middle, (out[2] * 2) ** 2 * aw, (out[3] * 2) ** 2 * ah))
                    true = torch.tensor([x, y, wide, high], dtype=torch.float64)
                    overlap = max(float(iou(cxcywh_to_xyxy(box), cxcywh_to_xyxy(true), "ciou")), 0.01)
                    score = float(out[4] * out[5 + int(label)])
                    claims.append(((int(image), level, a, row, column), k, score**0.5 * overlap**6, overlap))
    wishes: dict[int, list] = {}
    for place, k, _, overlap in sorted(claims, key=lambda claim: -claim[2]):
        wishes.setdefault(k, []).append((place, overlap))
    return set(owners_in_rounds(wishes).values())


def test_the_one_to_one_anchor_is_the_best_match() -> None:
    model = build_detector(MODELS["anchors"], 2, seed=1)
    raw = [level.requires_grad_() for level in raw_maps(model, 3)]
    targets = make_batch(3, targets_per_image=4).targets.rows
    targets[1, 2:] = targets[0, 2:] * 1.01  # both request the same cells
    criterion = model.head.build_loss(HYP).one
    output = criterion(raw[3:], as_targets(targets))
    gradients = torch.autograd.grad(output.total, raw[3:])
    touched_cells = set()
    for level, gradient in enumerate(gradients):
        grid = gradient.shape[-1]
        touched = gradient.view(3, 3, -1, grid, grid)[:, :, :4].abs().sum(2).nonzero().tolist()
        touched_cells |= {(image, level, a, row, column) for image, a, row, column in touched}
    expected = best_anchor_by_loops(model, [level.detach() for level in raw[3:]], targets)
    assert touched_cells == expected
    assert output.normalizer.item() == len(expected)
    assert len(expected) == len(targets)


# The loss


@pytest.mark.parametrize("kind", MODELS)
def test_the_dual_loss_is_the_sum_of_both_and_adds_up_over_shards(kind: str) -> None:
    model = build_detector(MODELS[kind], 2, seed=1)
    criterion = model.head.build_loss(HYP)
    targets = make_batch(4).targets.rows[2:]  # the first picture has none
    raw = [level.requires_grad_() for level in raw_maps(model, 4)]
    output = check_that_shards_add_up(criterion, raw, targets)
    many = criterion.many(raw[:3], as_targets(targets))
    one = criterion.one(raw[3:], as_targets(targets))
    torch.testing.assert_close(output.total, many.total + 4 * one.total)
    torch.testing.assert_close(output.parts.sum(), output.total.detach())
    assert criterion.names == (*criterion.many.names, *(f"{name}_one" for name in criterion.one.names))


def test_both_branches_of_yolox_refine_their_boxes_in_the_closing_epochs() -> None:
    """The paper adds the L1 term in the last epochs, without mosaic."""
    model = build_detector(MODELS["yolox"], 2, seed=1)
    criterion = model.head.build_loss(HYP)
    raw = raw_maps(model, 2)
    targets = as_targets(make_batch(2).targets.rows)
    terms = [number for number, name in enumerate(criterion.names) if name.startswith("l1")]
    assert len(terms) == 2
    for closing in (False, True, False):
        criterion.set_no_mosaic(closing)
        assert ((criterion(raw, targets).parts[terms] > 0) == closing).all()
