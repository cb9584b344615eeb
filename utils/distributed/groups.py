"""Groups of processes within a run. Every process creates the same groups in the same order, including those that it
does not belong to. The groups for two nodes of four processes:

    rank                     0   1   2   3   |   4   5   6   7
    node, local rank         0,0 0,1 0,2 0,3 |   1,0 1,1 1,2 1,3
    node groups            [ 0   1   2   3 ]   [ 4   5   6   7 ]     rank 6 has group_rank 2
    one-per-node groups    [0, 4]  [1, 5]  [2, 6]  [3, 7]            rank 6 has group_rank 1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from utils.distributed.context import DistributedContext, all_objects


@dataclass(frozen=True)
class Subgroup:
    """The group that this process belongs to, and this process's position in it."""

    ranks: tuple[int, ...]  # ranks in the run of the group's processes, ascending
    group_rank: int  # this process's rank within the group
    handle: dist.ProcessGroup | None = field(repr=False, compare=False)  # None in a run of one process

    @property
    def group_size(self) -> int:
        return len(self.ranks)


def node_group(ctx: DistributedContext) -> Subgroup:
    """Returns the group of this node's processes, on gloo."""
    return _group_by(ctx, ctx.node_rank)


def one_per_node_group(ctx: DistributedContext) -> Subgroup:
    """Returns the group of all processes with this process's local rank, one per node, on gloo. For local rank 0, these
    are the node leaders."""
    return _group_by(ctx, ctx.local_rank)


def _group_by(ctx: DistributedContext, value: int) -> Subgroup:
    """Groups the processes with equal values, and returns the group of this process."""
    if not ctx.is_distributed:
        return Subgroup((0,), 0, None)
    values = all_objects(ctx, value)
    groups = [[rank for rank, other in enumerate(values) if other == each] for each in sorted(set(values))]
    ranks = next(ranks for ranks in groups if ctx.rank in ranks)
    handle, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo")
    assert isinstance(handle, dist.ProcessGroup), "every process belongs to one of the groups"
    return Subgroup(tuple(ranks), ranks.index(ctx.rank), handle)


def sync_bn_group(ctx: DistributedContext, size: int) -> dist.ProcessGroup | None:
    """Returns the group over which ``--sync-bn SIZE`` computes batch statistics: ``SIZE`` consecutive ranks on the
    run's backend, or None for the whole run (including size -1)."""
    if size <= 0 or size == ctx.world_size:
        return None
    return dist.new_subgroups(size, backend=ctx.backend)[0]
