"""One optimiser step: forward, backward, one division by the global normaliser, update. Nothing here waits for the
device: a non-finite step is skipped on the device, and what is logged is read a step later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.optim.build import OptimizerSet
from engine.optim.ema import ModelEma
from engine.parallel.compile import UNCOMPILED, Compilation
from engine.parallel.ddp import all_reduce_sum, without_gradient_sync
from engine.parallel.virtual_ranks import SubtreeSum, sum_over_processes
from utils.distributed.collectives import unwrap
from utils.distributed.context import DistributedContext
from utils.distributed.groups import shard_bounds
from utils.flat_tensors import copy_from_flat, flatten, flatten_as, float_buffers, views_as
from utils.structures import Batch, LossOutput


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
    losses: tuple[float, ...]  # the criterion's parts over the global batch, normalised
    paths: tuple[str, ...]  # images of this rank's shard
    flags: StepFlags  # of all ranks, when the step began


NO_FLAGS = StepFlags()


class DelayedReader:
    """Device values for the host, one step late: the copy is under way while the next step is being queued."""

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
    """Holds what a step needs; calling it with the micro-batches of one step takes the step.

    With ``virtual_ranks`` 0 this process's micro-batches are one shard of the step, and DDP adds the gradients.
    Otherwise every global micro-batch is cut into that many shards, each with its own batch statistics; gradients,
    normalisers and running statistics are added in the order of one tree, so the bits do not depend on how many
    processes the shards are spread over. The model is then not wrapped, and the number of processes is a power of two.
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
        skip_zero_grads: bool = False,
        compilation: Compilation = UNCOMPILED,
    ) -> None:
        self.model, self.criterion, self.optimizer, self.ema = model, criterion, optimizer, ema
        self.ctx, self.amp_dtype, self.clip_norm = ctx, amp_dtype, clip_norm
        self.virtual_ranks, self.skip_zero_grads, self.compilation = virtual_ranks, skip_zero_grads, compilation
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.scaler = torch.amp.GradScaler(ctx.device.type, enabled=amp_dtype is torch.float16)
        self.reader = DelayedReader(ctx.device)
        self._bare = unwrap(model)
        self._statistics = float_buffers(self._bare)
        self._counters = [b for b in self._bare.buffers() if not b.is_floating_point()]  # of batches that norms saw
        self._averaged_over = ctx.world_size if isinstance(model, nn.parallel.DistributedDataParallel) else 1

    def __call__(
        self, batches: Sequence[Batch], pictures: Sequence[int], updates: int, flags: StepFlags = NO_FLAGS
    ) -> None:
        """Takes one optimiser step.

        Args:
            batches: this rank's micro-batches; any may be empty.
            pictures: images of each micro-batch over all ranks.
            updates: optimiser steps taken, this one included.
            flags: of this rank; those of all come back with the step's values.
        """
        before = flatten(self._statistics)
        gradients_of = self._gradients_by_tree if self.virtual_ranks else self._gradients_by_ddp
        sums, local_total = gradients_of(batches, pictures, flags)
        sums, flag_sums = sums[: -len(flags)], sums[-len(flags) :]
        losses = sums[1:] / sums[0].clamp(min=1)
        norm, bad = self._scale_and_clip(sums[0], sum(pictures))
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

    def _gradients_by_ddp(
        self, batches: Sequence[Batch], pictures: Sequence[int], flags: StepFlags
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the step's total into ``.grad``, equal on all ranks.

        Returns sums (1 + P + A,) over the step: normaliser, then parts, then flags; and () this rank's own total.
        """
        totals, sums = zip(*self._accumulate(batches, pictures))
        return all_reduce_sum(self.ctx, append_flags(torch.stack(sums).sum(0), flags)), torch.stack(totals).sum()

    def _gradients_by_tree(
        self, batches: Sequence[Batch], pictures: Sequence[int], flags: StepFlags
    ) -> tuple[Tensor, Tensor]:
        """As `_gradients_by_ddp`, by virtual ranks: each takes its shard of every micro-batch, one after another."""
        per_process = self.virtual_ranks // self.ctx.world_size
        start, counted = flatten(self._statistics), flatten(self._counters)
        tree, totals = SubtreeSum(), []
        parameters = self.optimizer.parameters
        for virtual in range(self.ctx.rank * per_process, (self.ctx.rank + 1) * per_process):
            copy_from_flat(start, self._statistics)
            copy_from_flat(counted, self._counters)
            shards = []
            for batch, count in zip(batches, pictures):
                first, last = shard_bounds(count, virtual, self.virtual_ranks)
                offset, _ = shard_bounds(count, self.ctx.rank, self.ctx.world_size)
                shards.append(batch.shard(first - offset, last - offset))
            outcomes = self._accumulate(shards, pictures)
            sums = append_flags(torch.stack([s for _, s in outcomes]).sum(0), flags)
            totals += [total for total, _ in outcomes]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            rest = [sums.to(gradients[0]), flatten(self._statistics).to(gradients[0])]
            tree.add(torch.cat([*flatten_as(gradients, parameters), *rest]))
            self.optimizer.zero_grad()
        flat = sum_over_processes(self.ctx, tree.total())
        for parameter, gradient in zip(parameters, views_as(flat, parameters)):
            parameter.grad = gradient
        size = sum(p.numel() for p in parameters)
        sums, statistics = flat[size : size + len(sums)], flat[size + len(sums) :]
        copy_from_flat((statistics / self.virtual_ranks).to(start), self._statistics)
        return sums, torch.stack(totals).sum()

    def _accumulate(self, batches: Sequence[Batch], pictures: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Adds up the gradients of a step's micro-batches, which DDP sends with the last. Returns each one's total ()
        and its sums: normaliser, then parts."""
        outcomes = []
        for number, (batch, count) in enumerate(zip(batches, pictures)):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else without_gradient_sync(self.model):
                outcomes.append(self._forward_backward(batch, count, sum(pictures)))
            if number == 0 and not is_last:
                self.compilation.own_gradients(self.optimizer.parameters)
        return outcomes

    def _forward_backward(self, batch: Batch, batch_images: int, step_images: int) -> tuple[Tensor, Tensor]:
        """One of `_accumulate`, of ``batch_images`` over all ranks."""
        batch = batch.to(self.ctx.device)
        # Bytes are exact in any of these types, and so is what autocast would make of their quotients later.
        dtype = self.amp_dtype or next(self._bare.parameters()).dtype
        images = batch.images.to(memory_format=self.memory_format).to(dtype) / 255
        autocast = torch.autocast(self.ctx.device.type, self.amp_dtype, enabled=self.amp_dtype is not None)
        with self.compilation.forward(batch_images), autocast:
            raw = self.model(images)
        out = self.criterion(raw, batch.targets, batch.max_targets, batch.host_targets)
        # DDP averages over ranks, the gradient wants the sum. Dividing by the images keeps float16 gradients in range
        # until the real normaliser is known, after the last shard.
        loss = out.total * (self._averaged_over / step_images)
        self.scaler.scale(loss).backward()
        return out.total.detach(), torch.cat([out.normaliser.detach().reshape(1).to(out.parts), out.parts])

    def _scale_and_clip(self, normaliser: Tensor, global_images: int) -> tuple[Tensor, Tensor]:
        """Gradients become those of ``images * total / normaliser`` (the loss scaled by the batch, as YOLO's learning
        rates expect), clipped. Returns their norm before clipping and a float that is 1 if it is not finite."""
        self.scaler.unscale_(self.optimizer)
        if self.skip_zero_grads:
            drop_zero_gradients(self.optimizer.parameters)
        gradients = [p.grad for p in self.optimizer.parameters if p.grad is not None]
        factor = global_images**2 / normaliser.clamp(min=1)
        norm = torch.nn.utils.get_total_norm(gradients) * factor
        if self.clip_norm > 0:
            factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1)
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
