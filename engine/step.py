"""One optimiser step: forward, backward, one division by the global normaliser, update. Nothing here waits for the
device: a non-finite step is skipped on the device, and what is logged is read a step later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.ema import ModelEma
from engine.optim import OptimizerSet
from engine.parallel import all_reduce_sum, copy_flat, without_gradient_sync
from utils.distributed import DistributedContext, unwrap
from utils.structures import Batch


@dataclass(frozen=True, slots=True)
class StepValues:
    """What one step gave, on the host."""

    finite: bool  # gradients of the global batch; False: the step was skipped
    share_finite: bool  # this rank's own loss
    grad_norm: float  # before clipping
    losses: tuple[float, ...]  # the criterion's parts over the global batch, normalised
    paths: tuple[str, ...]  # images of this rank's share
    images: int  # in the global batch


class DelayedReader:
    """Device values for the host, one step late: the copy is under way while the next step is being queued."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._pending: deque = deque()

    def push(self, values: Tensor, paths: tuple[str, ...], images: int) -> None:
        if self._asynchronous:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = values, None
        self._pending.append((host, event, paths, images))

    def pop(self, *, leave: int = 1) -> list[StepValues]:
        """All but the newest ``leave`` steps, oldest first."""
        ready = []
        while len(self._pending) > leave:
            host, event, paths, images = self._pending.popleft()
            if event is not None:
                event.synchronize()
            finite, share_finite, norm, *losses = host.tolist()
            ready.append(StepValues(finite > 0, share_finite > 0, norm, tuple(losses), paths, images))
        return ready


class TrainStep:
    """Holds what a step needs; calling it with the micro-batches of one step takes the step."""

    def __init__(
        self,
        *,
        model: nn.Module,
        criterion: Callable[[list[Tensor], Tensor, int], object],
        optimizer: OptimizerSet,
        ema: ModelEma,
        ctx: DistributedContext,
        amp_dtype: torch.dtype | None,
        clip_norm: float,
        channels_last: bool,
    ) -> None:
        self.model, self.criterion, self.optimizer, self.ema = model, criterion, optimizer, ema
        self.ctx, self.amp_dtype, self.clip_norm = ctx, amp_dtype, clip_norm
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.scaler = torch.amp.GradScaler(ctx.device.type, enabled=amp_dtype is torch.float16)
        self.reader = DelayedReader(ctx.device)
        self._bare = unwrap(model)
        self._statistics = [b for b in self._bare.buffers() if b.is_floating_point()]

    def __call__(self, batches: Sequence[Batch], global_images: int, updates: int) -> None:
        """Takes one optimiser step.

        Args:
            batches: this rank's micro-batches; any may be empty.
            global_images: images of the step over all ranks and micro-batches.
            updates: optimiser steps taken, this one included.
        """
        before = torch.cat([b.reshape(-1) for b in self._statistics]) if self._statistics else None
        sums: Tensor | None = None
        share_total: Tensor | None = None
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else without_gradient_sync(self.model):
                total, partial = self._forward_backward(batch, global_images)
            sums = partial if sums is None else sums + partial
            share_total = total if share_total is None else share_total + total
        assert sums is not None
        assert share_total is not None
        all_reduce_sum(self.ctx, sums)
        losses = sums[1:] / sums[0].clamp(min=1)
        norm, bad = self._scale_and_clip(sums[0], global_images)
        self.optimizer.skip = bad
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if before is not None:
            self._restore_statistics(before, bad)
        self.ema.update(self._bare, updates)
        values = torch.cat([torch.stack([1 - bad, share_total.isfinite().float(), norm]), losses])
        self.reader.push(values, tuple(path for batch in batches for path in batch.paths), global_images)

    def _forward_backward(self, batch: Batch, global_images: int) -> tuple[Tensor, Tensor]:
        """Adds one micro-batch's gradient. Returns its total () and its sums: normaliser, then parts."""
        batch = batch.to(self.ctx.device)
        images = batch.images.to(memory_format=self.memory_format).float() / 255
        with torch.autocast(self.ctx.device.type, self.amp_dtype, enabled=self.amp_dtype is not None):
            raw = self.model(images)
        out = self.criterion(raw, batch.targets, batch.max_targets)
        # DDP averages over ranks, the gradient wants the sum. Dividing by the images keeps float16 gradients in range
        # until the real normaliser is known, after the last share.
        share = out.total * (self.ctx.world_size / global_images)
        self.scaler.scale(share).backward()
        return out.total.detach(), torch.cat([out.normaliser.detach().reshape(1), out.parts]).float()

    def _scale_and_clip(self, normaliser: Tensor, global_images: int) -> tuple[Tensor, Tensor]:
        """Gradients become those of ``images * total / normaliser`` (the loss scaled by the batch, as YOLO's learning
        rates expect), clipped. Returns their norm before clipping and a float that is 1 if it is not finite."""
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        factor = global_images**2 / normaliser.clamp(min=1)
        norm = torch.nn.utils.get_total_norm(gradients) * factor
        if self.clip_norm > 0:
            factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, factor)
        return norm.float(), 1 - norm.isfinite().float()

    @torch.no_grad()
    def _restore_statistics(self, before: Tensor, bad: Tensor) -> None:
        after = torch.cat([b.reshape(-1) for b in self._statistics])
        copy_flat(torch.where(bad > 0, before, after), self._statistics)
