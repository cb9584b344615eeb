"""Reads items that every node needs once in the whole run, and broadcasts them.

Each item is read by one of the node leaders, which send each other what they have read, in rounds of bounded chunks.
Before each round they wait at a `StoreBarrier`. So its collectives start when all leaders have their chunk in memory
and the chunks of the last round on disk, and a slow file system on one node causes no timeout.

The stream of a leader consists of its items' bytes, in order, each followed by a BLAKE2b digest, which receivers check.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from utils.distributed.groups import Subgroup
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError, first_line
from utils.machine.threads import map_ahead

DIGEST_BYTES = 16
_MIN_CHUNK, _MAX_CHUNK, _ROUND = 1 << 20, 16 << 20, 256 << 20  # bytes a leader, and of all leaders, in a round
_COST_OF_ONE = 64 << 10  # bytes that could be read in the time that opening an item takes


class Piece(NamedTuple):
    """A part of an item. The last one has the digest and no data."""

    item: int
    offset: int  # of data in the item
    data: memoryview
    digest: bytes  # of the whole item; empty in all but its last piece


def digest_of(buffers: Iterable[bytes | memoryview]) -> bytes:
    """The digest of an item, whose bytes are given in ``buffers``."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


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
    chunk_bytes: int | None = None,
) -> Iterator[Piece]:
    """Yields, on every leader, the pieces of all items that some leader lacks. Pieces of an item are in order.

    Args:
        sizes: bytes of each item, int64 (F,), the same on all leaders.
        cached: whether each leader already has each item, bool (N, F), the same on all leaders.
        load: returns the buffers of an item; called in threads, for the items that this leader reads.
        barrier: of the leaders, in the group's order.
        group: the leaders.
        threads: number of reading threads.
        chunk_bytes: bytes that a leader sends in a round; None: depends on the number of leaders.

    Raises:
        ValueError: an item of this leader does not have its size. What ``load`` raises is raised, too.
        UserError: an item arrives damaged, or a leader is gone.
        PeerFailure: another leader failed.
    """
    chunk = chunk_bytes or int(np.clip(_ROUND // group.group_size, _MIN_CHUNK, _MAX_CHUNK))
    shards = assign(sizes, cached)
    lengths = [int(sizes[items].sum()) + DIGEST_BYTES * len(items) for items in shards]
    local = group.local_group_rank
    inboxes = [_Unpacker(items, sizes, check=rank != local) for rank, items in enumerate(shards)]
    outbox = _chunks(_stream(shards[local], sizes, load, threads), chunk)
    for start in range(0, max(lengths), chunk):
        parts = [max(min(chunk, length - start), 0) for length in lengths]
        buffers = [
            next(outbox) if n and rank == local else torch.empty(n, dtype=torch.uint8) for rank, n in enumerate(parts)
        ]
        barrier.wait_all()
        _send_round(buffers, group, barrier)
        for inbox, buffer in zip(inboxes, buffers):
            yield from inbox.feed(memoryview(buffer.numpy()))


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
        digest, left = hashlib.blake2b(digest_size=DIGEST_BYTES), int(sizes[item])
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            digest.update(view)
            left -= len(view)
            yield view
        if left:
            raise ValueError(f"item {item} is {int(sizes[item]) - left} bytes, not {sizes[item]}")
        yield memoryview(digest.digest())


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


class _Unpacker:
    """Cuts the stream of a leader into pieces of items."""

    def __init__(self, items: np.ndarray, sizes: np.ndarray, *, check: bool) -> None:
        self._items = iter(items)
        self._sizes = sizes
        self._check = check
        self._item = -1
        self._next_item()

    def _next_item(self) -> None:
        self._item = int(next(self._items, -1))
        self._offset = 0
        self._trailer = b""
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def feed(self, view: memoryview) -> Iterator[Piece]:
        while len(view):
            left = int(self._sizes[self._item]) - self._offset
            if left:
                part, view = view[:left], view[left:]
                if self._check:
                    self._digest.update(part)
                yield Piece(self._item, self._offset, part, b"")
                self._offset += len(part)
                continue
            part, view = view[: DIGEST_BYTES - len(self._trailer)], view[DIGEST_BYTES - len(self._trailer) :]
            self._trailer += bytes(part)
            if len(self._trailer) == DIGEST_BYTES:
                if self._check and self._digest.digest() != self._trailer:
                    raise UserError(f"item {self._item} arrived damaged from another node; start again")
                yield Piece(self._item, self._offset, memoryview(b""), self._trailer)
                self._next_item()
