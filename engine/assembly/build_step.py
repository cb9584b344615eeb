"""The step of a run, built from its settings: optimizer, averaged weights, strategy, precision, compilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from data.loading.loader import InfiniteDataLoader
from engine.optim.build import NOTHING_LOADED, LoadedParameters, OptimizerSettings, build_optimizer
from engine.optim.ema import ModelEma
from engine.optim.optimizer_set import OptimizerSet
from engine.optim.schedule import StepPlan, new_layers_lr_mult, step_plan
from engine.parallel.ddp import freeze_unused, parallelize
from engine.parallel.pipeline import Pipeline, check_pipeline
from engine.parallel.strategy import Autocast, Strategy
from engine.parallel.virtual_ranks import VirtualRanks, resolve_virtual_ranks
from engine.train.checkpoint import Checkpoint
from engine.train.compile import check_compilation, plan_compilation
from engine.train.step import StepSettings, TrainStep
from models.detector import Detector
from models.layers.conv import BatchNorm2d
from models.losses.base import Criterion
from utils.config.settings import FIND_BATCH_SIZE, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.distributed.groups import check_group_size
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.devices import resolve_amp

CUDNN_BENCHMARK_MIN_BATCHES = 2_000  # batches in a run; cuDNN's search for the fastest kernels takes 5 to 15 s


@dataclass(frozen=True)
class StepBatches:
    """The steps of a run and their batches. A full batch is any but the last one of an epoch, which may be smaller."""

    steps: StepPlan
    images: int  # images in a full batch, over all ranks
    has_regions: bool = False  # whether there may be ignore regions (`Targets.ignore`)

    @staticmethod
    def of(train: InfiniteDataLoader, config: TrainConfig) -> StepBatches:
        """Plans the steps of a loader's batches. Ignore regions are crowd regions, and objects cut by the borders of
        moving tiles."""
        has_regions = bool(train.index.crowd.any()) or train.samples.tiles is not None
        return StepBatches(step_plan(config, len(train)), train.global_images(0), has_regions)


def check_step_settings(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that no step of these processes could have."""
    if config.pipeline > 1:
        check_pipeline(ctx, config)
    resolve_virtual_ranks(ctx, config)
    one_device_flags = {
        "--virtual-ranks": config.virtual_ranks,
        "--sync-bn": config.sync_bn,
        "--compile": config.compile,
        "--batch-size -1": config.batch_size == FIND_BATCH_SIZE,
    }
    for flag, is_given in one_device_flags.items():
        if is_given and len(ctx.devices) > 1:
            raise UserError(f"{flag}: one device per process; start with torchrun instead of --device 0,1")
    if config.sync_bn > 0 and ctx.is_distributed:
        check_group_size(ctx, config.sync_bn)
    resolve_amp(config.amp, ctx.device)
    if config.compile:
        check_compilation(config, ctx)


def build_step(
    ctx: DistributedContext,
    settings: RunSettings,
    model: Detector,
    criterion: Criterion,
    batches: StepBatches,
    loaded: LoadedParameters = NOTHING_LOADED,
) -> TrainStep:
    """Builds the step of a run, with the model wrapped for its devices and compiled. The settings have passed
    `check_step_settings`, and their optimizer is not ``auto``. ``loaded``: the parameters of the model that come from
    weights."""
    config = settings.config
    hyp = settings.hyp
    for module in model.modules():
        if isinstance(module, BatchNorm2d):
            module.momentum = hyp.bn_momentum
    optimizer_settings = OptimizerSettings(
        lr=hyp.lr0,
        lr_factor=hyp.lr_factor,
        momentum=hyp.momentum,
        weight_decay=hyp.weight_decay,
        sharded=config.zero and ctx.is_distributed,
    )
    optimizer = build_optimizer(model, config.optimizer, optimizer_settings, loaded)
    ema = ModelEma(model, decay=hyp.ema_decay, tau=hyp.ema_tau)
    step_settings = choose_step_settings(ctx, settings, batches)
    autocast = partial(step_settings.autocast, ctx.device)
    strategy = build_strategy(ctx, config, model=model, optimizer=optimizer, steps=batches.steps, autocast=autocast)
    compilation = step_settings.compilation
    if compilation is not None:
        compilation.apply(model, criterion)
        sizes = "all image sizes" if compilation.dynamic else "one image size"
        get_logger().info("compiled for %s%s", sizes, ", with CUDA graphs" if compilation.cuda_graphs else "")
    return TrainStep(strategy, criterion, optimizer, ema, step_settings)


def loaded_parameters(
    pretrained: Mapping[str, Sequence[int]], settings: RunSettings, steps: StepPlan, checkpoint: Checkpoint | None
) -> LoadedParameters:
    """Returns the parameters that come from weights, with the learning rate factors that were chosen for them and for
    new parameters when the run began.

    Args:
        pretrained: see `engine.assembly.starting_model.StartingModel`.
        settings: the run's settings, in which ``lr_mult`` is chosen.
        checkpoint: the one that the run continues from; None for a new run.
    """
    lr_mult = settings.hyp.lr_mult
    if lr_mult is None:
        raise ValueError("lr_mult must be chosen before the step is built")
    if checkpoint is None:
        new_lr_mult = new_layers_lr_mult(steps.planned_steps)
    else:
        new_lr_mult = checkpoint.description.new_lr_mult
    return LoadedParameters(new_rows=pretrained, lr_mult=lr_mult, new_lr_mult=new_lr_mult)


def choose_step_settings(ctx: DistributedContext, settings: RunSettings, batches: StepBatches) -> StepSettings:
    """Returns the settings of a run's steps: autocast, gradient clipping, compilation, cuDNN's kernel search."""
    config = settings.config
    steps = batches.steps
    compilation = None
    if config.compile:
        shards = resolve_virtual_ranks(ctx, config) or ctx.world_size
        compilation = plan_compilation(
            config, ctx, images=batches.images, shards=shards, has_regions=batches.has_regions
        )
    has_one_size = not (config.multi_scale or config.rect)
    # Each step of DataParallel has new threads, in which cuDNN would search again (pytorch#191744).
    may_search = has_one_size and not config.deterministic and len(ctx.devices) == 1
    searches = may_search and steps.planned_steps * steps.accumulate >= CUDNN_BENCHMARK_MIN_BATCHES
    return StepSettings(
        amp_dtype=broadcast_object(ctx, resolve_amp(config.amp, ctx.device)),
        clip_norm=settings.hyp.clip_norm,
        skip_zero_grads=config.skip_zero_grads,
        compilation=compilation,
        benchmark_images=batches.images if searches else 0,
    )


def build_strategy(
    ctx: DistributedContext,
    config: TrainConfig,
    *,
    model: Detector,
    optimizer: OptimizerSet,
    steps: StepPlan,
    autocast: Autocast,
) -> Strategy:
    """Builds the strategy that the settings ask for, with ``model`` wrapped if it runs on several devices."""
    if config.pipeline > 1:
        return Pipeline(ctx, model, autocast, optimizer.parameters)
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    if virtual_ranks:
        return VirtualRanks(ctx, model, autocast, optimizer, virtual_ranks)
    if ctx.is_distributed:
        side = 2 * model.stride
        freeze_unused(model, torch.zeros(2, model.channels, side, side))
    # torch.compile splits graphs at DDP's buckets, so DDP cannot treat them as static (pytorch#109261).
    static = steps.accumulate == 1 and not config.compile
    return Strategy(ctx, parallelize(model, ctx, sync_bn=config.sync_bn, static=static), autocast)
