"""How the gradients of a step come about: the plain strategy, of which virtual ranks and pipelines are others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.distributed.context import DistributedContext
from utils.structures import Batch

# Adds the gradients of micro-batches to ``.grad``; returns their packed `StepSums` (n,) and the sum of their losses ().
Accumulate = Callable[[Sequence[Batch]], tuple[Tensor, Tensor]]
Autocast = Callable[[], AbstractContextManager[Any]]


class Strategy:
    """Plain data parallelism: a process computes its shard of the batch, and DDP, if it wraps the model, adds the
    gradients. Subclasses change which part of a step a process computes, and how the parts become one step.

    Attributes:
        model: on its device, wrapped for it.
        autocast: makes the context of forward passes.
        ddp_divides_by: what DDP divides the sum of the gradients by; the loss is multiplied by it.
    """

    def __init__(self, ctx: DistributedContext, model: nn.Module, autocast: Autocast) -> None:
        self.ctx = ctx
        self.model = model
        self.autocast = autocast
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        self.ddp_divides_by = ctx.world_size if is_ddp else 1

    def compute_gradients(
        self, batches: Sequence[Batch], counts: Sequence[int], accumulate: Accumulate
    ) -> tuple[Tensor, Tensor]:
        """Leaves the gradients of the step's total in ``.grad``, equal on all ranks.

        Args:
            batches: this process's micro-batches; any may be empty.
            counts: images of each micro-batch over all ranks.
            accumulate: called for each part of the step that this process computes.

        Returns the sums over all ranks, and the total of this rank.
        """
        sums, total = accumulate(batches)
        return all_reduce_sum(self.ctx, sums), total

    def forward(self, images: Tensor) -> list[Tensor] | None:
        """Returns the raw maps of a micro-batch; None if another process computes them, and the loss."""
        with self.autocast():
            return self.model(images)

    def without_gradient_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which DDP does not send gradients: they are accumulated locally."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()


@torch.no_grad()
def all_reduce_sum(ctx: DistributedContext, tensor: Tensor) -> Tensor:
    """Sums ``tensor`` over all ranks in place, and returns it."""
    if ctx.is_distributed:
        dist.all_reduce(tensor)
    return tensor
