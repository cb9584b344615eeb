"""Boxes and scores similar to those of a trained model: many boxes around each object, most cells background."""

from __future__ import annotations

import torch
from torch import Tensor


def make_detections(batch: int, boxes: int, classes: int, objects: int) -> dict[str, Tensor]:
    """Returns ``boxes_xyxy`` (B, N, 4) on a 640 px canvas and ``scores`` (B, N, C)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
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
