"""Small heads, raw maps and targets for the tests of losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from models.heads.anchor import AnchorHead
from models.heads.anchor_free import AnchorFreeHead
from models.heads.base import DetectionHead
from models.heads.yolox import YOLOXHead
from models.losses.base import Criterion, LossOutput
from tests.helpers.kernel_count import NoSync
from tests.helpers.tiny import as_targets
from utils.config.settings import Hyperparameters

STRIDES = (8, 16, 32)
CANVAS = 96
REG_MAX = 16
HYP = Hyperparameters()
ANCHORS_PX = [[10, 13, 16, 30], [30, 61, 62, 45], [80, 70, 90, 96]]
KINDS = ("anchor_free", "anchor", "yolox")


def tiny_head(kind: str, classes: int = 3) -> DetectionHead:
    levels = ((8, 8, 8), STRIDES, classes)
    if kind == "anchor_free":
        return AnchorFreeHead(*levels, REG_MAX)
    head = AnchorHead(*levels, ANCHORS_PX) if kind == "anchor" else YOLOXHead(*levels, 8)
    head.reset_parameters()
    return head


def channels(kind: str, classes: int = 3) -> int:
    return {"anchor_free": 4 * REG_MAX + classes, "anchor": 2 * (5 + classes), "yolox": 5 + classes}[kind]


def raw_maps(kind: str, batch: int, classes: int = 3, seed: int = 0, bias: float = -2.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, channels(kind, classes), CANVAS // s, CANVAS // s) for s in STRIDES]
    maps = [torch.randn(shape, generator=generator) for shape in shapes]
    for level in maps:
        level[:, -classes:] += bias
    return [level.requires_grad_() for level in maps]


def some_targets(counts: Sequence[int] = (3, 0, 5, 1), classes: int = 3, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    total = sum(counts)
    image = np.repeat(np.arange(len(counts)), counts)
    center = rng.uniform(0.1, 0.9, (total, 2))
    size = np.exp(rng.uniform(np.log(0.05), np.log(0.8), (total, 2)))
    table = np.column_stack((image, rng.integers(0, classes, total), center, size))
    return torch.from_numpy(table).float()


def gradients(output: LossOutput, raw: list[torch.Tensor]) -> list[torch.Tensor]:
    return torch.autograd.grad(output.total, raw, allow_unused=False)


def check_that_shards_add_up(criterion: Criterion, raw: list[torch.Tensor], targets: torch.Tensor) -> LossOutput:
    """Fails unless any sharding, also with a shard without images, without targets or with fewer empty slots, gives the
    sums, normalizers and gradients of the whole batch; or if the host waits for a device. Returns the whole's output.

    ``targets``: rows (M, 6).
    """
    with NoSync():
        whole = criterion(raw, as_targets(targets))
        expected = gradients(whole, raw)
    outputs = []
    found = []
    images = len(raw[0])
    for low, high in ((0, 1), (1, 2), (2, images - 1), (images - 1, images - 1), (images - 1, images)):
        shard = [level.detach()[low:high].requires_grad_() for level in raw]
        inside = targets[(targets[:, 0] >= low) & (targets[:, 0] < high)] - torch.tensor([low, 0, 0, 0, 0, 0])
        outputs.append(criterion(shard, as_targets(inside)))
        found.append(gradients(outputs[-1], shard))
    for field in ("total", "normalizer", "parts"):
        torch.testing.assert_close(
            sum(getattr(output, field) for output in outputs), getattr(whole, field), rtol=2e-6, atol=0
        )
    for level, gradient in enumerate(expected):
        torch.testing.assert_close(torch.cat([g[level] for g in found]), gradient, rtol=1e-5, atol=1e-6)
    return whole
