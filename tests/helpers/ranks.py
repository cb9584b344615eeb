"""Runs a function in real gloo processes and returns the result of each.

The processes are forked from one that has only imported torch: importing it takes two seconds per rank.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from utils.distributed.context import DistributedContext
from utils.distributed.spawn import free_port


def _enter(
    rank: int,
    environment: dict[str, str],
    world: int,
    port: int,
    folder: str,
    local_world: int,
    timeout_s: float,
    function: Callable,
    args: tuple,
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ |= environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local_world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(rank // local_world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        ctx = DistributedContext.from_environment("cpu", timeout_s=timeout_s)
        result = function(ctx, *args)
        ctx.close()
    except BaseException as error:
        traceback.print_exc()
        Path(folder, str(rank)).write_bytes(pickle.dumps(error))
        os._exit(0)  # as utils.entrypoint ends what has failed in a group
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))


def run_ranks(
    world: int,
    function: Callable,
    *args: Any,
    local_world: int | None = None,
    timeout_s: float = 60,
    lost: int | None = None,
) -> list[Any]:
    """Runs ``function(ctx, *args)`` on ``world`` ranks; a list of their return values (or exceptions), by rank.

    ``timeout_s`` is that of the process group. The rank ``lost`` dies during the run; its result is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.get_context("forkserver").set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed"])
        extra = (dict(os.environ), world, free_port(), folder, local_world or world, timeout_s, function, args)
        processes = mp.start_processes(_enter, extra, world, start_method="forkserver", join=False)
        while lost is None and not processes.join():
            pass
        for process in processes.processes:
            process.join()
        results = [Path(folder, str(rank)) for rank in range(world)]
        return [None if rank == lost else pickle.loads(path.read_bytes()) for rank, path in enumerate(results)]
