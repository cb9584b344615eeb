"""Optimizer steps without a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from engine.optim.build import OptimizerSettings, build_optimizer
from engine.optim.ema import ModelEma
from engine.parallel.strategy import Strategy
from engine.train.step import StepSettings, TrainStep, build_strategy
from models.detector import Detector
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext


def make_train_step(
    ctx: DistributedContext,
    model: Detector,
    *,
    wrapped: nn.Module | None = None,
    optimizer: str = "SGD",
    virtual_ranks: int = 0,
    pipeline: bool = False,
    **settings: Any,
) -> TrainStep:
    """Returns a training step of ``model`` with gradients clipped to norm 10.

    Args:
        wrapped: the model as `engine.parallel.ddp.parallelize` wraps it; None: as the product does.
        settings: of `StepSettings`.
    """
    ema = ModelEma(model, decay=0.9, tau=1.0)
    rule = build_optimizer(model, optimizer, OptimizerSettings(lr=0.01, momentum=0.9, weight_decay=5e-4))
    step_settings = StepSettings(**settings)
    autocast = partial(step_settings.autocast, ctx.device)
    if wrapped is None or virtual_ranks:
        config = TrainConfig(virtual_ranks=virtual_ranks, pipeline=2 if pipeline else 1)
        strategy = build_strategy(ctx, config, model, rule, autocast)
    else:
        strategy = Strategy(ctx, wrapped, autocast)
    criterion = model.head.build_loss(Hyperparameters()).to(next(model.parameters()).device)
    return TrainStep(strategy, criterion, rule, ema, step_settings)
