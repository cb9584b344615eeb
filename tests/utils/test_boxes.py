"""utils/boxes.py compared with torchvision.ops and float64 closed forms."""

import numpy as np
import pytest
import torch
from torchvision import ops

from utils import boxes as ub


def random_xyxy(count: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 60, (count, 2))
    size = rng.uniform(0.5, 50, (count, 2))
    return torch.from_numpy(np.concatenate((corner, corner + size), 1))


@pytest.mark.parametrize("kinds", ["cxcywh_to_xyxy", "xyxy_to_cxcywh", "xywh_to_xyxy", "xyxy_to_xywh"])
def test_conversions_equal_torchvision_for_both_kinds(kinds):
    convert = getattr(ub, kinds)
    source, target = kinds.split("_to_")
    boxes = ops.box_convert(random_xyxy(50), "xyxy", source)
    before = boxes.clone()
    expected = ops.box_convert(boxes, source, target)
    torch.testing.assert_close(convert(boxes), expected)
    np.testing.assert_allclose(convert(boxes.numpy()), expected.numpy())
    assert torch.equal(boxes, before), "the input is left alone"
    assert convert(boxes[:0].view(5, 0, 4)).shape == (5, 0, 4)


def test_clip_and_area_equal_torchvision():
    """Clipping also takes a size for each box."""
    boxes = random_xyxy(40) - 20
    torch.testing.assert_close(ub.area_xyxy(boxes), ops.box_area(boxes))
    expected = ops.clip_boxes_to_image(boxes, (30, 45))
    torch.testing.assert_close(ub.clip_xyxy(boxes, 45, 30), expected)
    np.testing.assert_allclose(ub.clip_xyxy(boxes.numpy(), 45, 30), expected.numpy())
    widths = torch.linspace(10, 40, 40, dtype=torch.float64)
    clipped = ub.clip_xyxy(boxes, widths, 30)
    torch.testing.assert_close(clipped[7], ops.clip_boxes_to_image(boxes[7], (30, widths[7].item())))


def test_scale_and_letterbox_invert_each_other():
    boxes = random_xyxy(20)
    gain_x, gain_y, pad_x, pad_y = 0.37, 0.38, 12.0, 5.5
    canvas = ub.scale_boxes(boxes, gain_x, gain_y) + torch.tensor([pad_x, pad_y, pad_x, pad_y])
    torch.testing.assert_close(ub.letterbox_to_original(canvas, gain_x, gain_y, pad_x, pad_y), boxes)
    np.testing.assert_allclose(ub.letterbox_to_original(canvas.numpy(), gain_x, gain_y, pad_x, pad_y), boxes.numpy())


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("iou", ops.box_iou),
        ("giou", ops.generalized_box_iou),
        ("diou", ops.distance_box_iou),
        ("ciou", ops.complete_box_iou),
    ],
)
def test_iou_family_equals_torchvision_by_broadcasting_and_its_gradients_finite_differences(kind, reference):
    """The trade-off weight of ciou is constant, so its gradient is compared with torchvision's."""
    a = random_xyxy(30, 3)
    b = random_xyxy(20, 4)
    expected = reference(a, b)
    torch.testing.assert_close(ub.iou(a[:, None], b[None], kind), expected, atol=1e-6, rtol=1e-6)
    single = ub.iou(a[:, None].float(), b[None].float(), kind)
    torch.testing.assert_close(single.double(), expected, atol=1e-5, rtol=1e-4)
    x = a[:8].clone().requires_grad_()
    if kind != "ciou":
        assert torch.autograd.gradcheck(lambda boxes: ub.iou(boxes, b[:8], kind), (x,))
        return
    (ours,) = torch.autograd.grad((1 - ub.iou(x, b[:8], kind)).sum(), x)
    (theirs,) = torch.autograd.grad(ops.complete_box_iou_loss(x, b[:8], reduction="sum"), x)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["iou", "giou", "diou", "ciou"])
def test_boxes_without_area_give_finite_values_and_gradients(kind):
    a = torch.tensor([[3.0, 3, 3, 3], [0, 0, 0, 0], [1, 1, 5, 1]], requires_grad=True)
    b = torch.tensor([[3.0, 3, 3, 3], [2, 2, 9, 9], [0, 0, 0, 0]])
    value = ub.iou(a, b, kind)
    (gradient,) = torch.autograd.grad(value.sum(), a)
    assert torch.stack((value, gradient.sum(1))).isfinite().all()
