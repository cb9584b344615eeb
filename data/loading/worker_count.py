"""Chooses the number of a loader's worker processes."""

from __future__ import annotations

from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.strings import counted

# Per rank. A worker renders about 600 images per second at 640 px (benchmarks/LOG.md). More workers would only keep
# more batches in memory.
MAX_WORKERS = 8
MAX_WORKERS_CUDA = 16


def loader_workers(requested: int, ctx: DistributedContext, split: str) -> int:
    """Returns the number of workers for the loader of ``split``: ``requested``, or for -1 an equal share of the cores.

    The share is at most `MAX_WORKERS`. With GPUs two cores stay free for the processes themselves, and the limit is
    `MAX_WORKERS_CUDA`.
    """
    cores = available_cores()
    processes = ctx.local_world_size
    if requested >= 0:
        if ctx.is_main and requested * processes > cores:
            workers = counted(requested * processes, "worker")
            message = "--workers %d (%s): %s on %s; about one per core is fastest"
            get_logger().warning(message, requested, split, workers, counted(cores, "core"))
        return requested
    if ctx.device.type == "cuda":
        share = min(max((cores - 2) // processes, 1), MAX_WORKERS_CUDA)
    else:
        share = min(max(cores // processes, 1), MAX_WORKERS)
    node = f"{counted(cores, 'core')}, {counted(processes, 'process')} on this node"
    get_logger().info("--workers (%s): %d per process (%s)", split, share, node)
    return share
