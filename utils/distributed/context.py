"""The rank and device of this process, created once and passed on, and collectives on objects and arrays."""

from __future__ import annotations

import gc
import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from utils.distributed.store_barrier import StoreBarrier
from utils.errors import Stopped
from utils.machine.devices import make_current

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """A process's position in the run, and the devices that it uses (`utils.distributed.rendezvous.join_run`)."""

    rank: int = 0
    local_rank: int = -1  # -1: there is no process group
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device
    devices: tuple[torch.device, ...]  # more than one only for DataParallel in a single process
    backend: str = ""  # "" when there is no process group
    store: dist.Store | None = field(default=None, repr=False, compare=False)
    launcher_identity: str = ""  # of the torchrun process that started this one, on any machine; "" without
    eval_ranks: int = 0  # number of processes outside this group that validate for it
    first_rank: int = 0  # rank of this group's first process in the run; not 0 if the group validates for another
    # Numbers the barriers of this module, whose keys in the store must differ.
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.local_rank >= 0

    @property
    def is_node_leader(self) -> bool:
        return self.local_rank in (-1, 0)

    @staticmethod
    def single(device: torch.device | str = "cpu") -> DistributedContext:
        """Creates the context of a single-process run on one device."""
        device = torch.device(device)
        make_current(device)
        return DistributedContext(device=device, devices=(device,))

    def close(self) -> None:
        """Leaves the process group."""
        # If something (such as a DDP model) keeps gloo's threads alive, one of them can release a tensor while the
        # interpreter exits, which aborts the process.
        if self.is_distributed and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Leaves the process group after the block, including after `Stopped`, but not after a failure: an orderly exit
        would wait for a collective that may still be running."""
        try:
            yield
        except Stopped as stop:
            traceback.clear_frames(stop.__traceback__)
            self.close()
            raise
        self.close()


@contextmanager
def torch_distributed_zero_first(ctx: DistributedContext) -> Iterator[None]:
    """Runs the block on the first process of *each node* (not only on rank 0, despite the name), then on the other
    processes, which use its results. All processes enter and leave it as in `leaving_together`."""
    is_ready = f"node {ctx.node_rank} is ready"
    with leaving_together(ctx) as barrier:
        if not ctx.is_node_leader:
            barrier.wait(is_ready, ctx.rank - ctx.local_rank)
        yield
        if ctx.is_node_leader:
            barrier.set(is_ready)


@contextmanager
def leaving_together(ctx: DistributedContext) -> Iterator[StoreBarrier]:
    """Runs the block on all processes at once, which leave it together. Yields the barrier at which they wait.

    Every process of the run must enter the block. No group timeout expires, however long one needs for it. If a process
    raises, the others raise `PeerFailure`; if one dies, they raise PeerLost. The block precedes a collective where the
    work of the processes may take long, or fail in some of them.
    """
    rank = 0
    names = ["process 0"]  # without a process group, there is nobody to wait for
    if ctx.is_distributed:
        rank = ctx.rank
        names = [f"process {ctx.first_rank + number}" for number in range(ctx.world_size)]
        names[ctx.rank - ctx.local_rank] = f"the first process of node {ctx.node_rank}"
    title = f"together/{next(ctx._turns)}"
    with StoreBarrier(ctx.store, title, rank=rank, names=names, group_ranks=range(len(names))) as barrier:
        yield barrier
        barrier.wait_all()


def gather_arrays(ctx: DistributedContext, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]] | None:
    """Gathers every rank's arrays on rank 0, in rank order. Returns None on other ranks. Lengths may differ."""
    if not ctx.is_distributed:
        return [arrays]
    gathered: list[Any] | None = [None] * ctx.world_size if ctx.is_main else None
    dist.gather_object(arrays, gathered, dst=0)
    return gathered


def broadcast_object(ctx: DistributedContext, value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    if not ctx.is_distributed:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def result_of_main(ctx: DistributedContext, decide: Callable[[], T]) -> T:
    """Calls ``decide`` on rank 0 only, and returns its result on every rank. If it raises, the other ranks raise
    `PeerFailure`."""
    results = []
    with torch_distributed_zero_first(ctx):
        if ctx.is_main:
            results.append(decide())
    return broadcast_object(ctx, results)[0]


def max_over_ranks(ctx: DistributedContext, value: int) -> int:
    """All-reduces ``value`` to its maximum over ranks. Returns only after all ranks have called it."""
    if not ctx.is_distributed:
        return value
    largest = torch.tensor([value])  # on the CPU, because every process group has gloo
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def min_over_ranks(ctx: DistributedContext, value: int) -> int:
    """All-reduces ``value`` to its minimum over ranks. Returns only after all ranks have called it."""
    return -max_over_ranks(ctx, -value)


def all_objects(ctx: DistributedContext, value: Any) -> list[Any]:
    """Gathers every rank's value on every rank, in rank order."""
    if not ctx.is_distributed:
        return [value]
    values: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(values, value)
    return values


def shard_bounds(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the contiguous shard [start, end) of ``count`` items for a rank. Shard sizes differ by at most one. With
    2k ranks, each shard of k ranks is split in two."""
    return rank * count // world_size, (rank + 1) * count // world_size
