"""Chooses the number of a loader's worker processes."""

from __future__ import annotations

from utils.distributed.context import DistributedContext
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.strings import counted

# Per rank. More workers would only keep more batches in memory.
MAX_WORKERS = 8
MAX_WORKERS_CUDA = 16


def loader_workers(requested: int, ctx: DistributedContext) -> int:
    """Returns the number of workers of a loader: ``requested``, or for -1 an equal share of the cores.

    The share is at most `MAX_WORKERS`. With GPUs two cores of the node stay free for the training processes, and the
    limit is `MAX_WORKERS_CUDA`.
    """
    if requested >= 0:
        return requested
    cores = available_cores()
    processes = ctx.local_world_size
    if ctx.device.type == "cuda":
        return min(max((cores - 2) // processes, 1), MAX_WORKERS_CUDA)
    return min(max(cores // processes, 1), MAX_WORKERS)


def log_loader_workers(requested: int, ctx: DistributedContext, split: str) -> None:
    """Logs the number of workers chosen for the loader of ``split``; warns if more are requested than there are cores.
    Processes other than the main one log nothing."""
    if not ctx.is_main:
        return
    cores = counted(available_cores(), "core")
    processes = ctx.local_world_size
    if requested < 0:
        node = f"{cores}, {counted(processes, 'process')} on this node"
        get_logger().info("--workers (%s): %d per process (%s)", split, loader_workers(requested, ctx), node)
    elif requested * processes > available_cores():
        workers = counted(requested * processes, "worker")
        message = "--workers %d (%s): %s on %s; about one per core is fastest"
        get_logger().warning(message, requested, split, workers, cores)
