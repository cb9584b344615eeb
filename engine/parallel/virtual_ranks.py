"""Virtual ranks: a step is cut into a fixed number of shards, and its bits do not depend on the number of processes.

The V shards of a step are the leaves of one fixed binary tree, ((0 + 1) + (2 + 3)) + ... Each process adds the subtree
of its own consecutive shards as they are computed; the upper levels are exchanges between pairs of processes.
Floating-point addition commutes, so both processes of a pair get the same bits. (Accuracy-consistent elastic training
follows EasyScale, SC'23; the exchange is the recursive halving and doubling of Thakur, Rabenseifner & Gropp 2005.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.optim.model_tensors import copy_from_flat, flatten, float_buffers, gradient_vector, set_gradients
from engine.parallel.strategy import Autocast, Strategy
from utils.batches import Batch
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, shard_bounds


def resolve_virtual_ranks(ctx: DistributedContext, config: TrainConfig) -> int:
    """Returns the number of virtual ranks that a step is cut into; 0 for plain DDP, which has one shard per process and
    adds gradients in its own order. DDP is used unless ``--virtual-ranks`` or ``--deterministic`` is given."""
    if config.virtual_ranks:
        return config.virtual_ranks
    return ctx.world_size if config.deterministic and ctx.world_size > 1 and config.pipeline == 1 else 0


class VirtualRanks(Strategy):
    """Cuts every global micro-batch into ``count`` shards with batch statistics of their own.

    Gradients, the sums of the step and running statistics are added in the order of the tree; running statistics are
    then averaged. The number of processes is a power of two that divides ``count``; ``model`` is not wrapped, and its
    ``parameters`` are trained.
    """

    def __init__(
        self,
        ctx: DistributedContext,
        model: nn.Module,
        autocast: Autocast,
        parameters: Sequence[nn.Parameter],
        count: int,
    ) -> None:
        super().__init__(ctx, model, autocast)
        self._count = count
        self._parameters = parameters
        self._statistics = float_buffers(model)
        self._counters = [b for b in model.buffers() if not b.is_floating_point()]  # batches that norms have seen
        self._tree = SubtreeSum()  # sum of the step that is being computed

    def shards(self, batches: Sequence[Batch], counts: Sequence[int]) -> Iterator[Sequence[Batch]]:
        """Yields the micro-batches of each of this process's virtual ranks, which all begin with the statistics and
        counters from before the step."""
        self._tree = SubtreeSum()
        old_statistics = flatten(self._statistics)
        old_counters = flatten(self._counters)
        per_process = self._count // self.ctx.world_size
        first_rank = self.ctx.rank * per_process
        for virtual_rank in range(first_rank, first_rank + per_process):
            copy_from_flat(old_statistics, self._statistics)
            copy_from_flat(old_counters, self._counters)
            yield self._cut_shard(virtual_rank, batches, counts)

    def add_shard(self, sums: Tensor) -> None:
        self._tree.add(gradient_vector(self._parameters, sums, flatten(self._statistics)))
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self) -> Tensor:
        total = sum_over_processes(self.ctx, self._tree.total())
        others = set_gradients(self._parameters, total)
        num_statistics = sum(statistic.numel() for statistic in self._statistics)
        sums, statistics = others.split([len(others) - num_statistics, num_statistics])
        copy_from_flat(statistics / self._count, self._statistics)
        return sums

    def _cut_shard(self, virtual_rank: int, batches: Sequence[Batch], counts: Sequence[int]) -> list[Batch]:
        """Cuts the shard of a virtual rank out of this process's micro-batches."""
        shard = []
        for batch, count in zip(batches, counts):
            first, last = shard_bounds(count, virtual_rank, self._count)
            offset, _ = shard_bounds(count, self.ctx.rank, self.ctx.world_size)
            shard.append(batch.shard(first - offset, last - offset))
        return shard


class SubtreeSum:
    """Adds tensors one after another in the order of a binary tree, keeping about log2 of their number at a time."""

    def __init__(self) -> None:
        self._stack: list[tuple[int, Tensor]] = []  # (levels below, sum), from the left

    def add(self, leaf: Tensor) -> None:
        """Adds ``leaf``, which may be changed in place."""
        height = 0
        while self._stack and self._stack[-1][0] == height:
            leaf = self._stack.pop()[1].add_(leaf)
            height += 1
        self._stack.append((height, leaf))

    def total(self) -> Tensor:
        """Returns the sum; the number of leaves is a power of two."""
        ((_, total),) = self._stack
        return total


class _Exchange(NamedTuple):
    """Halves of a range of the vector that a pair of processes exchanges: each adds up one of them."""

    peer: int  # rank of the other process
    kept: slice  # what this process adds up
    sent: slice  # what the peer adds up


def _exchanges(rank: int, world_size: int, length: int) -> list[_Exchange]:
    """Returns the exchanges of a process from the leaves of the tree upwards. ``length``: a multiple of the number of
    processes, 2^n."""
    exchanges = []
    start = 0
    end = length
    distance = 1
    while distance < world_size:
        middle = (start + end) // 2
        halves = [slice(start, middle), slice(middle, end)]
        if rank & distance:
            halves.reverse()
        exchange = _Exchange(rank ^ distance, *halves)
        exchanges.append(exchange)
        start, end = exchange.kept.start, exchange.kept.stop
        distance *= 2
    return exchanges


def _send_and_receive(sent: Tensor, like: Tensor, peer: int) -> Tensor:
    """Sends ``sent`` to ``peer``, and returns the tensor that ``peer`` sends, of the shape and type of ``like``."""
    received = torch.empty_like(like)
    operations = [dist.P2POp(dist.isend, sent.contiguous(), peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def sum_over_processes(ctx: DistributedContext, flat: Tensor) -> Tensor:
    """Returns ``flat`` (1-D, of the same length everywhere) summed over 2^n processes in the order of the tree.

    Each process sends and receives about twice the vector, regardless of the number of processes: at every level a pair
    halves the range that it adds up, then the sums are exchanged back.
    """
    world_size = ctx.world_size
    if world_size == 1:
        return flat
    length = flat.numel()
    padded = flat.new_zeros(-(-length // world_size) * world_size)
    padded[:length] = flat
    exchanges = _exchanges(ctx.rank, world_size, padded.numel())
    for peer, kept, sent in exchanges:
        padded[kept] += _send_and_receive(padded[sent], like=padded[kept], peer=peer)
    for peer, kept, sent in reversed(exchanges):
        padded[sent] = _send_and_receive(padded[kept], like=padded[sent], peer=peer)
    return padded[:length]
