"""Reads items that every node needs once in the whole run, and broadcasts them.

Each item is read by one of the node leaders, which send each other what they have read, in rounds of bounded chunks.
Before each round they wait at a `StoreBarrier`. So its collectives start when all leaders have their chunk in memory
and the chunks of the last round on disk, and a slow file system on one node causes no timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from utils.distributed.groups import Subgroup
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError, first_line
from utils.machine.threads import map_ahead

_MIN_CHUNK, _MAX_CHUNK, _ROUND = 1 << 20, 16 << 20, 256 << 20  # bytes a leader, and of all leaders, in a round
_COST_OF_ONE = 64 << 10  # bytes that could be read in the time that opening an item takes


class Piece(NamedTuple):
    """A part of an item, as large as fits into a chunk."""

    item: int
    data: memoryview
    is_last: bool


def assign(sizes: np.ndarray, cached: np.ndarray) -> list[np.ndarray]:
    """The items that each leader reads and sends, ascending, by leader.

    An item that all leaders have is not read. An item that some leaders have is read by one of them, from its own
    disk. The rest are cut into contiguous runs of about equal size.

    Args:
        sizes: bytes of each item, int64 (F,).
        cached: whether each leader already has each item, bool (N, F).
    """
    leaders = len(cached)
    needed = np.flatnonzero(~cached.all(axis=0))
    shards: list[list[np.ndarray]] = [[] for _ in range(leaders)]
    if len(needed) == 0:
        return [needed] * leaders
    patterns, which = np.unique(cached[:, needed], axis=1, return_inverse=True)
    for number in range(patterns.shape[1]):
        items = needed[which.reshape(-1) == number]
        readers = np.flatnonzero(patterns[:, number]) if patterns[:, number].any() else np.arange(leaders)
        cost = sizes[items] + _COST_OF_ONE
        middle = np.cumsum(cost) - cost / 2
        part = (middle * len(readers) / cost.sum()).astype(np.int64)
        for index, reader in enumerate(readers):
            shards[reader].append(items[part == index])
    return [np.sort(np.concatenate([np.empty(0, np.int64), *parts])) for parts in shards]


def exchange_items(
    sizes: np.ndarray,
    cached: np.ndarray,
    load: Callable[[int], Iterable[bytes | memoryview]],
    *,
    barrier: StoreBarrier,
    group: Subgroup,
    threads: int = 8,
) -> Iterator[Piece]:
    """Yields, on every leader, the pieces of all items that some leader lacks. Pieces of an item are in order.

    Args:
        sizes: bytes of each item, int64 (F,), the same on all leaders.
        cached: whether each leader already has each item, bool (N, F), the same on all leaders.
        load: returns the buffers of an item; called in threads, for the items that this leader reads.
        barrier: of the leaders, in the group's order.
        group: the leaders.
        threads: number of reading threads.

    Raises:
        ValueError: an item of this leader does not have its size. What ``load`` raises is raised, too.
        UserError: a leader is gone.
        PeerFailure: another leader failed.
    """
    chunk = int(np.clip(_ROUND // group.group_size, _MIN_CHUNK, _MAX_CHUNK))
    shards = assign(sizes, cached)
    outbox = _chunks(_stream(shards[group.local_group_rank], sizes, load, threads), chunk)
    for round_ in zip_longest(*(_cut(items, sizes, chunk) for items in shards), fillvalue=()):
        buffers = [torch.empty(sum(length for _, length, _ in parts), dtype=torch.uint8) for parts in round_]
        if len(buffers[group.local_group_rank]):
            buffers[group.local_group_rank] = next(outbox)
        barrier.wait_all()
        _send_round(buffers, group, barrier)
        for parts, buffer in zip(round_, buffers):
            view = memoryview(buffer.numpy())
            for item, length, is_last in parts:
                yield Piece(item, view[:length], is_last)
                view = view[length:]
    next(outbox, None)  # reads empty items at the end, too


def _cut(items: np.ndarray, sizes: np.ndarray, chunk: int) -> Iterator[list[tuple[int, int, bool]]]:
    """The parts of each round of a leader that sends ``items``: item, number of bytes, and whether it is the last one.
    Every round but the last has ``chunk`` bytes."""
    parts, room = [], chunk
    for item, left in zip(items.tolist(), sizes[items].tolist()):
        while left > room:
            yield [*parts, (item, room, False)]
            left, parts, room = left - room, [], chunk
        parts.append((item, left, True))
        room -= left
    if parts:
        yield parts


def _send_round(buffers: list[torch.Tensor], group: Subgroup, barrier: StoreBarrier) -> None:
    if group.group_size == 1:
        return
    try:
        sent = [
            dist.broadcast(buffer, src=rank, group=group.handle, async_op=True)
            for rank, buffer in zip(group.ranks, buffers)
            if buffer.numel()
        ]
        for work in sent:
            work.wait()
    except RuntimeError as error:
        barrier.check()
        raise UserError(f"lost contact with another node: {first_line(error)}") from None


def _stream(
    items: np.ndarray, sizes: np.ndarray, load: Callable[[int], Iterable[bytes | memoryview]], threads: int
) -> Iterator[memoryview]:
    for item, buffers in zip(items, map_ahead(load, map(int, items), threads=threads)):
        left = int(sizes[item])
        for buffer in buffers:
            left -= memoryview(buffer).nbytes
            yield memoryview(buffer).cast("B")
        if left:
            raise ValueError(f"item {item} is {int(sizes[item]) - left} bytes, not {sizes[item]}")


def _chunks(stream: Iterator[memoryview], size: int) -> Iterator[torch.Tensor]:
    """The bytes of the stream in uint8 tensors of ``size``; the last one may be shorter."""
    buffer, filled = torch.empty(size, dtype=torch.uint8), 0
    for view in stream:
        while len(view):
            part = view[: size - filled]
            memoryview(buffer.numpy())[filled : filled + len(part)] = part
            filled, view = filled + len(part), view[len(part) :]
            if filled == size:
                yield buffer
                buffer, filled = torch.empty(size, dtype=torch.uint8), 0
    if filled:
        yield buffer[:filled]
