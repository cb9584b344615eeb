"""Virtual ranks: a step is cut into a fixed number of shards, and its bits do not depend on the number of processes.

The V shards of a step are the leaves of one fixed binary tree, ((0 + 1) + (2 + 3)) + ... Each process adds the subtree
of its own consecutive shards as they are computed; the upper levels are exchanges between pairs of processes.
Floating-point addition commutes, so both processes of a pair get the same bits. (Accuracy-consistent elastic training
follows EasyScale, SC'23; the exchange is the recursive halving and doubling of Thakur, Rabenseifner & Gropp 2005.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.optim.build import OptimizerSet
from engine.optim.model_tensors import copy_from_flat, flatten, flatten_as, float_buffers, views_as
from engine.parallel.ddp import Accumulate, Autocast, Strategy
from utils.distributed.context import DistributedContext, shard_bounds
from utils.structures import Batch


class VirtualRanks(Strategy):
    """Every global micro-batch is cut into ``count`` shards with batch statistics of their own. Gradients, the sums of
    the step and running statistics are added in the order of the tree, the latter to their mean. The number of
    processes is a power of two that divides ``count``; ``model`` is not wrapped."""

    def __init__(
        self, ctx: DistributedContext, model: nn.Module, autocast: Autocast, optimizer: OptimizerSet, count: int
    ) -> None:
        super().__init__(ctx, model, autocast)
        self._count, self._optimizer = count, optimizer
        self._statistics = float_buffers(model)
        self._counters = [b for b in model.buffers() if not b.is_floating_point()]  # batches that norms have seen

    def run(self, batches: Sequence[Batch], counts: Sequence[int], accumulate: Accumulate) -> tuple[Tensor, Tensor]:
        ctx, parameters, per_process = self.ctx, self._optimizer.parameters, self._count // self.ctx.world_size
        start, counted = flatten(self._statistics), flatten(self._counters)
        tree, totals = SubtreeSum(), []
        for rank in range(ctx.rank * per_process, (ctx.rank + 1) * per_process):
            copy_from_flat(start, self._statistics)
            copy_from_flat(counted, self._counters)
            shards = []
            for batch, count in zip(batches, counts):
                first, last = shard_bounds(count, rank, self._count)
                offset, _ = shard_bounds(count, ctx.rank, ctx.world_size)
                shards.append(batch.shard(first - offset, last - offset))
            sums, total = accumulate(shards)
            totals.append(total)
            tree.add(gradient_vector(parameters, sums, flatten(self._statistics)))
            self._optimizer.zero_grad()
        rest = set_gradients(parameters, sum_over_processes(ctx, tree.total()))
        sums, statistics = rest.split([len(sums), len(start)])
        copy_from_flat((statistics / self._count).to(start), self._statistics)
        return sums, torch.stack(totals).sum()


def gradient_vector(parameters: Sequence[nn.Parameter], *rest: Tensor) -> Tensor:
    """The gradients, zeros where a parameter has none, and the tensors ``rest`` (n,) in one vector, to be added up."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([*flatten_as(gradients, parameters), *(tensor.to(gradients[0]) for tensor in rest)])


def set_gradients(parameters: Sequence[nn.Parameter], vector: Tensor) -> Tensor:
    """Makes the gradients views of ``vector``, as `gradient_vector` returns it; returns the rest of it."""
    for parameter, gradient in zip(parameters, views_as(vector, parameters)):
        parameter.grad = gradient
    return vector[sum(p.numel() for p in parameters) :]


class SubtreeSum:
    """Adds tensors one after another as a binary tree, keeping at most log2 of their number at a time."""

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
        """The sum of a number of leaves that is a power of two."""
        ((_, total),) = self._stack
        return total


def _exchange(send: Tensor, receive: Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]):
        work.wait()


def sum_over_processes(ctx: DistributedContext, flat: Tensor) -> Tensor:
    """``flat`` (1-D, of the same length everywhere) summed over 2^n processes in the order of the tree.

    Each sends and receives about twice the vector whatever their number: at every level a pair halves the part it
    reduces, then the parts are exchanged back.
    """
    world = ctx.world_size
    if world == 1:
        return flat
    length = flat.numel()
    padded = flat.new_zeros(-(-length // world) * world)
    padded[:length] = flat
    start, end, cuts = 0, padded.numel(), []
    distance = 1
    while distance < world:
        middle = (start + end) // 2
        upper = bool(ctx.rank & distance)
        keep, send = ((middle, end), (start, middle)) if upper else ((start, middle), (middle, end))
        received = torch.empty_like(padded[keep[0] : keep[1]])
        _exchange(padded[send[0] : send[1]].contiguous(), received, ctx.rank ^ distance)
        padded[keep[0] : keep[1]] += received
        cuts.append((keep, send, ctx.rank ^ distance))
        start, end = keep
        distance *= 2
    for keep, send, peer in reversed(cuts):
        received = torch.empty_like(padded[send[0] : send[1]])
        _exchange(padded[keep[0] : keep[1]].contiguous(), received, peer)
        padded[send[0] : send[1]] = received
    return padded[:length]
