"""Strategies that compute the gradients of a step: plain data parallelism here; virtual ranks and pipelines subclass
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.batches import Batch
from utils.distributed.context import DistributedContext

Autocast = Callable[[], AbstractContextManager[Any]]


class Strategy:
    """Plain data parallelism: a process computes its shard of the batch, and DDP, if it wraps the model, adds the
    gradients. Subclasses change which shards of a step a process computes, and how they are combined.

    A step computes one shard after another, then reduces:

        for shard in strategy.shards(batches, counts):
            ...  # for each micro-batch: `forward`, loss, backward
            strategy.add_shard(sums)
        sums = strategy.reduce()

    Attributes:
        model: on its device, wrapped in DDP or DataParallel if needed.
        autocast: returns the context of forward passes.
        ddp_divides_by: DDP's divisor of the sum of the gradients; the loss is multiplied by it.
    """

    def __init__(self, ctx: DistributedContext, model: nn.Module, autocast: Autocast) -> None:
        self.ctx = ctx
        self.model = model
        self.autocast = autocast
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        self.ddp_divides_by = ctx.world_size if is_ddp else 1

    def shards(self, batches: Sequence[Batch], counts: Sequence[int]) -> Iterator[Sequence[Batch]]:
        """Yields the micro-batches of each shard of the step that this process computes.

        Args:
            batches: this process's micro-batches; any may be empty.
            counts: images of each micro-batch over all ranks.
        """
        yield batches

    def add_shard(self, sums: Tensor) -> None:
        """Adds a shard, whose gradients are in ``.grad``. ``sums``: see `TrainStep`, over its micro-batches (n,)."""
        self._sums = sums

    def reduce(self) -> Tensor:
        """Leaves the total gradients of the step in ``.grad``, equal on all ranks, and returns the sums over them."""
        return all_reduce_sum(self.ctx, self._sums)

    def forward(self, images: Tensor) -> list[Tensor] | None:
        """Returns the raw maps of a micro-batch; None if another process computes the maps and the loss."""
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
