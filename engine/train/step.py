"""One optimizer step: forward, backward, one division by the global normalizer, update; built from a run's settings.

The host does not wait for the device: a non-finite step is skipped there, and logged values are read one step later.
Only ``--skip-zero-grads`` makes it wait, once a step, to learn which gradients are zero (`drop_zero_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from engine.optim.build import NOTHING_LOADED, LoadedParameters, OptimizerSettings, build_optimizer
from engine.optim.ema import ModelEma
from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers
from engine.optim.optimizer_set import OptimizerSet
from engine.optim.schedule import StepPlan
from engine.parallel.ddp import freeze_unused, parallelize
from engine.parallel.pipeline import build_stage, check_pipeline
from engine.parallel.step_values import NO_FLAGS, DelayedReader, DeviceValues, StepFlags, StepSums
from engine.parallel.strategy import Autocast, Strategy
from engine.parallel.virtual_ranks import VirtualRanks, resolve_virtual_ranks
from engine.run.run import RunSettings
from engine.train.compile import Compilation, check_compilation, plan_compilation
from models.detector import Detector
from models.layers.conv import BatchNorm2d
from models.losses.base import Criterion
from models.modules import unwrap
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.distributed.groups import check_group_size
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.devices import resolve_amp
from utils.structures import Batch, LossOutput, Targets, to_float

CUDNN_BENCHMARK_MIN_BATCHES = 2_000  # in a run; cuDNN's search for the fastest kernels takes 5 to 15 s


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step computes."""

    amp_dtype: torch.dtype | None = None  # of autocast; None: no autocast
    clip_norm: float = 0.0  # the largest norm of the gradients; 0: they are not clipped
    skip_zero_grads: bool = False  # see `drop_zero_gradients`
    compilation: Compilation | None = None  # None: nothing is compiled
    benchmark_images: int = 0  # size of the batches for which cuDNN searches for the fastest kernels; 0: it does not

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.amp_dtype, enabled=self.amp_dtype is not None)


@dataclass(frozen=True)
class FullBatch:
    """Properties of a full batch: of every batch but the last one of an epoch, which may be smaller."""

    images: int  # over all ranks
    has_regions: bool = False  # whether there may be regions to ignore (`Targets.ignore`)


class TrainStep:
    """A training step, called with its micro-batches."""

    def __init__(
        self,
        strategy: Strategy,
        criterion: Criterion,
        optimizer: OptimizerSet,
        ema: ModelEma[Detector],
        settings: StepSettings,
    ) -> None:
        self.strategy = strategy
        self.ctx = strategy.ctx
        self.model = strategy.model
        self.criterion = criterion
        self.optimizer = optimizer
        self.ema = ema
        self.settings = settings
        self.amp_dtype = settings.amp_dtype
        device = self.ctx.device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp_dtype is torch.float16)
        self.reader = DelayedReader(device)
        self._unwrapped = unwrap(self.model)
        # uint8 values are exact in float16 and bfloat16, so converting images early loses nothing.
        self._image_dtype = self.amp_dtype or next(self._unwrapped.parameters()).dtype
        self._statistics = float_buffers(self._unwrapped)
        self._norms = [module for module in self._unwrapped.modules() if isinstance(module, BatchNorm2d)]

    def __call__(
        self,
        batches: Sequence[Batch],
        counts: Sequence[int],
        updates: int,
        flags: StepFlags = NO_FLAGS,
        samples: int | None = None,
    ) -> None:
        """Takes one optimizer step.

        Args:
            batches: this rank's micro-batches; any may be empty.
            counts: images of each over all ranks.
            updates: optimizer steps, including this one.
            flags: of this rank; `reader` returns those of all ranks.
            samples: over all ranks; None: an image is a sample.
        """
        old_statistics = flatten(self._statistics)
        # The strategy calls `_accumulate` once for each part of the step that this process computes.
        accumulate = partial(self._accumulate, counts=counts, flags=flags)
        packed_sums, local_total = self.strategy.compute_gradients(batches, counts, accumulate)
        sums = StepSums.unpack(packed_sums)
        num_images = sum(counts)
        norm, nonfinite = self._scale_and_clip(sums.normalizer, num_images, samples or num_images)
        self._update_weights(nonfinite)
        self._restore_statistics(old_statistics, nonfinite)
        self.ema.update(updates)
        values = DeviceValues(
            finite=1 - nonfinite,
            local_finite=local_total.isfinite().to(norm),
            grad_norm=norm,
            flags=sums.flags,
            losses=sums.parts / sums.normalizer.clamp(min=1),
        )
        self.reader.push(values, paths=tuple(path for batch in batches for path in batch.paths))

    def _update_weights(self, nonfinite: Tensor) -> None:
        """Takes the step of the optimizer, which changes nothing if ``nonfinite`` () is 1, and drops the gradients."""
        self.optimizer.found_nonfinite = nonfinite
        self.scaler.step(self._scaled_optimizer)  # calls `OptimizerSet.step`
        self.scaler.update()
        self.optimizer.zero_grad()

    def _restore_statistics(self, old: Tensor, nonfinite: Tensor) -> None:
        """Undoes what a step has changed in the running statistics, if ``nonfinite`` () is 1."""
        if self._statistics:
            copy_from_flat(torch.where(nonfinite > 0, old, flatten(self._statistics)), self._statistics)

    @property
    def _scaled_optimizer(self) -> torch.optim.Optimizer:
        # To its annotations, a GradScaler takes torch's own optimizers; `OptimizerSet` has all that it reads of one.
        return cast(torch.optim.Optimizer, self.optimizer)

    def _accumulate(self, batches: Sequence[Batch], counts: Sequence[int], flags: StepFlags) -> tuple[Tensor, Tensor]:
        """Adds the gradients of a step's micro-batches to ``.grad``; DDP sends them with the last one.

        Returns the packed `StepSums` over the micro-batches, and the sum of their total losses ().
        """
        totals: list[Tensor] = []
        loss_sums: list[Tensor] = []
        for number, (batch, count) in enumerate(zip(batches, counts)):
            is_last = number == len(batches) - 1
            sync = nullcontext() if is_last else self.strategy.without_gradient_sync()
            with sync, kernel_search(count == self.settings.benchmark_images):
                loss = self._forward_backward(batch, batch_images=count, step_images=sum(counts))
            totals.append(loss.total)
            loss_sums.append(torch.cat([loss.normalizer.reshape(1).to(loss.parts), loss.parts]))
            if number == 0 and not is_last and self.settings.compilation:
                self.settings.compilation.copy_gradients(self.optimizer.parameters)
        summed = torch.stack(loss_sums).sum(0)
        sums = StepSums(normalizer=summed[0], parts=summed[1:], flags=flags.counted(summed))
        return sums.pack(), torch.stack(totals).sum()

    def _forward_backward(self, batch: Batch, *, batch_images: int, step_images: int) -> LossOutput:
        """Adds the gradients of one micro-batch. Returns its loss, detached.

        Args:
            batch_images: of the micro-batch over all ranks.
            step_images: of the step over all ranks.
        """
        device = self.ctx.device
        settings = self.settings
        batch = batch.to(device)
        images = to_float(batch.images, device, self._image_dtype, channels_last=True)
        compilation = settings.compilation
        with compilation.for_batch(images, batch_images) if compilation else nullcontext():
            raw = self.strategy.forward(images)
            loss = None if raw is None else self._loss(raw, images, batch.targets)
        self._count_batch()
        if loss is None:  # with --pipeline: the other process of the pair has the end of the model
            zero = images.new_zeros((), dtype=torch.float32)
            total = self.scaler.scale(zero)  # `unscale_` needs the scale that this makes
            return LossOutput(total=total, normalizer=zero, parts=zero.new_zeros(len(self.criterion.names)))
        # DDP averages gradients over shards, but their sum is needed. Dividing by the images keeps float16 gradients in
        # range until the real normalizer is known, after the last shard; `_scale_and_clip` multiplies by them again.
        scaled = loss.total * (self.strategy.ddp_divides_by / step_images)
        self.scaler.scale(scaled).backward()
        return LossOutput(total=loss.total.detach(), normalizer=loss.normalizer.detach(), parts=loss.parts)

    def _count_batch(self) -> None:
        """Counts a micro-batch in the batch norms that are not frozen."""
        counters = [
            norm.num_batches_tracked for norm in self._norms if norm.training and norm.num_batches_tracked is not None
        ]
        if counters:
            torch._foreach_add_(counters, 1)

    def _loss(self, raw: list[Tensor], images: Tensor, targets: Targets) -> LossOutput:
        """Returns the loss of the raw maps of ``images``; a teacher, if there is one, sees the same images."""
        with self.settings.autocast(self.ctx.device):
            teacher_maps = self.criterion.teacher_maps(images)
        return self.criterion(raw, targets, teacher_maps)

    def _scale_and_clip(self, normalizer: Tensor, num_images: int, samples: int) -> tuple[Tensor, Tensor]:
        """Scales gradients to those of ``samples * total / normalizer`` (the loss scaled by the batch, as YOLO's
        learning rates expect), and clips them. Returns their norm before clipping () and a float () that is 1 if it is
        not finite."""
        self.scaler.unscale_(self._scaled_optimizer)
        if self.settings.skip_zero_grads:
            drop_zero_gradients(self.optimizer.parameters)
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        factor = num_images * samples / normalizer.clamp(min=1)
        norm = torch.nn.utils.get_total_norm(gradients) * factor
        if self.settings.clip_norm > 0:
            factor = factor * (self.settings.clip_norm / (norm + 1e-6)).clamp(max=1)
        if gradients:
            torch._foreach_mul_(gradients, factor)
        return norm.float(), 1 - norm.isfinite().float()


@torch.no_grad()
def drop_zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sets gradients that are exactly zero to None, so that neither momentum nor weight decay changes those weights.
    The host waits for the device, which alone knows them."""
    trained = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    all_zero = torch.stack(torch._foreach_norm(gradients, float("inf"))) == 0
    for parameter, is_zero in zip(trained, all_zero.tolist()):
        if is_zero:
            parameter.grad = None


@contextmanager
def kernel_search(is_on: bool) -> Iterator[None]:
    """Sets whether cuDNN tries all kernels for each new input size within the block.

    Validation, tests of weights and the last batch of an epoch have sizes of their own, for which the search takes
    longer than it saves.
    """
    torch.backends.cudnn.benchmark = is_on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = False


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
    *,
    steps: StepPlan,
    batch: FullBatch,
    loaded: LoadedParameters = NOTHING_LOADED,
) -> TrainStep:
    """Builds the step of a run, with the model wrapped for its devices and compiled. `check_step_settings` accepts the
    settings, and the optimizer has been chosen. ``loaded``: the parameters of the model that come from weights."""
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
    step_settings = choose_step_settings(ctx, settings, steps, batch)
    autocast = partial(step_settings.autocast, ctx.device)
    strategy = build_strategy(ctx, config, model=model, optimizer=optimizer, steps=steps, autocast=autocast)
    compilation = step_settings.compilation
    if compilation is not None:
        compilation.apply(model, criterion)
        get_logger().info("%s", compilation.message)
    return TrainStep(strategy, criterion, optimizer, ema, step_settings)


def choose_step_settings(
    ctx: DistributedContext, settings: RunSettings, steps: StepPlan, batch: FullBatch
) -> StepSettings:
    """Returns how the steps of a run compute: autocast, clipping, compilation, the search for kernels."""
    config = settings.config
    compilation = None
    if config.compile:
        shards = resolve_virtual_ranks(ctx, config) or ctx.world_size
        compilation = plan_compilation(config, ctx, images=batch.images, shards=shards, has_regions=batch.has_regions)
    has_one_size = not (config.deterministic or config.multi_scale or config.rect)
    searches = has_one_size and steps.total * steps.accumulate >= CUDNN_BENCHMARK_MIN_BATCHES
    return StepSettings(
        amp_dtype=broadcast_object(ctx, resolve_amp(config.amp, ctx.device)),
        clip_norm=settings.hyp.clip_norm,
        skip_zero_grads=config.skip_zero_grads,
        compilation=compilation,
        benchmark_images=batch.images if searches else 0,
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
        return build_stage(ctx, model, autocast, optimizer.parameters)
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    if virtual_ranks:
        return VirtualRanks(ctx, model, autocast, optimizer, virtual_ranks)
    if ctx.is_distributed:
        side = 2 * model.stride
        freeze_unused(model, torch.zeros(2, model.channels, side, side))
    # Where torch.compile cuts graphs at DDP's buckets, DDP cannot take them for static (pytorch#109261).
    static = steps.accumulate == 1 and not config.compile
    return Strategy(ctx, parallelize(model, ctx, sync_bn=config.sync_bn, static=static), autocast)
