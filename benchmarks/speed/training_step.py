"""Builds a training step with images that are already in memory, which several benchmarks time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from engine.optim.schedule import step_plan
from engine.train import step as train_step
from engine.train.step import TrainStep
from models.detector import build_detector
from utils.batches import Batch, Targets
from utils.config.recipes import hyperparameters_from
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.context import DistributedContext


def context_of(device: str, *, replicas: int = 1) -> DistributedContext:
    """Creates the context of one process on "cpu" or a CUDA device number, with ``replicas`` of the model there."""
    ctx = DistributedContext.single("cpu" if device == "cpu" else f"cuda:{device}")
    return replace(ctx, devices=(ctx.device,) * replicas)


def build_step(
    model: str | dict,
    *,
    images: int = 0,
    device: str = "cpu",
    ctx: DistributedContext | None = None,
    classes: int = 80,
    optimizer: str = "SGD",
    **settings: Any,
) -> TrainStep:
    """Builds train.py's step with its default settings, but a low learning rate.

    Args:
        images: global batch size, for which cuDNN searches for the fastest kernels, as in a long run. 0: no search, as
            in a run that is too short for it, whatever its batch size.
        device: "cpu" or a CUDA device number.
        ctx: replaces ``device``: this process among others, or several replicas of the model (`context_of`).
        settings: further fields of `TrainConfig`.
    """
    ctx = ctx or context_of(device)
    config = TrainConfig(optimizer=optimizer, epochs=100, **settings)
    if images:
        config = replace(config, batch_size=images)
    hyp = replace(hyperparameters_from(""), lr0=1e-4)
    detector = build_detector(model, classes).to(ctx.device, memory_format=torch.channels_last)
    return train_step.build_step(
        ctx,
        RunSettings(config, hyp),
        detector,
        detector.head.build_loss(hyp).to(ctx.device),
        step_plan(config, epoch_batches=100 if images else 1),
        full_batch=config.batch_size,
    )


def stepper(take_step: TrainStep, batches: Sequence[Batch], *, start: int = 0) -> Callable[[], None]:
    """Returns a function that takes a step at each call, with the next of ``batches``, and reads the values of the
    previous step, as the trainer does. ``start``: number of steps already taken."""
    numbers = count(start)

    def one_step() -> None:
        number = next(numbers)
        batch = batches[number % len(batches)]
        take_step([batch], [len(batch.images)], number + 1)
        take_step.reader.pop()

    return one_step


def make_batches(
    number: int, images: int, size: int, device: torch.device, boxes: int = 12, *, ignore: bool = False
) -> list[Batch]:
    """Creates batches of random images with ``boxes`` boxes each, as the loader yields them (page-locked with a GPU).

    Box sides are a fifth to a half of the canvas. ``ignore``: whether the first image has an ignore region, like COCO's
    crowd regions.
    """
    batches = []
    region = np.array([[0, 0, 0.5, 0.5, 0.4, 0.3]], np.float32)
    for seed in range(number):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (images, size, size, 3), generator=generator, dtype=torch.uint8)
        rows = torch.zeros(images * boxes, 6)
        rows[:, 0] = torch.arange(images).repeat_interleave(boxes)
        rows[:, 1] = torch.randint(0, 3, (images * boxes,), generator=generator)
        rows[:, 2:] = torch.rand(images * boxes, 4, generator=generator) * 0.3 + 0.2
        batch = Batch(
            images=pixels.permute(0, 3, 1, 2),
            targets=Targets(rows, (boxes,) * images, ignore=region if ignore else None),
            indices=torch.arange(images),
            original_hw=torch.full((images, 2), size, dtype=torch.int32),
            letterbox=torch.tensor([[1.0, 1.0, 0.0, 0.0]]).expand(images, 4).clone(),
            paths=tuple(f"{i}.png" for i in range(images)),
        )
        batches.append(batch.pin_memory() if device.type == "cuda" else batch)
    return batches
