"""Steps on one process or on a pipeline, and their micro-batches."""

from __future__ import annotations

import torch
from torch import nn

from engine.assembly.starting_model import freeze_layers
from engine.train.step import TrainStep
from models.detector import build_detector
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import make_batch
from utils.batches import Batch

WHOLE = [(0, 6)]
UNEQUAL = [(0, 2), (2, 5), (5, 5), (5, 6)]  # the third has no images
# The head takes layers 0, 1 and 3, wherever the model is split.
SKIPPING = {
    "nc": 2,
    "backbone": [[-1, 1, "Conv", [8, 3, 4]], [-1, 1, "Conv", [8, 3, 2]], [-1, 2, "C2f", [16, True]]],
    "head": [
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 1], 1, "Concat", [1]],
        [[0, 5, 3], 1, "Detect", ["nc"]],
    ],
}


def make_step(ctx, model, *, pipeline: bool, dtype=torch.float64, freeze=(), **changes) -> tuple[TrainStep, nn.Module]:
    """Returns a step and its model."""
    model = build_detector(model, 2, seed=1).to(dtype, memory_format=torch.channels_last)
    freeze_layers(model, freeze)
    return make_train_step(ctx, model, pipeline=pipeline, **changes), model


def shards(bounds: list[tuple[int, int]], size: int = 64) -> list[Batch]:
    """Returns the micro-batches of six images with these ``bounds``."""
    return [make_batch(6, size=size).shard(*ends) for ends in bounds]
