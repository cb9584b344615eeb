"""Non-maximum suppression of a validation batch, compared with torchvision's kernel, in turns: the same boxes and
scores, similar to those of a trained model (many boxes around each object, most cells background).

    python -m benchmarks.speed.nms --batch-size 16
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from benchmarks.speed.our_side import seconds_of
from benchmarks.speed.report import Comparison, show
from benchmarks.speed.training_step import context_of
from models.postprocess.detections import select_detections

CONFIDENCE, IOU, MOST = 0.001, 0.7, 300


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.speed.nms", description=__doc__.split(":")[0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--boxes", type=int, default=8400, help="cells an image; 8400: 640 px, strides 8, 16, 32")
    parser.add_argument("--classes", type=int, default=80)
    parser.add_argument("--objects", type=int, default=30, help="an image")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each; medians are compared")
    options = parser.parse_args()
    device = context_of(options.device).device
    content = make_input(options.batch_size, options.boxes, options.classes, options.objects)
    boxes, scores = content["boxes_xyxy"].to(device), content["scores"].to(device)
    rules = {name: partial(rule, boxes, scores) for name, rule in (("ours", our_nms), ("torchvision", torchvision_nms))}
    found = {name: rule() for name, rule in rules.items()}
    candidates = (scores > CONFIDENCE).sum() / options.batch_size
    kept = ", ".join(f"{name} {sum(map(len, rows)) / options.batch_size:.1f}" for name, rows in found.items())
    print(f"figure: {candidates:.0f} candidates an image; kept: {kept}")
    print(f"figure: ours and torchvision's agree on {agreement(*found.values()):.2%} of the boxes that either keeps")
    ms: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(options.rounds):
        for name, rule in rules.items():
            ms[name].append(seconds_of(rule, 3, device.type) * 1000 / options.batch_size)
    title = f"NMS, {options.boxes} cells, {options.classes} classes, {candidates:.0f} candidates, {options.device}"
    what = f"NMS, batch {options.batch_size}, against torchvision"
    show(title, [Comparison(what, "ms an image", ms["ours"], ms["torchvision"])])


def our_nms(boxes: Tensor, scores: Tensor) -> list[Tensor]:
    """Rows (x1, y1, x2, y2, class) of each image."""
    found = select_detections(boxes, scores, conf_thres=CONFIDENCE, iou_thres=IOU, max_det=MOST, box_voting=False)
    rows = torch.cat([found.boxes_xyxy, found.classes[..., None].to(found.boxes_xyxy)], -1)
    return [image[:count] for image, count in zip(rows, found.counts.tolist())]


def torchvision_nms(boxes: Tensor, scores: Tensor) -> list[Tensor]:
    """Like `our_nms`, image by image with torchvision's kernel, on the same candidates."""
    found = []
    for own_boxes, own_scores in zip(boxes, scores):
        box, label = (own_scores > CONFIDENCE).nonzero(as_tuple=True)
        keep = batched_nms(own_boxes[box], own_scores[box, label], label, IOU)[:MOST]
        found.append(torch.cat([own_boxes[box[keep]], label[keep, None].to(own_boxes)], 1))
    return found


def agreement(a: list[Tensor], b: list[Tensor]) -> float:
    """The fraction of boxes and classes of both sides that they have in common."""
    ours, theirs = ([set(map(tuple, image.tolist())) for image in found] for found in (a, b))
    common = sum(len(x & y) for x, y in zip(ours, theirs))
    return common / max(sum(len(x | y) for x, y in zip(ours, theirs)), 1)


def make_input(batch: int, boxes: int, classes: int, objects: int) -> dict[str, torch.Tensor]:
    """``boxes_xyxy`` (B, N, 4) of a 640 px canvas and ``scores`` (B, N, C)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    center = torch.rand(batch, objects, 2, generator=generator) * 640
    size = 20 * torch.exp(normal(batch, objects, 2) * 0.7 + 1)
    label = torch.randint(0, classes, (batch, objects), generator=generator)
    owner = torch.randint(0, objects, (batch, boxes), generator=generator)
    pick = owner[..., None].expand(-1, -1, 2)
    own_size = size.gather(1, pick) * torch.exp(normal(batch, boxes, 2) * 0.15)
    own_center = center.gather(1, pick) + normal(batch, boxes, 2) * own_size * 0.15
    scores = (normal(batch, boxes, classes) * 1.2 - 11).sigmoid()
    own_score = (normal(batch, boxes, 1) * 2.5 - 6.5).sigmoid()
    scores.scatter_(2, label.gather(1, owner)[..., None], own_score)
    corners = torch.cat([own_center - own_size / 2, own_center + own_size / 2], -1).clamp(0, 640)
    return {"boxes_xyxy": corners, "scores": scores}


if __name__ == "__main__":
    main()
