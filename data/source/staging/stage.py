"""``--stage DIR``: copies the data set to a local disk of each node, reading the shared file system only once.

The first process of the run lists the data set. The first process of each node (its leader) reports which files its
disk already has and reads a shard of the rest; the leaders exchange the files they read (`exchange_items`). The other
processes wait for their leader. The next run continues an interrupted copy and merely checks a complete one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch.distributed as dist

from data.source.dataset_spec import DEMO, DatasetSpec, DataSource
from data.source.staging.copy import StageCopy, open_copy
from data.source.staging.plan import StagePlan
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.distributed.file_exchange import exchange_items
from utils.distributed.groups import Subgroup, one_per_node_group
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError
from utils.files.paths import is_inside, path_of
from utils.logger import get_logger, progress
from utils.strings import counted, format_bytes


def stage_dataset(source: DataSource, ctx: DistributedContext, make_plan: Callable[[], StagePlan]) -> DatasetSpec:
    """Copies the files that are missing from the data set's copy in ``source.stage``, and opens the copy.

    Every process of the run must call this. The first process calls ``make_plan``, which lists the data set in its own
    folder. ``source.stage`` is on this node's disk and may differ between nodes; ``{node_rank}`` in it is replaced with
    the node's number. The result keeps the ``source`` of the original: its YAML, even if ``source.data`` is a folder
    that contains one. Raises UserError if the data set cannot be read or has no labels, if the disk is too small or
    cannot be written, or if two nodes use the same folder.
    """
    if source.data == DEMO:
        raise UserError("--stage: the demo set cannot be staged, since each node renders it; omit --stage")
    leaders = one_per_node_group(ctx)
    # Key for the path of the copy's YAML on this node, which depends on these values.
    store_key = f"stage/{ctx.node_rank}/{source.data!a}/{source.stage!a}/{source.splits}/{source.optional}"
    with torch_distributed_zero_first(ctx):
        if ctx.is_node_leader:
            yaml = _copy_as_leader(source, ctx, leaders, make_plan)
            if ctx.store is not None:
                path_bytes = os.fsencode(yaml)
                # torch's stubs declare only str, but `set` also takes bytes.
                ctx.store.set(store_key, cast(str, path_bytes))
        else:
            assert ctx.store is not None
            yaml = Path(os.fsdecode(ctx.store.get(store_key)))
        return open_copy(yaml)


def _copy_as_leader(
    source: DataSource, ctx: DistributedContext, leaders: Subgroup, make_plan: Callable[[], StagePlan]
) -> Path:
    """Receives the plan, which the first leader makes for all, completes this node's copy, and returns its YAML."""
    local_folder = Path(os.path.expanduser(source.stage.replace("{node_rank}", str(ctx.node_rank)))).absolute()
    node_names = [f"node {n}" for n in range(leaders.group_size)]
    title = f"stage/{leaders.handle.group_name}" if leaders.handle else ""
    with StoreBarrier(
        ctx.store, title, rank=leaders.group_rank, names=node_names, group_ranks=leaders.ranks
    ) as barrier:
        plans: list[StagePlan | None] = [None]
        if leaders.group_rank == 0:
            plans[0] = make_plan()
        barrier.wait_all()
        if leaders.group_size > 1:
            dist.broadcast_object_list(plans, src=leaders.ranks[0], group=leaders.handle)
        plan = plans[0]
        assert plan is not None
        return _complete(plan, local_folder, barrier, leaders, show_progress=ctx.is_main)


def _complete(plan: StagePlan, folder: Path, barrier: StoreBarrier, leaders: Subgroup, *, show_progress: bool) -> Path:
    """Completes this node's copy and returns its YAML. Must be called by the node's leader."""
    folders = {*plan.folders, *plan.image_folders}
    if any(is_inside(folder / plan.key, path_of(name, plan.spec.root)) for name in folders):
        raise UserError(f"--stage: {folder} is inside the data set; name a folder outside it")
    copy = StageCopy(folder / plan.key, plan)
    with copy.lock(wait=leaders.group_size == 1) as writer:
        complete = copy.complete_files()
        barrier.wait_all()
        complete_by_node = _gather(complete, leaders)
        copy.check_space(~complete)
        barrier.wait_all()
        missing = ~complete_by_node.all(axis=0)
        is_shown = show_progress and bool(missing.any())
        if show_progress:
            _log_plan(copy, complete_by_node)
        items = exchange_items(plan.sizes, complete_by_node, copy.loader(complete), barrier=barrier, group=leaders)
        for item, data in progress(items, desc="staging", total=int(missing.sum()), unit="file", enabled=is_shown):
            if not complete[item]:
                writer.write(item, data)
        writer.finish()
        barrier.wait_all()
    return copy.yaml


def _gather(complete: np.ndarray, leaders: Subgroup) -> np.ndarray:
    """Gathers the masks of the files that are complete on each node: bool (N, F). ``complete``: bool (F,), that of this
    node."""
    packed: list[np.ndarray] = [np.packbits(complete)] * leaders.group_size
    if leaders.group_size > 1:
        dist.all_gather_object(packed, packed[0], group=leaders.handle)
    return np.stack([np.unpackbits(bits, count=len(complete)).astype(bool) for bits in packed])


def _log_plan(copy: StageCopy, complete_by_node: np.ndarray) -> None:
    """Logs the number and size of files to copy. ``complete_by_node``: bool (N, F)."""
    num_nodes, num_files = complete_by_node.shape
    missing = ~complete_by_node.all(axis=0)
    if not missing.any():
        get_logger().info("--stage: complete in %s (%s)", copy.folder, counted(num_files, "file"))
        return
    get_logger().info(
        "--stage: copying %d of %d files (%s) to %s, on this node to %s",
        missing.sum(),
        num_files,
        format_bytes(int(copy.plan.sizes[missing].sum())),
        counted(num_nodes, "node"),
        copy.folder,
    )
