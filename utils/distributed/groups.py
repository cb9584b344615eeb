"""Groups of processes within a run. Every process creates the same groups in the same order, including those that it
does not belong to. The groups for two nodes of four processes:

    rank                     0   1   2   3   |   4   5   6   7
    node, local rank         0,0 0,1 0,2 0,3 |   1,0 1,1 1,2 1,3
    one-per-node groups    [0, 4]  [1, 5]  [2, 6]  [3, 7]            rank 6 is rank 1 of its group
"""

from __future__ import annotations

import torch.distributed as dist

from utils.distributed.context import DistributedContext, all_objects


def one_per_node_group(ctx: DistributedContext) -> dist.ProcessGroup | None:
    """Returns the group of all processes with this process's local rank, one per node, on gloo, or None in a run of one
    process. For local rank 0, these are the node leaders."""
    if not ctx.is_distributed:
        return None
    local_ranks = all_objects(ctx, ctx.local_rank)
    groups = [[rank for rank, other in enumerate(local_ranks) if other == each] for each in sorted(set(local_ranks))]
    group, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every process belongs to one of the groups"
    return group


def sync_bn_group(ctx: DistributedContext, size: int) -> dist.ProcessGroup | None:
    """Returns the group over which ``--sync-bn SIZE`` computes batch statistics: ``SIZE`` consecutive ranks on the
    run's backend, or None for the whole run (including size -1)."""
    if size <= 0 or size == ctx.world_size:
        return None
    return dist.new_subgroups(size, backend=ctx.backend)[0]
