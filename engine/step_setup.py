"""The optimiser's step of a run, from its settings."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from engine.checkpoint.run import Run
from engine.optim.build import DEFAULT_LR, OptimizerSet, build_optimizer
from engine.optim.ema import ModelEma
from engine.optim.schedule import StepPlan
from engine.parallel.compile import check_compilation, plan_compilation
from engine.parallel.ddp import parallelise, unused_parameters
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.process import resolve_amp
from engine.train_step import TrainStep
from utils.config.settings import TrainConfig
from utils.distributed.collectives import broadcast_object
from utils.distributed.context import DistributedContext
from utils.distributed.groups import check_group_size, sync_bn_group
from utils.errors import UserError
from utils.logger import get_logger


def check_step_settings(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that no step of these processes could have, before anything is built or read."""
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    if config.compress_grads and (virtual_ranks or not ctx.is_distributed):
        raise UserError("--compress-grads is for plain DDP: several processes, no --virtual-ranks or --deterministic")
    if config.sync_bn_group and ctx.is_distributed:
        check_group_size(ctx, config.sync_bn_group)
    resolve_amp(config.amp, ctx.device)
    check_compilation(config, ctx)


def build_step(
    ctx: DistributedContext,
    run: Run,
    model: nn.Module,
    criterion: nn.Module,
    *,
    rule: str,
    pretrained: Collection[str],
    plan: StepPlan,
    pictures: int,
) -> TrainStep:
    """The optimiser's step, by ``rule``, with the averaged weights and the model as its devices want it. The settings
    are ones that `check_step_settings` has let pass.

    Args:
        model: a detector, on its device.
        criterion: the loss, there too.
        rule: name of the optimiser, see `choose_optimizer`.
        pretrained: names of the parameters that come from weights.
        pictures: of a whole global batch.
    """
    config, hyp = run.config, run.hyp
    optimizer = _optimizer_of(ctx, run, model, rule, pretrained)
    ema = ModelEma(model, decay=hyp.ema_decay, tau=hyp.ema_tau)
    amp = broadcast_object(ctx, resolve_amp(config.amp, ctx.device))
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    wrapped = model if virtual_ranks else _over_devices(ctx, run, model, plan)
    compilation = plan_compilation(config, ctx, pictures=pictures, shards=virtual_ranks or ctx.world_size)
    compilation.apply(model, criterion)
    if compilation.line:
        get_logger().info("%s", compilation.line)
    return TrainStep(
        model=wrapped,
        criterion=criterion,
        optimizer=optimizer,
        ema=ema,
        ctx=ctx,
        amp_dtype=amp,
        clip_norm=hyp.clip_norm,
        channels_last=config.channels_last,
        virtual_ranks=virtual_ranks,
        skip_zero_grads=config.skip_zero_grads,
        compilation=compilation,
    )


def _optimizer_of(
    ctx: DistributedContext, run: Run, model: nn.Module, rule: str, pretrained: Collection[str]
) -> OptimizerSet:
    hyp = run.hyp
    return build_optimizer(
        model,
        rule,
        lr=DEFAULT_LR[rule] if hyp.lr0 is None else hyp.lr0,
        pretrained=pretrained,
        pretrained_lr_mult=hyp.lr_mult,
        momentum=hyp.momentum,
        weight_decay=hyp.weight_decay,
        sharded=run.config.zero and ctx.is_distributed,
    )


def _over_devices(ctx: DistributedContext, run: Run, model: nn.Module, plan: StepPlan) -> nn.Module:
    """The model as its number of devices wants it."""
    side = 2 * model.stride
    unused = unused_parameters(model, torch.zeros(1, 3, side, side, device=ctx.device)) if ctx.is_distributed else []
    if unused:
        get_logger().info("no output depends on %s: DDP looks for such parameters at every step", ", ".join(unused))
    config = run.config
    return parallelise(
        model,
        ctx,
        sync_bn=config.sync_bn or config.sync_bn_group > 0,
        sync_bn_group=sync_bn_group(ctx, config.sync_bn_group),
        unused=unused,
        # Where torch.compile cuts graphs at DDP's buckets, DDP cannot take them for static (pytorch#109261).
        static=plan.accumulate == 1 and not config.compile,
        compress=config.compress_grads,
    )
