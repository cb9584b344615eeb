"""Processes join a run: missing ones, those that contradict each other, and errors that are reported once."""

from __future__ import annotations

import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.messages import refused
from tests.helpers.processes import Processes
from tests.helpers.repository import ROOT
from utils.distributed import join
from utils.errors import PeerLost
from utils.process.launch import Launch, torchrun_variables
from utils.process.spawn import free_port


def launch_of(rank: int, world_size: int, port: int) -> Launch:
    return Launch(rank, world_size, rank, world_size, 0, "127.0.0.1", port)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with refused("3 processes on a node with 2 GPUs: ..."):
        join.join_run(launch_of(2, 3, free_port()))


def test_what_does_not_come_ends_the_wait_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(join, "LOG_AFTER_S", 0.5)
    port = free_port()
    with pytest.raises(PeerLost, match=f"rank 1 of 2 did not join 127.0.0.1:{port}"):
        join.join_run(launch_of(0, 2, port), "cpu", timeout_s=1)
    assert f"still waiting: rank 1 of 2 did not join 127.0.0.1:{port}" in caplog.messages
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


def test_processes_that_contradict_each_other_are_refused():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        pool.submit(join.join_run, launch_of(1, 2, port), "cpu", eval_ranks=1, timeout_s=3)
        with refused("process 0 has WORLD_SIZE 2 and --eval-ranks 0, process 1 has WORLD_SIZE 2 and --eval-ranks 1"):
            join.join_run(launch_of(0, 2, port), "cpu")


PROGRAM = """
import os, signal, sys
import torch.distributed as dist
from utils.distributed.context import max_over_ranks
from utils.distributed.join import joined_run
from utils.errors import UserError
from utils.process.launch import read_launch
from utils.process.main import run_main
from utils.process.spawn import spawn

def work(code):
    with joined_run(read_launch(), "cpu") as ctx:
        max_over_ranks(ctx, 1)
        exec(code)

def main(argv):
    work(*argv) if read_launch() else spawn(work, 2, argv)

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
"""
DIES = "if ctx.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nmax_over_ranks(ctx, 1)"


def nccl(title: str, text: str) -> str:
    """Returns code that raises an error as NCCL's, in two processes without GPUs."""
    message = f"NCCL error in: NCCLUtils.cpp:94, {title} (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\n"
    return f"raise dist.DistBackendError({message + text!r})"


SAME_GPU = nccl(
    "invalid usage",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
)
REMOTE = nccl(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer node0<4321>",
)


@pytest.mark.parametrize(
    ("launcher", "code", "line"),
    [
        ("torchrun", "raise UserError('a mistake')", "a mistake"),
        ("torchrun", DIES, "another process of this run has ended"),
        ("spawn", SAME_GPU, "NCCL failed: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"),
        ("torchrun", REMOTE, "another process of this run has ended; its launcher prints why (socketProgress: "),
    ],
)
def test_a_failure_of_a_run_is_one_line(tmp_path, launcher, code, line):
    (tmp_path / "program.py").write_text(PROGRAM)
    port = free_port()
    launched = [torchrun_variables(rank, 2, port) for rank in range(2)] if launcher == "torchrun" else [{}]
    with Processes(tmp_path / "log") as run:
        for variables in launched:
            run.start([run.python, str(tmp_path / "program.py"), code], PYTHONPATH=str(ROOT), **variables)
        assert set(run.codes()) <= {2, -signal.SIGKILL}, run.output()
        # Both may say it if the store ends with the first one.
        (said,) = {text for text in run.output().splitlines() if text.startswith("error: ")}
        assert line in said
        assert "Traceback" not in run.output()
