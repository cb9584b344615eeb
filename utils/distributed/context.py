"""The rank and device of this process, created once and passed on; barriers on the run's store, and collectives on
objects and arrays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from utils.errors import PeerFailure, PeerLost, Stopped, first_line
from utils.machine.devices import make_current

Made = TypeVar("Made")
MAX_WAIT_S = 6 * 3600.0  # for the work of another process, such as the scan of a large data set
_MAX_POLL_S = 0.05
_READ_S = 1.0  # time for the others to read why this process fails, before the store may end with it


@dataclass(frozen=True, kw_only=True)
class DistributedContext:
    """A process's position in the run, and the devices that it uses (`utils.distributed.join.join_run`)."""

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


@contextmanager
def torch_distributed_zero_first(ctx: DistributedContext) -> Iterator[None]:
    """Runs the block on the first process of *each node* (not only on rank 0, despite the name), then on the others,
    which use its results. All processes leave it together, so that no collective waits for one that still works.

    Raises as `StoreBarrier.wait` does.
    """
    node = f"node {ctx.node_rank}"
    with StoreBarrier(ctx.store, f"zero_first/{next(ctx._turns)}", ctx.world_size) as barrier:
        if not ctx.is_node_leader:
            barrier.wait_for(node)
        yield
        if ctx.is_node_leader:
            barrier.set(node)
        barrier.wait()


def once_per_node(ctx: DistributedContext, make: Callable[[], Made]) -> Made:
    """Returns on all processes of a node what ``make`` returns on its first one. Raises as `StoreBarrier.wait` does."""
    made: Any = None
    with torch_distributed_zero_first(ctx):
        if ctx.is_node_leader:
            made = make()
    leaders = [item for item in all_objects(ctx, (ctx.is_node_leader, ctx.node_rank, made)) if item[0]]
    return next(value for _, node, value in leaders if node == ctx.node_rank)


class StoreBarrier:
    """A context in which ``size`` processes wait for each other at the run's store: for hours (`MAX_WAIT_S`), whereas a
    collective ends with the timeout of its group. If one of them raises, so do those that wait.

    Args:
        store: None in a single process, which never waits.
        title: the same in all processes, and unique within the run.
    """

    def __init__(self, store: dist.Store | None, title: str, size: int) -> None:
        self._store = None if store is None else dist.PrefixStore(f"barrier/{title}", store)
        self._size = size
        self._rounds = 0

    def __enter__(self) -> StoreBarrier:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._store is None or error is None or isinstance(error, PeerFailure):
            return
        code = str(error.code) if isinstance(error, Stopped) else ""
        with suppress(dist.DistError):  # the store is gone, and with it the processes that would read this
            self._store.set("failed", f"{code}:{first_line(error)}")
            time.sleep(_READ_S)

    def wait(self) -> None:
        """Waits until all processes have called this as often as this one.

        Raises PeerFailure if another process has failed, `Stopped` if a signal has stopped it, and PeerLost if the
        store has ended with its process, or after `MAX_WAIT_S`.
        """
        if self._store is not None:
            self._rounds += 1
            self._store.add(f"arrived/{self._rounds}", 1)
            self._wait_until(lambda store: store.add(f"arrived/{self._rounds}", 0) >= self._size)

    def set(self, key: str) -> None:
        """Ends the `wait_for` of other processes for ``key``."""
        if self._store is not None:
            self._store.set(f"key/{key}", "")

    def wait_for(self, key: str) -> None:
        """Waits until a process has `set` ``key``. Raises as `wait` does."""
        self._wait_until(lambda store: store.check([f"key/{key}"]))

    def _wait_until(self, is_done: Callable[[dist.Store], bool]) -> None:
        store = self._store
        assert store is not None, "a single process waits for nobody"
        deadline = time.monotonic() + MAX_WAIT_S
        pause_s = 0.001
        try:
            while not is_done(store):  # polled: a signal could not interrupt `Store.wait`
                if store.check(["failed"]):
                    code, _, reason = store.get("failed").decode().partition(":")
                    raise Stopped(int(code)) if code else PeerFailure(reason)
                if time.monotonic() > deadline:
                    raise PeerLost(f"another process of this run has not answered for {MAX_WAIT_S / 3600:.0f} hours")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_POLL_S * max(1.0, self._size / 32))  # bounds the load of the store
        except dist.DistError:
            raise PeerLost("process 0 of this run, or its launcher, has ended") from None


def gather_on_main(ctx: DistributedContext, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]] | None:
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


def max_over_ranks(ctx: DistributedContext, value: int) -> int:
    """All-reduces ``value`` to its maximum over ranks. Returns only after all ranks have called it."""
    if not ctx.is_distributed:
        return value
    largest = torch.tensor([value])  # on the CPU, because every process group has gloo
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


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
