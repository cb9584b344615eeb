"""Processes join a run: their places and devices, missing or contradictory ones, and errors that are reported once."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.helpers.messages import refused
from tests.helpers.processes import Processes
from tests.helpers.ranks import run_ranks
from tests.helpers.repository import ROOT
from utils.distributed import join
from utils.distributed.context import DistributedContext
from utils.errors import PeerLost, UserError
from utils.process.launch import Launch, torchrun_variables
from utils.process.spawn import free_port

CPU = {"device": torch.device("cpu"), "devices": (torch.device("cpu"),)}


@pytest.mark.parametrize(
    ("gpus", "processes", "devices"),
    [
        (1, 2, [0, 0]),  # each may see another GPU as its number 0; `_check_own_gpu` finds out
        (2, 2, [0, 1]),
        (2, 3, [0, 1, None]),
        (0, 2, ["cpu", "cpu"]),
    ],
)
def test_each_process_of_a_node_uses_its_own_gpu(monkeypatch, gpus, processes, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for rank, device in enumerate(devices):
        launch = Launch(rank, processes, rank, processes, 0, "h", 1)
        with refused(f"{processes} processes on a node with {gpus} GPUs: ...") if device is None else nullcontext():
            expected = device if device == "cpu" else f"cuda:{device}"
            assert join._place(launch, "", 0).device == torch.device(expected)


def test_evaluating_processes_have_ranks_and_gpus_of_their_own(monkeypatch):
    """The table in the docstring of the module."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    launches = [Launch(rank, 6, rank % 3, 3, rank // 3, "h", 1) for rank in range(6)]
    places = [join._place(launch, "", 2) for launch in launches]
    assert [(ctx.rank, ctx.world_size) for ctx in places] == [(0, 4), (1, 4), (2, 4), (3, 4), (0, 2), (1, 2)]
    local = [(ctx.local_rank, ctx.local_world_size) for ctx in places]
    assert local == [(0, 3), (1, 3), (2, 3), (0, 1), (0, 2), (1, 2)]
    assert [ctx.first_rank for ctx in places] == [0] * 4 + [4] * 2
    assert [ctx.device.index for ctx in places] == [0, 1, 2, 0, 1, 2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(join._place(Launch(1, 2, 1, 2, 0, "h", 1), "", 1).device) == "cpu"  # the only GPU trains


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(join, "LOG_AFTER_S", 0.5)


def launch_of(rank: int, world_size: int, port: int, **more: object) -> Launch:
    return Launch(rank, world_size, rank, world_size, 0, "127.0.0.1", port, **more)


def open_in_thread(launch: Launch, eval_ranks: int = 0, timeout_s: float = 30) -> tuple[threading.Thread, list]:
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(join._open_store(launch, eval_ranks, timeout_s))
        except (UserError, RuntimeError) as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


@pytest.mark.usefixtures("soon")
def test_the_first_process_names_missing_ones_until_all_have_joined(caplog):
    port = free_port()
    started = [open_in_thread(launch_of(rank, 3, port)) for rank in (0, 2)]
    deadline = time.monotonic() + 25
    while not any("rank 1 of 3 did not join" in message for message in caplog.messages):
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.05)
    started.append(open_in_thread(launch_of(1, 3, port)))
    for thread, outcome in started:
        thread.join(30)
        assert not isinstance(outcome[0], str), outcome


@pytest.mark.usefixtures("soon")
def test_what_does_not_come_ends_the_wait_with_one_line():
    port = free_port()
    with pytest.raises(PeerLost, match=f"rank 1 of 2 did not join 127.0.0.1:{port}"):
        join.join_run(launch_of(0, 2, port), "cpu", timeout_s=1)
    port = free_port()
    with pytest.raises(PeerLost, match=f"cannot form the process group at 127.0.0.1:{port}: "):
        join.join_run(launch_of(1, 2, port), "cpu", timeout_s=1)


def test_a_port_in_use_is_one_line():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PeerLost, match="is the port taken"):
            join.join_run(launch_of(0, 1, port), "cpu", timeout_s=1)


@pytest.mark.parametrize(
    ("rank", "world_size", "eval_ranks", "line"),
    [
        (0, 3, 0, "two processes were started as rank 0"),
        (1, 3, 0, "two processes were started as rank 1"),
        (2, 4, 0, "process 0 has WORLD_SIZE 3 and --eval-ranks 0, process 2 has WORLD_SIZE 4 and"),
        (2, 3, 1, "process 0 has WORLD_SIZE 3 and --eval-ranks 0, process 2 has WORLD_SIZE 3 and --eval-ranks 1"),
    ],
)
def test_processes_that_contradict_each_other_are_refused_by_the_first(rank, world_size, eval_ranks, line):
    port = free_port()
    first, outcome = open_in_thread(launch_of(0, 3, port))
    open_in_thread(launch_of(1, 3, port))
    dist.TCPStore("127.0.0.1", port, wait_for_workers=False).wait(["lockstep/1/arrived"])  # the first has begun
    open_in_thread(launch_of(rank, world_size, port, is_hosted=True), eval_ranks)
    first.join(30)
    assert line in outcome[0]


def test_only_processes_of_one_start_join_in_a_store_that_outlives_them():
    """Each start leaves its keys in torchrun's store. A process that was restarted alone waits for the next start, and
    so does one that comes before the others."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    launches = [launch_of(rank, 2, port, is_hosted=True, run_id="1") for rank in range(2)]
    for _ in range(3):
        early, outcome = open_in_thread(launches[1])  # the first time before the others, then restarted alone
        time.sleep(0.3)
        assert not outcome
        first, outcome_of_first = open_in_thread(launches[0])
        first.join(30)
        early.join(30)
        outcome_of_first[0].set("key", "of this start")
        assert outcome[0].get("key") == b"of this start"
    # No process waits any more: it would contradict this one, which has another number of processes.
    alone, outcome_of_alone = open_in_thread(launch_of(0, 1, port, is_hosted=True, run_id="1"))
    alone.join(30)  # a node has left
    assert not outcome_of_alone[0].check(["key"])
    del server


def _fail(ctx, error):
    """Raises in all processes, as `joined_run` sees it."""
    try:
        raise join._once(ctx.store, error)
    except Exception as raised:
        return type(raised).__name__


@pytest.mark.parametrize(
    ("error", "first", "others"),
    [
        (UserError("a mistake"), "UserError", "PeerFailure"),
        (MemoryError(), "MemoryError", "PeerFailure"),
        (LookupError("a bug"), "LookupError", "LookupError"),
    ],
)
def test_a_failure_of_all_processes_is_reported_once(error, first, others):
    assert sorted(run_ranks(3, _fail, error)) == sorted([first, others, others])


LOSES = """
import os, signal, sys, time
from utils.distributed.context import max_over_ranks
from utils.distributed.join import joined_run
from utils.process.launch import read_launch
from utils.process.main import run_main

def main(argv):
    with joined_run(read_launch(), "cpu") as ctx:
        max_over_ranks(ctx, 1)
        print("joined", flush=True)
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        max_over_ranks(ctx, 1)

run_main(main)
"""


def test_a_process_whose_peer_is_killed_in_a_collective_ends_with_one_line(tmp_path):
    with Processes(tmp_path / "log") as run:
        (tmp_path / "loses.py").write_text(LOSES)
        port = free_port()
        for rank in range(2):
            variables = torchrun_variables(rank, 2, port)
            run.start([run.python, str(tmp_path / "loses.py")], PYTHONPATH=str(ROOT), **variables)
        assert run.codes() == [2, -signal.SIGKILL], run.output()
        (line,) = [line for line in run.output().splitlines() if line.startswith("error: ")]
        assert "another process of this run has ended" in line
        assert "Traceback" not in run.output()


FAILS = """
import sys
import torch.distributed as dist
from utils.distributed.join import joined_run
from utils.process.launch import read_launch
from utils.process.main import run_main
from utils.process.spawn import spawn

def work(message):
    with joined_run(read_launch(), "cpu"):
        raise dist.DistBackendError(message)

def main(argv):
    work(*argv) if read_launch() else spawn(work, 2, argv)

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
"""
NCCL_ERROR = "NCCL error in: NCCLUtils.cpp:94, {} (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\n{}"
OUT_OF_MEMORY = NCCL_ERROR.format(
    "unhandled cuda error",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'\n",
)
SAME_GPU = NCCL_ERROR.format(
    "invalid usage",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
)
REMOTE = NCCL_ERROR.format(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer node0<4321>",
)


@pytest.mark.parametrize(
    ("launcher", "message", "line"),
    [
        ("spawn", OUT_OF_MEMORY, "NCCL failed: Cuda failure 2 'out of memory'"),
        ("torchrun", OUT_OF_MEMORY, "NCCL failed: Cuda failure 2 'out of memory'"),
        ("spawn", SAME_GPU, "NCCL failed: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"),
        (
            "torchrun",
            NCCL_ERROR.format("internal error", ""),
            "NCCL failed: NCCL error in: NCCLUtils.cpp:94, internal error",
        ),
        ("spawn", REMOTE, "lost its connection to another one"),
        ("torchrun", REMOTE, "another process of this run has ended; its launcher prints why (socketProgress: "),
    ],
)
def test_a_failure_of_nccl_is_one_line(tmp_path, launcher, message, line):
    """Its errors are raised in two processes without GPUs."""
    (tmp_path / "fails.py").write_text(FAILS)
    port = free_port()
    launched = [torchrun_variables(rank, 2, port) for rank in range(2)] if launcher == "torchrun" else [{}]
    with Processes(tmp_path / "log") as run:
        for variables in launched:
            run.start([run.python, str(tmp_path / "fails.py"), message], PYTHONPATH=str(ROOT), **variables)
        assert set(run.codes()) == {2}, run.output()
        # Both may say it if the store ends with the first one.
        (said,) = {text for text in run.output().splitlines() if text.startswith("error: ")}
        assert line in said
        assert "Traceback" not in run.output()


def test_process_0_leaves_last_and_waits_for_evaluating_processes_too(monkeypatch):
    """The store ends with it, and others may still read from it."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(join, "LEAVE_S", 60.0)
    store = dist.HashStore()
    first = DistributedContext(rank=0, local_rank=0, world_size=2, eval_ranks=1, store=store, **CPU)
    second = DistributedContext(rank=1, local_rank=1, world_size=2, eval_ranks=1, store=store, **CPU)
    evaluating = join.evaluation_store(store)
    third = DistributedContext(rank=0, local_rank=0, world_size=1, first_rank=2, store=evaluating, **CPU)
    leaving = threading.Thread(target=join.leave_run, args=(first,), daemon=True)
    leaving.start()
    for context in (second, third):
        leaving.join(0.1)
        assert leaving.is_alive()
        join.leave_run(context)
    leaving.join(20)
    assert not leaving.is_alive()
