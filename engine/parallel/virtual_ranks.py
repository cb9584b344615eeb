"""Virtual ranks: into how many shards a step is cut, and their sum, whose bits no number of processes changes.

The V shards of a step are the leaves of one fixed binary tree, ((0 + 1) + (2 + 3)) + ... Each process adds the subtree
of its own consecutive shards as they come; the upper levels are exchanges between pairs of processes. Floating-point
addition commutes, so both of a pair get the same bits. (The idea of accuracy-consistent elastic training is
EasyScale's, SC'23; the exchange is the recursive halving and doubling of Thakur, Rabenseifner & Gropp 2005.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError


def resolve_virtual_ranks(ctx: DistributedContext, config: TrainConfig) -> int:
    """The number of virtual ranks that a step is cut into; 0 for plain DDP, which has one shard per process and adds
    gradients in its own order. DDP is used unless ``--virtual-ranks`` or ``--deterministic`` is given.

    Raises UserError for a number that does not fit this run.
    """
    wanted, world = config.virtual_ranks or ctx.world_size, ctx.world_size
    if not config.virtual_ranks and (world == 1 or not config.deterministic):
        return 0
    if wanted & (wanted - 1) or wanted % world:
        fix = f"--virtual-ranks {wanted}: must be a power of two that the {world} process(es) divide"
        raise UserError(fix if config.virtual_ranks else f"--deterministic on {world} processes: use 2, 4, 8, ...")
    if wanted > config.batch_size != FIND_BATCH_SIZE:
        raise UserError(f"--virtual-ranks {wanted}: more than the {config.batch_size} images of a batch")
    if config.sync_bn or config.sync_bn_group:
        raise UserError("--sync-bn takes statistics over the whole batch, virtual ranks over a shard: choose one")
    if len(ctx.devices) > 1:
        raise UserError("--virtual-ranks: one device a process; start with torchrun instead of --device 0,1")
    return wanted


class SubtreeSum:
    """Adds tensors one after another as a binary tree, holding at most log2 of their number at a time."""

    def __init__(self) -> None:
        self._stack: list[tuple[int, Tensor]] = []  # (levels below, sum), from the left

    def add(self, leaf: Tensor) -> None:
        """Takes ``leaf``; it may be changed in place."""
        height = 0
        while self._stack and self._stack[-1][0] == height:
            leaf = self._stack.pop()[1].add_(leaf)
            height += 1
        self._stack.append((height, leaf))

    def total(self) -> Tensor:
        """The sum; the number of leaves must be a power of two."""
        if len(self._stack) != 1:
            raise ValueError("a subtree wants a power of two of leaves")
        return self._stack[0][1]


def _exchange(send: Tensor, receive: Tensor, peer: int) -> None:
    operations = [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def sum_over_processes(ctx: DistributedContext, flat: Tensor) -> Tensor:
    """``flat`` (1-D, equally long on all) summed over all processes in the tree's order: the same bits on each.

    The number of processes must be a power of two. Each sends and receives about twice the vector, whatever their
    number: at every level a pair halves the part it is responsible for, then the parts are handed back.
    """
    world = ctx.world_size
    if world == 1:
        return flat
    if world & (world - 1):
        raise ValueError(f"{world} processes: a power of two is wanted")
    length = flat.numel()
    padded = flat.new_zeros(-(-length // world) * world)
    padded[:length] = flat
    start, end, cuts = 0, padded.numel(), []
    distance = 1
    while distance < world:
        middle = (start + end) // 2
        upper = bool(ctx.rank & distance)
        keep, give = ((middle, end), (start, middle)) if upper else ((start, middle), (middle, end))
        received = torch.empty_like(padded[keep[0] : keep[1]])
        _exchange(padded[give[0] : give[1]].contiguous(), received, ctx.rank ^ distance)
        padded[keep[0] : keep[1]] += received
        cuts.append((keep, give, ctx.rank ^ distance))
        start, end = keep
        distance *= 2
    for keep, give, peer in reversed(cuts):
        received = torch.empty_like(padded[give[0] : give[1]])
        _exchange(padded[keep[0] : keep[1]].contiguous(), received, peer)
        padded[give[0] : give[1]] = received
    return padded[:length]
