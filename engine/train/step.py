"""One optimizer step: forward, backward, one division by the global normalizer, update.

There is no host-device sync: a non-finite step is skipped there, and logged values are read one step later.
Only ``--skip-zero-grads`` has one, once a step, to learn which gradients are zero (`drop_zero_gradients`).
"""

from __future__ import annotations

from collections import deque
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
from engine.parallel.pipeline import Pipeline
from engine.parallel.strategy import Autocast, Strategy
from engine.parallel.virtual_ranks import VirtualRanks, resolve_virtual_ranks
from engine.train.compile import Compilation, plan_compilation
from engine.train.control import NO_FLAGS, StepFlags
from models.detector import Detector
from models.layers.conv import BatchNorm2d
from models.losses.base import Criterion, LossOutput
from models.modules import unwrap
from utils.batches import Batch, Targets, to_float
from utils.config.settings import RunSettings, TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object
from utils.logger import get_logger
from utils.machine.devices import resolve_amp

CUDNN_BENCHMARK_MIN_BATCHES = 2_000  # batches in a run for which cuDNN's search for the fastest kernels pays


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of the computation of a step."""

    amp_dtype: torch.dtype | None = None  # type of autocast; None: no autocast
    clip_norm: float = 10.0  # maximum norm of the gradients
    skip_zero_grads: bool = False  # see `drop_zero_gradients`
    compilation: Compilation | None = None  # None: nothing is compiled
    benchmark_images: int = 0  # batch size for which ``cudnn.benchmark`` is on, over all ranks; 0: it is off

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.amp_dtype, enabled=self.amp_dtype is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """The results of one step, on the host."""

    finite: bool  # gradients of the global batch; False: the step was skipped
    local_finite: bool  # this rank's own loss
    grad_norm: float  # before clipping
    flags: StepFlags  # requests of all ranks when the step began
    losses: tuple[float, ...]  # the criterion's parts over the global batch, normalized
    paths: tuple[str, ...]  # images of this rank's shard

    @staticmethod
    def unpack(vector: Sequence[float], paths: tuple[str, ...]) -> StepValues:
        """Reads what a step has pushed: finite, local_finite, grad_norm, sums of the flags over ranks, losses."""
        finite, local_finite, grad_norm, *others = vector
        counts = others[: len(NO_FLAGS)]
        return StepValues(
            finite=finite > 0,
            local_finite=local_finite > 0,
            grad_norm=grad_norm,
            flags=StepFlags(*(count > 0 for count in counts)),
            losses=tuple(others[len(NO_FLAGS) :]),
            paths=paths,
        )


class DelayedReader:
    """Reads the values of steps one step late: the copy to the host runs while the next step is queued."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        # On the host, complete once the event is reached, or at once without one.
        self._copies: deque[tuple[Tensor, torch.cuda.Event | None, tuple[str, ...]]] = deque()

    def push(self, vector: Tensor, paths: tuple[str, ...]) -> None:
        """Starts to copy the results of a step (n,), see `StepValues.unpack`. ``paths``: images of this rank's
        shard."""
        event = None
        if self._asynchronous:
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            vector = host
            event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning
            event.record()
        self._copies.append((vector, event, paths))

    def pop(self, *, leave: int = 1) -> list[StepValues]:
        """Returns the results of all steps but the newest ``leave``, oldest first."""
        results = []
        while len(self._copies) > leave:
            vector, event, paths = self._copies.popleft()
            if event is not None:
                event.synchronize()
            results.append(StepValues.unpack(vector.tolist(), paths))
        return results


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
        unwrapped = unwrap(self.model)
        # uint8 values are exact in float16 and bfloat16, so converting images early loses nothing.
        self._image_dtype = self.amp_dtype or next(unwrapped.parameters()).dtype
        self._statistics = float_buffers(unwrapped)
        self._norms = [module for module in unwrapped.modules() if isinstance(module, BatchNorm2d)]

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
            counts: number of images in each micro-batch, over all ranks.
            updates: optimizer steps, including this one.
            flags: requests of this rank; `reader` returns those of all ranks.
            samples: number of samples over all ranks; None: each image is one.
        """
        # The step follows the gradient of samples * loss / normalizer: the loss of a sample, scaled by the batch, as
        # YOLO's learning rates expect. The normalizer is known after the last shard only. Before, the loss is divided
        # by the number of images: float16 gradients stay in range, and DDP's division by its ranks is undone.
        num_images = sum(counts)
        loss_scale = self.strategy.ddp_divides_by / num_images
        old_statistics = flatten(self._statistics)
        totals: list[Tensor] = []
        for shard in self.strategy.shards(batches, counts):  # one, unless there are virtual ranks
            sums, total = self._accumulate_gradients(shard, counts, loss_scale)
            self.strategy.add_shard(torch.cat([sums, flags.to_tensor(sums)]))
            totals.append(total)
        sums, all_flags = self.strategy.reduce().tensor_split([-len(flags)])
        normalizer = sums[0].clamp(min=1)
        norm, nonfinite = self._scale_and_clip(num_images * (samples or num_images) / normalizer)
        self.optimizer.step(nonfinite)
        self.optimizer.zero_grad()
        self.scaler.update()
        if self._statistics:
            copy_from_flat(torch.where(nonfinite > 0, old_statistics, flatten(self._statistics)), self._statistics)
        self.ema.update(updates)
        local_finite = torch.stack(totals).sum().isfinite().to(norm)
        scalars = torch.stack([1 - nonfinite, local_finite, norm])
        values = torch.cat([scalars, all_flags.to(scalars), (sums[1:] / normalizer).to(scalars)])
        self.reader.push(values, paths=tuple(path for batch in batches for path in batch.paths))

    def _accumulate_gradients(
        self, batches: Sequence[Batch], counts: Sequence[int], loss_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Adds the gradients of a shard's micro-batches to ``.grad``; DDP sends them with the last one.

        Returns the sums over the micro-batches of the normalizer and the P parts of the loss (1 + P,), and of their
        total losses ().
        """
        totals: list[Tensor] = []
        loss_sums: list[Tensor] = []
        for number, (batch, count) in enumerate(zip(batches, counts)):
            is_last = number == len(batches) - 1
            sync = nullcontext() if is_last else self.strategy.without_gradient_sync()
            with sync, kernel_search(count == self.settings.benchmark_images):
                loss = self._forward_backward(batch, batch_images=count, loss_scale=loss_scale)
            totals.append(loss.total)
            loss_sums.append(torch.cat([loss.normalizer.reshape(1).to(loss.parts), loss.parts]))
            if number == 0 and not is_last and self.settings.compilation:
                self.settings.compilation.copy_gradients(self.optimizer.parameters)
        return torch.stack(loss_sums).sum(0), torch.stack(totals).sum()

    def _forward_backward(self, batch: Batch, *, batch_images: int, loss_scale: float) -> LossOutput:
        """Adds the gradients of one micro-batch, of ``batch_images`` over all ranks. Returns its loss, detached."""
        device = self.ctx.device
        compilation = self.settings.compilation
        batch = batch.to(device)
        images = to_float(batch.images, device, self._image_dtype, channels_last=True)
        with compilation.for_batch(images, batch_images) if compilation else nullcontext():
            raw = self.strategy.forward(images)
            loss = None if raw is None else self._loss(raw, images, batch.targets)
        self._count_batch()
        if loss is None:  # with --pipeline: the other process of the pair has the end of the model
            zero = images.new_zeros((), dtype=torch.float32)
            total = self.scaler.scale(zero)  # creates the scale that `unscale_` needs
            return LossOutput(total=total, normalizer=zero, parts=zero.new_zeros(len(self.criterion.names)))
        self.scaler.scale(loss.total * loss_scale).backward()
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

    def _scale_and_clip(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Multiplies the gradients by ``factor`` (), and clips them. Returns their norm before clipping () and a float
        () that is 1 if it is not finite."""
        # GradScaler is annotated to take torch's own optimizers, but reads only ``param_groups``.
        self.scaler.unscale_(cast(torch.optim.Optimizer, self.optimizer))
        if self.settings.skip_zero_grads:
            drop_zero_gradients(self.optimizer.parameters)
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) * factor
        factor = factor * (self.settings.clip_norm / (norm + 1e-6)).clamp(max=1)
        if gradients:
            torch._foreach_mul_(gradients, factor)
        return norm.float(), 1 - norm.isfinite().float()


@torch.no_grad()
def drop_zero_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sets gradients that are exactly zero to None, so that neither momentum nor weight decay changes those weights.
    It needs a host-device sync."""
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


def build_step(
    ctx: DistributedContext,
    settings: RunSettings,
    model: Detector,
    criterion: Criterion,
    steps: StepPlan,
    *,
    full_batch: int,
    has_regions: bool = False,
    loaded: LoadedParameters = NOTHING_LOADED,
) -> TrainStep:
    """Builds the step of a run, with the model wrapped for its devices and compiled. The settings are possible with
    these processes, and their optimizer is not ``auto``.

    Args:
        full_batch: images in any batch but the last one of an epoch, which may be smaller, over all ranks.
        has_regions: whether batches may have ignore regions (`Targets.ignore`).
        loaded: the parameters of the model that come from weights.
    """
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
    ema = ModelEma(model, tau=hyp.ema_tau)
    compilation = None
    if config.compile:
        shards = resolve_virtual_ranks(ctx, config) or ctx.world_size
        compilation = plan_compilation(config, ctx, images=full_batch, shards=shards, has_regions=has_regions)
    has_one_size = not (config.multi_scale or config.rect)
    # Each step of DataParallel has new threads, in which cuDNN would search again (pytorch#191744).
    may_search = has_one_size and not config.deterministic and len(ctx.devices) == 1
    searches = may_search and steps.planned_steps * steps.accumulate >= CUDNN_BENCHMARK_MIN_BATCHES
    step_settings = StepSettings(
        amp_dtype=broadcast_object(ctx, resolve_amp(config.amp, ctx.device)),
        skip_zero_grads=config.skip_zero_grads,
        compilation=compilation,
        benchmark_images=full_batch if searches else 0,
    )
    autocast = partial(step_settings.autocast, ctx.device)
    strategy = build_strategy(ctx, config, model, optimizer, autocast, accumulate=steps.accumulate)
    if compilation is not None:
        compilation.apply(model, criterion)
        sizes = "all image sizes" if compilation.dynamic else "one image size"
        get_logger().info("compiled for %s%s", sizes, ", with CUDA graphs" if compilation.cuda_graphs else "")
    return TrainStep(strategy, criterion, optimizer, ema, step_settings)


def build_strategy(
    ctx: DistributedContext,
    config: TrainConfig,
    model: Detector,
    optimizer: OptimizerSet,
    autocast: Autocast,
    *,
    accumulate: int = 1,
) -> Strategy:
    """Builds what computes the gradients of a step, with these processes and settings. ``accumulate``: micro-batches of
    a step."""
    virtual_ranks = resolve_virtual_ranks(ctx, config)
    if ctx.is_distributed or virtual_ranks:
        side = 2 * model.stride
        freeze_unused(model, next(model.parameters()).new_zeros(2, model.channels, side, side))
    trained = [parameter for parameter in optimizer.parameters if parameter.requires_grad]
    if config.pipeline > 1:
        return Pipeline(ctx, model, autocast, trained)
    if virtual_ranks:
        return VirtualRanks(ctx, model, autocast, trained, virtual_ranks)
    # torch.compile splits graphs at DDP's buckets, so DDP cannot treat them as static (pytorch#109261).
    static = accumulate == 1 and not config.compile
    return Strategy(ctx, parallelize(model, ctx, sync_bn=config.sync_bn, static=static), autocast)
