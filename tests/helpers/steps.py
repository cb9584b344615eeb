"""Optimizer steps without a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from engine.optim.build import OptimizerSettings, build_optimizer
from engine.optim.ema import ModelEma
from engine.parallel.pipeline import Pipeline
from engine.parallel.strategy import Strategy
from engine.parallel.virtual_ranks import VirtualRanks
from engine.train.step import StepSettings, TrainStep
from models.detector import Detector
from utils.config.settings import Hyperparameters
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
        wrapped: the model as `engine.parallel.ddp.parallelize` wraps it; None: it is not.
        settings: of `StepSettings`.
    """
    ema = ModelEma(model, decay=0.9, tau=1.0)
    rule = build_optimizer(model, optimizer, OptimizerSettings(lr=0.01, momentum=0.9, weight_decay=5e-4))
    step_settings = StepSettings(**{"clip_norm": 10.0, **settings})
    autocast = partial(step_settings.autocast, ctx.device)
    strategy = Strategy(ctx, wrapped or model, autocast)
    if virtual_ranks:
        strategy = VirtualRanks(ctx, model, autocast, rule, virtual_ranks)
    if pipeline:
        strategy = Pipeline(ctx, model, autocast, rule.parameters)
    criterion = model.head.build_loss(Hyperparameters()).to(next(model.parameters()).device)
    return TrainStep(strategy, criterion, rule, ema, step_settings)
