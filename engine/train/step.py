"""One optimizer step: forward, backward, one division by the global normalizer, update; built from a run's settings.

The host does not wait for the device: a non-finite step is skipped there, and logged values are read one step later.
Only ``--skip-zero-grads`` makes it wait, once a step, to learn which gradients are zero (`drop_zero_gradients`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.checkpoint.run import Run
from engine.optim.build import OptimizerSet, build_optimizer, choose_optimizer
from engine.optim.ema import ModelEma
from engine.optim.flat_tensors import copy_from_flat, flatten, float_buffers
from engine.optim.schedule import StepPlan, new_layers_lr_mult
from engine.parallel.compile import UNCOMPILED, Compilation, check_compilation, plan_compilation
from engine.parallel.ddp import all_reduce_sum, parallelize, unused_parameters, without_gradient_sync
from engine.parallel.pipeline import STAGES, FirstStage, LastStage, check_pipeline
from engine.parallel.virtual_ranks import TreeGradients, resolve_virtual_ranks
from models.layers.conv import BatchNorm2d
from models.losses.distillation import old_outputs
from utils.config.settings import TrainConfig
from utils.distributed.collectives import broadcast_object, unwrap
from utils.distributed.context import DistributedContext
from utils.distributed.groups import check_group_size, sync_bn_group
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.amp import resolve_amp
from utils.structures import Batch, LossOutput, to_float


class StepFlags(NamedTuple):
    """Requests of any rank to all ranks at a step boundary. They are reduced together with the step's sums, so they
    cost nothing and all ranks read them after the same step."""

    save: bool = False
    stop: bool = False  # SIGTERM or SIGUSR1
    interrupt: bool = False  # SIGINT

    def __or__(self, other: StepFlags) -> StepFlags:
        return StepFlags(*(a or b for a, b in zip(self, other)))


@dataclass(frozen=True, slots=True)
class StepValues:
    """The results of one step, on the host."""

    finite: bool  # gradients of the global batch; False: the step was skipped
    local_finite: bool  # this rank's own loss
    grad_norm: float  # before clipping
    losses: tuple[float, ...]  # the criterion's parts over the global batch, normalized
    paths: tuple[str, ...]  # images of this rank's shard
    flags: StepFlags  # of all ranks, when the step began


NO_FLAGS = StepFlags()


class DelayedReader:
    """Reads device values one step late: the copy to the host runs while the next step is queued."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._pending: deque = deque()

    def push(self, values: Tensor, paths: tuple[str, ...]) -> None:
        if self._asynchronous:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = values, None
        self._pending.append((host, event, paths))

    def pop(self, *, leave: int = 1) -> list[StepValues]:
        """All but the newest ``leave`` steps, oldest first."""
        ready = []
        while len(self._pending) > leave:
            host, event, paths = self._pending.popleft()
            if event is not None:
                event.synchronize()
            finite, local_finite, norm, *rest = host.tolist()
            flags, losses = StepFlags(*(flag > 0 for flag in rest[: len(NO_FLAGS)])), tuple(rest[len(NO_FLAGS) :])
            ready.append(StepValues(finite > 0, local_finite > 0, norm, losses, paths, flags))
        return ready


class TrainStep:
    """A training step; call it with the micro-batches of the step.

    With ``virtual_ranks`` 0 this process's micro-batches are one shard of the step, and DDP adds the gradients.
    Otherwise every global micro-batch is cut into that many shards (`TreeGradients`), and the model is not wrapped.
    Neither is it with ``pipeline``: two processes share a shard, and each computes some of the layers.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        criterion: Callable[[list[Tensor], Tensor, int], LossOutput],
        optimizer: OptimizerSet,
        ema: ModelEma,
        ctx: DistributedContext,
        amp_dtype: torch.dtype | None,
        clip_norm: float,
        channels_last: bool,
        virtual_ranks: int = 0,
        pipeline: bool = False,
        skip_zero_grads: bool = False,
        samples_per_image: int = 1,
        compilation: Compilation = UNCOMPILED,
    ) -> None:
        self.model, self.criterion, self.optimizer, self.ema = model, criterion, optimizer, ema
        self.ctx, self.amp_dtype, self.clip_norm = ctx, amp_dtype, clip_norm
        self.skip_zero_grads, self.compilation = skip_zero_grads, compilation
        self.channels_last, self.samples_per_image = channels_last, samples_per_image
        self.scaler = torch.amp.GradScaler(ctx.device.type, enabled=amp_dtype is torch.float16)
        self.reader = DelayedReader(ctx.device)
        self._bare = unwrap(model)
        self._statistics = float_buffers(self._bare)
        self._norms = [module for module in self._bare.modules() if isinstance(module, BatchNorm2d)]
        self._tree = TreeGradients(ctx, virtual_ranks, self._bare, optimizer) if virtual_ranks else None
        stage = FirstStage if ctx.rank % STAGES == 0 else LastStage
        self._stage = stage(ctx, self._bare, optimizer.parameters, self._autocast) if pipeline else None
        self._averaged_over = ctx.world_size if isinstance(model, nn.parallel.DistributedDataParallel) else 1

    def __call__(
        self, batches: Sequence[Batch], images: Sequence[int], updates: int, flags: StepFlags = NO_FLAGS
    ) -> None:
        """Takes one optimizer step.

        Args:
            batches: this rank's micro-batches; any may be empty.
            images: of each micro-batch over all ranks.
            updates: optimizer steps, including this one.
            flags: of this rank; those of all ranks are returned with the values of the step.
        """
        before = flatten(self._statistics)
        if self._tree is not None:
            sums, local_total = self._tree(batches, images, lambda shards: self._accumulate(shards, images, flags))
        elif self._stage is not None:
            sums, local_total = self._stage(batches, lambda: self._accumulate(batches, images, flags))
        else:
            sums, local_total = self._accumulate(batches, images, flags)
            all_reduce_sum(self.ctx, sums)
        sums, flag_sums = sums[: -len(flags)], sums[-len(flags) :]
        losses = sums[1:] / sums[0].clamp(min=1)
        norm, bad = self._scale_and_clip(sums[0], sum(images))
        self.optimizer.skip = bad
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self._statistics:
            copy_from_flat(torch.where(bad > 0, before, flatten(self._statistics)), self._statistics)
        self.ema.update(self._bare, updates)
        first = torch.stack([1 - bad, local_total.isfinite().to(norm), norm])
        values = torch.cat([first, flag_sums.to(norm), losses.to(norm)])
        self.reader.push(values, tuple(path for batch in batches for path in batch.paths))

    def _accumulate(self, batches: Sequence[Batch], images: Sequence[int], flags: StepFlags) -> tuple[Tensor, Tensor]:
        """Adds the gradients of a step's micro-batches to ``.grad``; DDP sends them with the last one.

        Returns sums (1 + P + A,) over the micro-batches: normalizer, then parts, then flags; and their total ().
        """
        totals, sums = [], []
        for number, (batch, count) in enumerate(zip(batches, images)):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else without_gradient_sync(self.model):
                total, parts = self._forward_backward(batch, count, sum(images))
            totals.append(total)
            sums.append(parts)
            if number == 0 and not is_last:
                self.compilation.copy_gradients(self.optimizer.parameters)
        return append_flags(torch.stack(sums).sum(0), flags), torch.stack(totals).sum()

    def _forward_backward(self, batch: Batch, batch_images: int, step_images: int) -> tuple[Tensor, Tensor]:
        """The total () of one micro-batch, of ``batch_images`` over all ranks, and its sums: normalizer, then parts."""
        batch = batch.to(self.ctx.device)
        # Bytes are exact in any of these types, and so is what autocast would make of their quotients later.
        dtype = self.amp_dtype or next(self._bare.parameters()).dtype
        images = to_float(batch.images, self.ctx.device, dtype, self.channels_last)
        if isinstance(self._stage, FirstStage):
            self._stage.forward(images)
            self._count_batch()
            nothing = images.new_zeros(1 + len(self.criterion.names), dtype=torch.float32)
            return self.scaler.scale(nothing[0]), nothing  # the scaler wants to see a loss
        autocast = self._autocast()
        with self.compilation.forward(batch_images), autocast:
            raw = self.model(images) if self._stage is None else self._stage.forward(images)
        with autocast:
            old = old_outputs(self.criterion, images)
        self._count_batch()
        out = self.criterion(raw, batch.targets, batch.max_targets, batch.host_targets, batch.ignore, *old)
        # DDP averages gradients over ranks, but the sum is needed. Dividing by the images keeps float16 gradients
        # in range until the real normalizer is known, after the last shard.
        loss = out.total * (self._averaged_over / step_images)
        self.scaler.scale(loss).backward()
        return out.total.detach(), torch.cat([out.normalizer.detach().reshape(1).to(out.parts), out.parts])

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ctx.device.type, self.amp_dtype, enabled=self.amp_dtype is not None)

    def _count_batch(self) -> None:
        counters = [norm.num_batches_tracked for norm in self._norms if norm.training]  # frozen ones see none
        if counters:
            torch._foreach_add_(counters, 1)

    def _scale_and_clip(self, normalizer: Tensor, global_images: int) -> tuple[Tensor, Tensor]:
        """Gradients become those of ``images * total / normalizer`` (the loss scaled by the batch, as YOLO's learning
        rates expect), clipped. Returns their norm before clipping and a float that is 1 if it is not finite."""
        self.scaler.unscale_(self.optimizer)
        if self.skip_zero_grads:
            drop_zero_gradients(self.optimizer.parameters)
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        factor = global_images**2 * self.samples_per_image / normalizer.clamp(min=1)
        norm = torch.nn.utils.get_total_norm(gradients) * factor
        if self.clip_norm > 0:
            factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1)
        if gradients:
            torch._foreach_mul_(gradients, factor)
        return norm.float(), 1 - norm.isfinite().float()


def append_flags(sums: Tensor, flags: StepFlags) -> Tensor:
    """``sums`` (n,) followed by a 1 for each flag that is set and a 0 for the others, without a host sync."""
    values = sums.new_zeros(len(flags))
    for number, is_set in enumerate(flags):
        if is_set:
            values[number].fill_(1)
    return torch.cat([sums, values])


@torch.no_grad()
def drop_zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sets gradients that are exactly zero to None, so that neither momentum nor weight decay changes those weights.

    Costs one host sync: only the device knows which gradients are zero.
    """
    trained = [p for p in parameters if p.grad is not None]
    all_zero = torch.stack(torch._foreach_norm([p.grad for p in trained], float("inf"))) == 0
    for parameter, is_zero in zip(trained, all_zero.tolist()):
        if is_zero:
            parameter.grad = None


def check_step_settings(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError for settings that no step of these processes could have, before anything is built or read."""
    check_pipeline(ctx, config)
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
    pretrained: Mapping[str, Sequence[int]],
    plan: StepPlan,
    images: int,
) -> TrainStep:
    """The step of a run whose settings `check_step_settings` accepts: with its optimizer, its averaged weights, and the
    model wrapped for its devices and compiled.

    Args:
        model: a detector, on its device.
        criterion: its loss, there too.
        pretrained: as in `build_optimizer`.
        images: of a whole global batch.
    """
    config, hyp = run.config, run.hyp
    optimizer = build_optimizer(
        model,
        choose_optimizer(config.optimizer, plan.total),
        lr=hyp.lr0,
        lr_factor=hyp.lr_factor,
        pretrained=pretrained,
        pretrained_lr_mult=hyp.lr_mult,
        new_lr_mult=new_layers_lr_mult(math.inf if config.time else plan.total),
        momentum=hyp.momentum,
        weight_decay=hyp.weight_decay,
        sharded=config.zero and ctx.is_distributed,
    )
    ema = ModelEma(model, decay=hyp.ema_decay, tau=hyp.ema_tau)
    amp = broadcast_object(ctx, resolve_amp(config.amp, ctx.device))
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    wrapped = model if virtual_ranks or config.pipeline > 1 else _over_devices(ctx, run, model, plan)
    compilation = plan_compilation(config, ctx, images=images, shards=virtual_ranks or ctx.world_size)
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
        pipeline=config.pipeline > 1,
        skip_zero_grads=config.skip_zero_grads,
        samples_per_image=config.samples_per_image,
        compilation=compilation,
    )


def _over_devices(ctx: DistributedContext, run: Run, model: nn.Module, plan: StepPlan) -> nn.Module:
    """The model, wrapped in DDP or DataParallel if it runs on several devices."""
    side = 2 * model.stride
    unused = unused_parameters(model, torch.zeros(1, model.channels, side, side)) if ctx.is_distributed else []
    if unused:
        get_logger().info("no output depends on %s: DDP looks for such parameters at every step", ", ".join(unused))
    config = run.config
    return parallelize(
        model,
        ctx,
        sync_bn=config.sync_bn or config.sync_bn_group > 0,
        sync_bn_group=sync_bn_group(ctx, config.sync_bn_group),
        unused=unused,
        # Where torch.compile cuts graphs at DDP's buckets, DDP cannot take them for static (pytorch#109261).
        static=plan.accumulate == 1 and not config.compile,
        compress=config.compress_grads,
    )
