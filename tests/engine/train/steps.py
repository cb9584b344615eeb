"""Steps of tiny detectors with equal weights, and the batch that they train on."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.parallel.ddp import parallelize
from models.detector import build_detector
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_ANCHOR_MODEL, TINY_MODEL, make_batch
from utils.batches import Batch, Targets
from utils.config.settings import ALL_RANKS

MODELS = {
    "anchor_free": TINY_MODEL,
    "anchor": TINY_ANCHOR_MODEL,
    "two_levels": TINY_MODEL | {"backbone": TINY_MODEL["backbone"][:3], "head": [[[1, 2], 1, "Detect", ["nc"]]]},
}


def make_step(
    ctx, kind: str, *, optimizer: str = "SGD", sync_bn: bool = False, norm_eval: bool = False, static=False, **changes
):
    """Returns a step and its model. ``norm_eval``: batch norm uses its stored statistics."""
    model = build_detector(MODELS[kind], 2, seed=1)
    if norm_eval:  # only batch statistics may depend on how a batch is sharded
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    wrapped = parallelize(model, ctx, sync_bn=ALL_RANKS if sync_bn else 0, static=static)
    return make_train_step(ctx, model, wrapped=wrapped, optimizer=optimizer, **changes), model


def global_batch() -> Batch:
    """Returns six images, of which the first two have no targets."""
    batch = make_batch(6)
    return replace(batch, targets=Targets(batch.targets.rows[4:], (0, 0, 2, 2, 2, 2)))


def weights_of(model) -> torch.Tensor:
    """Returns weights and statistics as one vector, float64."""
    return torch.cat([v.reshape(-1).double() for v in model.state_dict().values()])
