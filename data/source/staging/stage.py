"""``--stage DIR``: copies the data set to a local disk of each node, reading the shared file system only once.

The first process of the run lists the data set. The first process of each node (its leader) reports which files its
disk already has and reads a shard of the rest; the leaders send each other what they read (`file_exchange`). The other
processes wait for their leader. The next run continues an interrupted copy, and only checks a complete one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch.distributed as dist

from data.source.dataset_spec import DEMO, DatasetSpec, DataSource
from data.source.staging.copy import StageCopy, StagePlan, open_copy, plan_stage
from data.source.staging.file_exchange import exchange_items
from utils.distributed.context import DistributedContext, torch_distributed_zero_first
from utils.distributed.groups import Subgroup, one_per_node_group
from utils.distributed.store_barrier import StoreBarrier
from utils.errors import UserError
from utils.files.paths import is_inside, path_of
from utils.logger import get_logger, progress
from utils.strings import counted, format_bytes


def stage_dataset(source: DataSource, ctx: DistributedContext, open_original: Callable[[], DatasetSpec]) -> DatasetSpec:
    """Copies the files of a data set that are missing in its copy in ``source.stage``, and opens the copy.

    Every process of the run must call this; the first one calls ``open_original``, which opens the data set in its own
    folder. ``source.stage`` is on this node's disk; it may differ between nodes. ``{node_rank}`` in it is replaced by
    the node's number. The ``source`` of the result is the original YAML. Raises UserError: the data set cannot be read,
    the disk is too small or cannot be written, or two nodes use one folder.
    """
    if source.data == DEMO:
        raise UserError("--stage: the demo set cannot be staged, since each node renders it; omit --stage")
    leaders = one_per_node_group(ctx)
    local_folder = Path(os.path.expanduser(source.stage.replace("{node_rank}", str(ctx.node_rank)))).absolute()
    with torch_distributed_zero_first(ctx):
        if not ctx.is_node_leader:
            assert ctx.store is not None
            yaml = ctx.store.get(f"stage/{ctx.node_rank}/{source.splits}").decode("utf-8", "surrogateescape")
        else:
            names = [f"node {n}" for n in range(leaders.group_size)]
            title = f"stage/{leaders.handle.group_name}" if leaders.handle else ""
            with StoreBarrier(ctx.store, title, rank=leaders.local_group_rank, names=names) as barrier:
                plans: list[StagePlan | None] = [None]
                if leaders.local_group_rank == 0:
                    spec = open_original()
                    optional = (split for split in source.optional if split in spec.splits)
                    plans[0] = plan_stage(spec, (*source.splits, *optional))
                barrier.wait_all()
                if leaders.group_size > 1:
                    dist.broadcast_object_list(plans, src=leaders.ranks[0], group=leaders.handle)
                plan = plans[0]
                assert plan is not None
                yaml = str(_complete(plan, local_folder, barrier, leaders, show_progress=ctx.is_main))
            if ctx.store is not None:
                path_bytes = yaml.encode("utf-8", "surrogateescape")
                # torch's stubs know only str, but `set` takes bytes, too.
                ctx.store.set(f"stage/{ctx.node_rank}/{source.splits}", cast(str, path_bytes))
        return open_copy(Path(yaml), source.data)


def _complete(plan: StagePlan, folder: Path, barrier: StoreBarrier, leaders: Subgroup, *, show_progress: bool) -> Path:
    """Completes the copy of this node, and returns its YAML. This process is the node's leader."""
    if any(is_inside(folder / plan.key, path_of(each, plan.spec.root)) for each in plan.folders):
        raise UserError(f"--stage: {folder} is inside the data set; name a folder outside it")
    copy = StageCopy(folder / plan.key, plan)
    with copy.lock(wait=leaders.group_size == 1):
        copy.remove_absent()
        local = copy.complete_files()
        barrier.wait_all()
        packed: list[np.ndarray] = [np.packbits(local)] * leaders.group_size
        if leaders.group_size > 1:
            dist.all_gather_object(packed, packed[0], group=leaders.handle)
        present = np.stack([np.unpackbits(bits, count=len(local)).astype(bool) for bits in packed])
        missing = ~present.all(axis=0)
        copy.check_space(~local)
        barrier.wait_all()
        is_shown = show_progress and bool(missing.any())
        if is_shown:
            get_logger().info(
                "--stage: copying %d of %d files (%s) to %s, on this node to %s",
                missing.sum(),
                len(local),
                format_bytes(int(plan.sizes[missing].sum())),
                counted(leaders.group_size, "node"),
                copy.folder,
            )
        elif show_progress:
            get_logger().info("--stage: complete in %s (%s)", copy.folder, counted(len(local), "file"))
        items = exchange_items(plan.sizes, present, copy.loader(local), barrier=barrier, group=leaders)
        for item, data in progress(items, desc="staging", total=int(missing.sum()), unit="file", enabled=is_shown):
            if not local[item]:
                copy.write(item, data)
        copy.finish()
        barrier.wait_all()
    return copy.yaml
