"""Collectives on objects and arrays, `torch_distributed_zero_first`, and functions for wrapped models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from utils.distributed.context import DistributedContext
from utils.distributed.store_barrier import StoreBarrier


@contextmanager
def torch_distributed_zero_first(ctx: DistributedContext) -> Iterator[None]:
    """The first process of each node runs the block, then the others do, using its results. All leave it together.

    Every process of the run must enter it. They wait at a `StoreBarrier`, so that no group timeout expires, however
    long a leader takes. If one raises, the others raise `PeerFailure`; if one dies, UserError.
    """
    if not ctx.is_distributed:
        yield
        return
    leader = ctx.rank - ctx.local_rank
    names = [f"process {rank}" for rank in range(ctx.world_size)]
    names[leader] = f"the first process of node {ctx.node_rank}"
    with StoreBarrier(ctx.store, f"zero_first/{next(ctx._turns)}", rank=ctx.rank, names=names) as barrier:
        if not ctx.is_node_leader:
            barrier.wait(f"node {ctx.node_rank} is ready", leader)
        yield
        if ctx.is_node_leader:
            barrier.set(f"node {ctx.node_rank} is ready")
        barrier.wait_all()


def gather_arrays(ctx: DistributedContext, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]] | None:
    """Every rank's arrays on rank 0, by rank; None on other ranks. Lengths may differ between ranks."""
    if not ctx.is_distributed:
        return [arrays]
    gathered: list[Any] | None = [None] * ctx.world_size if ctx.is_main else None
    dist.gather_object(arrays, gathered, dst=0)
    return gathered


def broadcast_object(ctx: DistributedContext, value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not ctx.is_distributed:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def max_over_ranks(ctx: DistributedContext, value: int) -> int:
    """The largest value of any rank, on every rank. Returns only after all ranks have called it."""
    if not ctx.is_distributed:
        return value
    box = torch.tensor([value])  # on the CPU, for which every group has gloo
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def all_objects(ctx: DistributedContext, value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank."""
    if not ctx.is_distributed:
        return [value]
    values: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(values, value)
    return values


def is_parallel(model: nn.Module) -> bool:
    """Whether ``model`` is wrapped in DataParallel or DistributedDataParallel."""
    return isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)


def unwrap(model: nn.Module) -> nn.Module:
    """The model without the wrappers DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        if is_parallel(model):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Sets the model to eval mode, and each module back to its former mode afterwards (frozen batch norms stay
    frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, training in modes:
            module.training = training
