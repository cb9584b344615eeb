"""Runs a function in real gloo processes and brings back what each returns."""

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

from utils.distributed import DistributedContext, _free_port


def _enter(rank: int, world: int, port: int, folder: str, local_world: int, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local_world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(rank // local_world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        ctx = DistributedContext.from_environment("cpu", timeout_s=60)
        result: Any = function(ctx, *args)
        ctx.close()
    except BaseException as error:
        traceback.print_exc()
        result = error
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))


def run_ranks(world: int, function: Callable, *args: Any, local_world: int | None = None) -> list[Any]:
    """``function(ctx, *args)`` on ``world`` ranks; a list of what they returned (or raised), by rank."""
    with tempfile.TemporaryDirectory() as folder:
        extra = (world, _free_port(), folder, local_world or world, function, args)
        mp.start_processes(_enter, extra, world, start_method="spawn")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]
