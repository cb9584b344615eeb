"""Runs a function in real gloo processes and returns the result of each.

The processes are forked from one that has imported torch and our packages, which would take seconds per rank. They are
new each time, so no rank has state from an earlier test.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.helpers.repository import ROOT
from utils.distributed.join import join_run, leave_run
from utils.process.launch import read_launch, torchrun_variables
from utils.process.spawn import free_port

# Modules that most of the functions use. The process that forks the ranks imports them once.
_PRELOADED = ["torch._dynamo", "torch.distributed", "pytest", "engine.run.build", "engine.evaluation.evaluator"]
START_TIMEOUT_S = 60  # in which all ranks must be running


@dataclass(frozen=True)
class _RankLaunch:
    """What all ranks of a launch are given.

    Attributes:
        environment: the variables of this process.
        world, local_world: processes in all, and on each node.
        port: where rank 0 opens the store.
        folder: gets a file with the result of each rank, named after it.
        timeout_s: of the process group.
        all_started: passed once all ranks are running.
        function, args: called with the context of the rank before ``args``.
    """

    environment: dict[str, str]
    world: int
    local_world: int
    port: int
    folder: str
    timeout_s: float
    all_started: Barrier
    function: Callable
    args: tuple

    def variables(self, rank: int) -> dict[str, str]:
        """Returns the environment of a rank."""
        return {
            **self.environment,
            **torchrun_variables(rank, self.world, self.port),
            "LOCAL_RANK": str(rank % self.local_world),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(rank // self.local_world),
        }


def _run_rank(rank: int, launch: _RankLaunch) -> None:
    """Runs the function as one rank, and writes what it returns, or its exception."""
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ |= launch.variables(rank)
    try:
        launch.all_started.wait(START_TIMEOUT_S)  # so that ``timeout_s`` does not include the start of the others
        ctx = join_run(read_launch(), "cpu", timeout_s=launch.timeout_s)
        result = launch.function(ctx, *launch.args)
        leave_run(ctx)
    except BaseException as error:
        traceback.print_exc()
        result = error
    Path(launch.folder, str(rank)).write_bytes(pickle.dumps(result))
    if isinstance(result, BaseException):
        os._exit(0)  # as utils.process.main ends what has failed in a group


def _start_server() -> None:
    """Starts the process that forks the ranks, unless it runs."""
    mp.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # or it would look for the packages here
        forkserver.ensure_running()


def run_ranks(
    world: int,
    function: Callable,
    *args: Any,
    local_world: int | None = None,
    timeout_s: float = 60,
    lost: int | None = None,
) -> list[Any]:
    """Runs ``function(ctx, *args)`` on ``world`` ranks. Returns their return values, or exceptions, by rank.

    ``timeout_s`` is that of the process group. The rank ``lost`` dies during the run; its result is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        _start_server()
        launch = _RankLaunch(
            environment=dict(os.environ),
            world=world,
            local_world=local_world or world,
            port=free_port(),
            folder=folder,
            timeout_s=timeout_s,
            all_started=mp.get_context("forkserver").Barrier(world),
            function=function,
            args=args,
        )
        processes = mp.start_processes(_run_rank, (launch,), world, start_method="forkserver", join=False)
        while lost is None and not processes.join():
            pass
        for process in processes.processes:
            process.join()
        results = [Path(folder, str(rank)) for rank in range(world)]
        return [None if rank == lost else pickle.loads(path.read_bytes()) for rank, path in enumerate(results)]
