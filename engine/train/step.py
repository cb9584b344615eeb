"""One optimizer step: forward, backward, one division by the global normalizer, update.

The host does not wait for the device: a non-finite step is skipped there, and logged values are read one step later.
Only ``--skip-zero-grads`` makes it wait, once a step, to learn which gradients are zero (`drop_zero_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from engine.optim.ema import ModelEma
from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers
from engine.optim.optimizer_set import OptimizerSet
from engine.parallel.step_values import NO_FLAGS, DelayedReader, DeviceValues, StepFlags, StepSums
from engine.parallel.strategy import Strategy
from engine.train.compile import Compilation
from models.detector import Detector
from models.layers.conv import BatchNorm2d
from models.losses.base import Criterion, LossOutput
from models.modules import unwrap
from utils.batches import Batch, Targets, to_float


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of the computation of a step."""

    amp_dtype: torch.dtype | None = None  # type of autocast; None: no autocast
    clip_norm: float = 0.0  # the largest norm of the gradients; 0: they are not clipped
    skip_zero_grads: bool = False  # see `drop_zero_gradients`
    compilation: Compilation | None = None  # None: nothing is compiled
    benchmark_images: int = 0  # batch size for which ``cudnn.benchmark`` is on, over all ranks; 0: it is off

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.amp_dtype, enabled=self.amp_dtype is not None)


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
            counts: number of images in each micro-batch, over all ranks.
            updates: optimizer steps, including this one.
            flags: requests of this rank; `reader` returns those of all ranks.
            samples: number of samples over all ranks; None: each image is one.
        """
        old_statistics = flatten(self._statistics)
        totals: list[Tensor] = []
        for shard in self.strategy.shards(batches, counts):  # one, unless there are virtual ranks
            shard_sums, total = self._accumulate_gradients(shard, counts, flags)
            self.strategy.add_shard(shard_sums.pack())
            totals.append(total)
        sums = StepSums.unpack(self.strategy.reduce())
        num_images = sum(counts)
        norm, nonfinite = self._scale_and_clip(sums.normalizer, num_images, samples or num_images)
        self.optimizer.step(nonfinite)
        self.optimizer.zero_grad()
        self.scaler.update()
        self._restore_statistics(old_statistics, nonfinite)
        self.ema.update(updates)
        values = DeviceValues(
            finite=1 - nonfinite,
            local_finite=torch.stack(totals).sum().isfinite().to(norm),
            grad_norm=norm,
            flags=sums.flags,
            losses=sums.parts / sums.normalizer.clamp(min=1),
        )
        self.reader.push(values, paths=tuple(path for batch in batches for path in batch.paths))

    def _restore_statistics(self, old: Tensor, nonfinite: Tensor) -> None:
        """Restores the ``old`` running statistics if ``nonfinite`` () is 1."""
        if self._statistics:
            copy_from_flat(torch.where(nonfinite > 0, old, flatten(self._statistics)), self._statistics)

    def _accumulate_gradients(
        self, batches: Sequence[Batch], counts: Sequence[int], flags: StepFlags
    ) -> tuple[StepSums, Tensor]:
        """Adds the gradients of a shard's micro-batches to ``.grad``; DDP sends them with the last one.

        Returns the sums over the micro-batches, and the sum of their total losses ().
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
        sums = StepSums(normalizer=summed[0], parts=summed[1:], flags=flags.as_counts(summed))
        return sums, torch.stack(totals).sum()

    def _forward_backward(self, batch: Batch, *, batch_images: int, step_images: int) -> LossOutput:
        """Adds the gradients of one micro-batch. Returns its loss, detached.

        Args:
            batch_images: number of images in the micro-batch over all ranks.
            step_images: number of images in the step over all ranks.
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
            total = self.scaler.scale(zero)  # creates the scale that `unscale_` needs
            return LossOutput(total=total, normalizer=zero, parts=zero.new_zeros(len(self.criterion.names)))
        # DDP averages gradients over shards, but their sum is needed. Dividing by the images keeps float16 gradients in
        # range until the real normalizer is known, after the last shard; `_scale_and_clip` undoes it.
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
        # GradScaler is annotated to take torch's own optimizers, but reads only ``param_groups``.
        self.scaler.unscale_(cast(torch.optim.Optimizer, self.optimizer))
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
    The host waits for the device to find them."""
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
