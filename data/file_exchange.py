"""Reads items that every node needs only once per run, and broadcasts them.

Each item is read by one node leader. In rounds, the leaders broadcast the items that they have read to each other.
Before each round they wait at a `StoreBarrier`: collectives start only when all leaders hold the round's items in
memory and have stored those of the previous round, so a slow file system on one node causes no timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from utils.distributed.context import StoreBarrier
from utils.distributed.groups import Subgroup
from utils.machine.threads import map_ahead

# Bytes sent per round by all leaders together, and the limits per leader.
_ROUND_BYTES = 256 << 20
_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 16 << 20
_OPEN_COST_BYTES = 64 << 10  # bytes that could be read in the time it takes to open an item


def assign_readers(sizes: np.ndarray, cached: np.ndarray) -> list[np.ndarray]:
    """Returns the items that each leader reads and sends, ascending, by leader. See `exchange_items` for the arguments.

    An item that all leaders have is not read. An item that some leaders have is read by one of them, from its local
    disk. The other items are divided into contiguous runs of about equal size.
    """
    needed = np.flatnonzero(~cached.all(axis=0))
    cost = sizes[needed] + _OPEN_COST_BYTES
    candidates = (cached | ~cached.any(axis=0))[:, needed]  # bool (N, n): which leaders may read each item
    assigned = np.zeros(len(needed), np.int64)  # the leader that reads each item
    for may_read in np.unique(candidates, axis=1).T:  # bool (N,): items with the same candidates are divided among them
        items = (candidates == may_read[:, None]).all(axis=0)
        leaders = np.flatnonzero(may_read)
        # The midpoint of an item in the cumulative cost, from 0 to 1, determines its share.
        position = (np.cumsum(cost[items]) - cost[items] / 2) / cost[items].sum()
        share = np.minimum((position * len(leaders)).astype(np.int64), len(leaders) - 1)
        assigned[items] = leaders[share]
    return [needed[assigned == leader] for leader in range(len(cached))]


def exchange_items(
    sizes: np.ndarray,
    cached: np.ndarray,
    load: Callable[[int], bytes | memoryview],
    *,
    barrier: StoreBarrier,
    group: Subgroup,
    threads: int = 8,
) -> Iterator[tuple[int, memoryview]]:
    """Yields, on every leader, the number and bytes of each item that some leader lacks.

    Args:
        sizes: bytes of each item, int64 (F,), the same on all leaders.
        cached: whether each leader already has each item, bool (N, F), the same on all leaders.
        load: returns the content of an item; called in threads, for the items that this leader reads.
        barrier: barrier of the leaders, in the order of ``group``.

    Raises as `StoreBarrier.wait` does if another leader has failed, and any exception of ``load``.
    """
    chunk_bytes = int(np.clip(_ROUND_BYTES // group.group_size, _MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES))
    shards = assign_readers(sizes, cached)
    rank = group.group_rank
    read = map_ahead(load, shards[rank].tolist(), threads=threads)
    for round_ in zip_longest(*(_batches(items, sizes, chunk_bytes) for items in shards), fillvalue=()):
        buffers = [torch.empty(sum(int(sizes[item]) for item in items), dtype=torch.uint8) for items in round_]
        buffers[rank].numpy().data[:] = b"".join(next(read) for _ in round_[rank])
        barrier.wait()
        _send_round(buffers, group)
        for items, buffer in zip(round_, buffers):
            view = buffer.numpy().data
            for item in items:
                yield item, view[: sizes[item]]
                view = view[sizes[item] :]


def _batches(items: np.ndarray, sizes: np.ndarray, max_bytes: int) -> Iterator[list[int]]:
    """Yields ``items`` in lists of at most ``max_bytes``; a larger item gets its own list."""
    batch: list[int] = []
    total = 0
    for item, size in zip(items.tolist(), sizes[items].tolist()):
        if batch and total + size > max_bytes:
            yield batch
            batch = []
            total = 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _send_round(buffers: list[torch.Tensor], group: Subgroup) -> None:
    """Broadcasts each leader's buffer."""
    if group.group_size == 1:
        return
    broadcasts = [
        dist.broadcast(buffer, src=rank, group=group.handle, async_op=True)
        for rank, buffer in zip(group.ranks, buffers)
        if buffer.numel()
    ]
    for work in broadcasts:
        if work is not None:  # None on a process outside the group
            work.wait()
