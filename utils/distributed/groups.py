"""Groups of processes within a run, and the position of a process in them.

Every process makes the same groups in the same order (making one is collective over the whole run), whether it belongs
to them or not. Make them once and pass them on. The names, for two nodes of four processes:

    rank                     0   1   2   3   |   4   5   6   7
    node, local rank         0,0 0,1 0,2 0,3 |   1,0 1,1 1,2 1,3

    node groups            [ 0   1   2   3 ]   [ 4   5   6   7 ]     group_size 4, group_world_size 2
                             rank 6 has group_rank 1, local_group_rank 2, group_rank_base 4

    one-per-node groups    [ 0               ,   4 ]                 group_size 2, group_world_size 4
                               [ 1               ,   5 ]             the first of them are the node leaders
                                   [ 2               ,   6 ]         rank 6 has group_rank 2, local_group_rank 1,
                                       [ 3               ,   7 ]     group_rank_base 2

    consecutive, of 2      [ 0   1 ] [ 2   3 ] [ 4   5 ] [ 6   7 ]   group_size 2, group_world_size 4
                             rank 6 has group_rank 3, local_group_rank 0, group_rank_base 6

group_rank and group_world_size count groups, as torchrun's GROUP_RANK and GROUP_WORLD_SIZE do (there a group is a
node). Nodes may differ in their number of processes; a one-per-node group spans the nodes that have its local rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from utils.distributed.context import DistributedContext
from utils.errors import UserError


@dataclass(frozen=True)
class Subgroup:
    """The group that this process belongs to, and this process's position in it."""

    group_size: int  # processes in this group
    group_world_size: int  # groups of this kind
    group_rank: int  # of this group among them
    local_group_rank: int  # of this process in its group
    group_rank_base: int  # rank in the run of the group's first process
    ranks: tuple[int, ...]  # in the run, of the group's processes, ascending
    handle: dist.ProcessGroup | None = field(repr=False, compare=False)  # None in a run of one process


def node_group(ctx: DistributedContext) -> Subgroup:
    """The processes of this node, in gloo. Collective over the whole run."""
    return _make(ctx, _ranks_by(0, _positions(ctx)), "gloo")


def one_per_node_group(ctx: DistributedContext) -> Subgroup:
    """The processes that have the local rank of this one, one per node, in gloo; for local rank 0, the node leaders.

    Collective over the whole run.
    """
    return _make(ctx, _ranks_by(1, _positions(ctx)), "gloo")


def consecutive_group(ctx: DistributedContext, size: int) -> Subgroup:
    """The group of ``size`` consecutive ranks that contains this one, on the run's backend. Collective over the whole
    run.

    Raises:
        UserError: the world size is not a multiple of ``size``.
    """
    check_group_size(ctx, size)
    groups = [list(range(base, base + size)) for base in range(0, ctx.world_size, size)]
    return _make(ctx, groups, ctx.backend)


def sync_bn_group(ctx: DistributedContext, size: int) -> dist.ProcessGroup | None:
    """The group over which ``--sync-bn SIZE`` takes batch statistics; None if it is the whole run (also for
    size -1 or 0, and in a run of one process). Collective over the whole run.

    Raises:
        UserError: the world size is not a multiple of ``size``.
    """
    if size <= 0 or size == ctx.world_size or not ctx.is_distributed:
        return None
    return consecutive_group(ctx, size).handle


def check_group_size(ctx: DistributedContext, size: int) -> None:
    """Raises UserError unless the processes of the run can be divided into groups of ``size``."""
    if not 1 <= size <= ctx.world_size or ctx.world_size % size:
        fitting = [n for n in range(1, ctx.world_size + 1) if ctx.world_size % n == 0]
        raise UserError(
            f"groups of {size} processes do not divide the {ctx.world_size} of this run (--sync-bn); "
            f"use {', '.join(map(str, fitting))}"
        )


def _positions(ctx: DistributedContext) -> list[tuple[int, int]]:
    """(node_rank, local_rank) by rank."""
    if not ctx.is_distributed:
        return [(0, 0)]
    positions: list[tuple[int, int]] = [(0, 0)] * ctx.world_size
    dist.all_gather_object(positions, (ctx.node_rank, ctx.local_rank))
    if len(set(positions)) < len(positions):
        twice = next(p for p in positions if positions.count(p) > 1)
        raise UserError(f"two processes are local rank {twice[1]} of node {twice[0]}; start with torchrun")
    return positions


def _ranks_by(column: int, positions: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The ranks of each value of one column of ``positions``, in the order of the values."""
    values = sorted({position[column] for position in positions})
    return [[rank for rank, position in enumerate(positions) if position[column] == value] for value in values]


def _make(ctx: DistributedContext, groups: list[list[int]], backend: str) -> Subgroup:
    group_rank = next(i for i, ranks in enumerate(groups) if ctx.rank in ranks)
    handle = None
    if ctx.is_distributed:
        handle = [dist.new_group(ranks, backend=backend) for ranks in groups][group_rank]
    ranks = groups[group_rank]
    return Subgroup(
        group_size=len(ranks),
        group_world_size=len(groups),
        group_rank=group_rank,
        local_group_rank=ranks.index(ctx.rank),
        group_rank_base=ranks[0],
        ranks=tuple(ranks),
        handle=handle,
    )


def shard_bounds(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous shard [start, end) of ``count`` items for a rank.

    Sizes differ by one at most. Shards are nested: each shard of k ranks consists of two shards of 2k ranks.
    """
    return rank * count // world_size, (rank + 1) * count // world_size
