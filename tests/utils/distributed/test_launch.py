"""Launches: the variables of launchers, real processes with them, and how many may be started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple

import pytest
import torch

import detect
import export
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.processes import LAUNCHED, ROOT
from tools.check.__main__ import main as check
from tools.kfold.__main__ import main as kfold
from utils.distributed import launch as launching
from utils.distributed import rendezvous
from utils.distributed.launch import (
    Launch,
    _first_node,
    check_processes,
    is_launched,
    read_launch,
    torchrun_variables,
)
from utils.distributed.spawn import free_port
from utils.entrypoint import run_main
from utils.errors import PeerFailure
from utils.machine.resources import machine_name

STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[003-004]",
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}  # fmt: skip
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-1@1", "PMIX_RANK": "1"}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
AT = {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}


def process_of(environ: dict[str, str]) -> tuple | None:
    launch = read_launch(environ)
    return launch and astuple(launch)[:7]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (torchrun_variables(1, 2, 5), ("the environment", 1, 2, 1, 2, 0, "127.0.0.1")),
        (BY_HAND, ("the environment", 1, 2, None, None, None, "h")),
        (STEP, ("srun", 3, 4, 1, None, 1, "gpu003")),
        (STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, ("srun", 3, 4, 1, 4, 0, "127.0.0.1")),
        (STEP | AT | {"WORLD_SIZE": "4"}, ("srun", 3, 4, 1, None, 1, "h")),  # as batch scripts export them
        (OMPI, ("mpirun", 1, 2, 1, 2, 0, "127.0.0.1")),
        (OMPI | STEP | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
         ("mpirun", 1, 2, 0, 1, None, "gpu003")),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"} | AT, ("mpirun", 0, 3, None, None, None, "h")),
        (STEP | BY_HAND, ("the environment", 1, 2, None, None, None, "h")),  # torchrun's processes under srun
        # Processes of their own:
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}, None),  # sbatch
        (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (STEP | {"SLURM_PTY_PORT": "4000", "SLURM_PROCID": "0"}, None),  # srun --pty bash
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)  # fmt: skip
def test_positions_are_read_from_launchers_variables(environ, expected):
    assert process_of(environ) == expected
    assert is_launched(environ) == (expected is not None)


def test_all_tasks_of_a_job_use_one_port_that_depends_on_the_job():
    ports = {read_launch(environ=STEP | {"SLURM_PROCID": str(rank)}).port for rank in range(4)}
    assert len(ports) == 1
    assert ports != {read_launch(environ=STEP | {"SLURM_JOB_ID": "78"}).port}
    assert read_launch(environ=STEP | {"MASTER_PORT": "1234"}).port == 1234


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-007,9],login", "gpu003"), ("a,b", "a"), ("r[1-2]n[4,6]", "r1n4"), ("n-1.x[7]", "n-1.x7"), ("", "")],
)
def test_the_first_node_of_a_list_is_expanded(nodes, first):
    assert _first_node(nodes) == first


@pytest.mark.parametrize(
    "environ",
    [
        *({"RANK": "0", "WORLD_SIZE": "2", **AT, name: "two"} for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
        {**BY_HAND, "RANK": "-1"},
        {**BY_HAND, "RANK": "2"},
        {**BY_HAND, "MASTER_PORT": "99999"},
        BY_HAND | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "3"},
        AT,
        STEP | {"WORLD_SIZE": "8"},
        {"PMI_RANK": "0", "PMI_SIZE": "3"},
    ],
)
def test_contradictory_variables_are_one_line(environ):
    with refused():
        read_launch(environ)


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (detect.main, ["--weights", "a.pt", "--source", "."]),
        (export.main, ["--weights", "a.pt"]),
        (kfold, []),
        (check, ["demo"]),
    ],
)
def test_a_program_for_one_process_says_so_once_under_a_launcher(capsys, monkeypatch, main, argv):
    for rank in range(2):
        for name, value in torchrun_variables(rank, 2, 29500).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run_main(main, argv)
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1 - rank)
        assert ("runs in one process" in err) == (rank == 0)


REPORT = """
import json, sys
from utils.entrypoint import run_main

def main(argv):
    from utils.distributed.context import DistributedContext
    from utils.distributed.collectives import all_objects
    ctx = DistributedContext.from_environment("cpu", timeout_s=60)
    with ctx.closing():
        position = (ctx.rank, ctx.local_rank, ctx.world_size, ctx.local_world_size, ctx.node_rank)
        positions = all_objects(ctx, position)
        if ctx.is_main:
            print(json.dumps(positions))

if __name__ == "__main__":
    run_main(main)
"""


def run_positions(environments: list[dict[str, str]]) -> list[list[int]]:
    """(rank, local_rank, world_size, local_world_size, node_rank) of real processes with these environments, by
    rank."""
    base = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    started = [
        subprocess.Popen([python(), "-c", REPORT], cwd=ROOT, env=base | e, stdout=subprocess.PIPE, text=True)
        for e in environments
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    (line,) = [line for line in "".join(outputs).splitlines() if line.startswith("[[")]  # gloo, too, prints there
    return json.loads(line)


def srun(rank: int) -> dict[str, str]:
    return STEP | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank // 2), "SLURM_NODEID": str(rank % 2),
                   "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}  # fmt: skip


def by_hand(port: int, rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def test_processes_started_by_hand_find_their_positions():
    """With only RANK and WORLD_SIZE; the rest follows from the machines' names."""
    port = free_port()
    assert run_positions([by_hand(port, rank) for rank in range(2)]) == [[0, 0, 2, 2, 0], [1, 1, 2, 2, 0]]


def test_processes_under_mpirun_find_their_positions():
    ranks = [OMPI | {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r)} for r in range(2)]
    named = {"PMIX_NAMESPACE": f"test-{os.getpid()}"}
    assert run_positions([rank | named for rank in ranks]) == [[0, 0, 2, 2, 0], [1, 1, 2, 2, 0]]


@pytest.mark.slow
def test_processes_under_srun_find_their_positions():
    """The number of processes per node, which srun does not provide here, follows from the machines' names."""
    assert run_positions([srun(rank) for rank in range(4)]) == [[rank, rank, 4, 4, 0] for rank in range(4)]


class _Store:
    """A store for `all_gather_json` that already contains the values of the other processes."""

    def __init__(self, notes: list[list]) -> None:
        self.values = {f"node/{rank}": json.dumps(note).encode() for rank, note in enumerate(notes)}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([["a"], ["b"]], 0),  # one GPU for each task, which is its number 0
        ([["a", "b"], ["a", "b"]], 1),
        ([["a", "b"], ["c", "d"]], 1),
        ([["a"], ["a"]], None),
    ],
)
def test_each_process_of_a_node_uses_its_own_gpu(monkeypatch, seen, expected):
    """This is the second of two processes of one node."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen[1]))
    monkeypatch.setattr(rendezvous, "identities", lambda devices: seen[1])
    machine = machine_name()
    store = _Store([[machine, 0, 0, 2, seen[0]], [machine, 0, 1, 2, seen[1]]])
    launch = Launch("srun", 1, 2, 1, 2, 0, "h", 1)
    if expected is None:
        with refused():
            rendezvous._locate_on_node(store, launch, "")
    else:
        assert rendezvous._locate_on_node(store, launch, "").device == torch.device("cuda", expected)


@pytest.mark.parametrize(
    ("gpus", "processes", "expected"),
    [
        (["a", "b", "c"], 3, [(0, 2, "cuda:0"), (1, 2, "cuda:1"), (0, 1, "cuda:2")]),
        (["a", "b"], 3, [(0, 2, "cuda:0"), (1, 2, "cuda:1"), (0, 1, "cpu")]),
        (["a"], 3, [None, None, (0, 1, "cpu")]),
    ],
)
def test_evaluating_processes_take_the_gpus_that_are_left(monkeypatch, gpus, processes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(rendezvous, "identities", lambda devices: gpus)
    machine = machine_name()
    notes = [[machine, 0, rank, processes, gpus] for rank in range(processes)]
    for rank, position in enumerate(expected):
        launch = Launch("torchrun", rank, processes, rank, processes, 0, "h", 1)
        if position is None:
            with refused():
                rendezvous._locate_on_node(_Store(notes), launch, "", 1)
        else:
            found = rendezvous._locate_on_node(_Store(notes), launch, "", 1)
            assert (found.local_rank, found.local_world_size, str(found.device)) == position


def test_positions_follow_from_machine_names_without_launcher_variables():
    """Ranks alternate between two machines."""
    machine = machine_name()
    notes = [["other", None, None, None, []], [machine, None, None, None, []]] * 2
    found = rendezvous._locate_on_node(_Store(notes), Launch("mpirun", 3, 4, None, None, None, "h", 1), "cpu")
    assert found == (1, 2, 1, torch.device("cpu"))


SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "99", "SLURM_STEP_NUM_TASKS": "99", "SLURM_STEP_NUM_NODES": "1",
         "SLURM_STEP_NODELIST": "gpu003"}  # fmt: skip


@pytest.fixture
def small_machine(monkeypatch) -> None:
    """Four cores of which launched processes see one, memory for eight processes, and no GPU."""
    monkeypatch.setattr(launching, "available_cores", lambda affinity_of: 4 if affinity_of in (0, os.getppid()) else 1)
    monkeypatch.setattr(launching, "available_memory", lambda: 8 * launching.PROCESS_BYTES)
    monkeypatch.setattr(os, "listdir", lambda _: ["null", "zero"])
    for name in (*LAUNCHED, *SLURM, "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("count", "device", "threads", "files", "fits"),
    [
        (4, "cpu", 0, [], True),
        (5, "cpu", 0, [], False),
        (5, "", 0, [], False),
        (5, "", None, [], False),  # val.py
        (5, "", 0, ["nvidia0"], True),
        (5, "cpu", 0, ["nvidia0"], False),
        (8, "cpu", 1, [], True),
        (9, "cpu", 1, [], False),
        (9, "0", 0, ["nvidia0"], False),
    ],
)
@pytest.mark.parametrize("flag", ["--spawn", "--nproc_per_node"])
def test_more_processes_than_the_machine_carries_are_refused(monkeypatch, flag, count, device, threads, files, fits):
    monkeypatch.setattr(os, "listdir", lambda _: ["null", *files])
    if flag == "--nproc_per_node":
        for name, value in {**torchrun_variables(0, count, 5), "TORCHELASTIC_RUN_ID": "1"}.items():
            monkeypatch.setenv(name, value)
    spawned = count if flag == "--spawn" else 0
    if fits:
        check_processes(spawned, device, threads=threads)
        return
    with refused():
        check_processes(spawned, device, threads=threads)


@pytest.mark.usefixtures("small_machine")
def test_one_process_of_a_node_reports_too_many_and_other_launchers_count_themselves(monkeypatch):
    for environ, expected in [
        ({**torchrun_variables(5, 6, 5), "TORCHELASTIC_RUN_ID": "1"}, PeerFailure),
        (torchrun_variables(5, 99, 5), None),
        (SLURM, None),
    ]:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            if expected is None:
                check_processes(0, "cpu", threads=0)
            else:
                with pytest.raises(expected):
                    check_processes(0, "cpu", threads=0)


def test_too_many_processes_are_refused_before_torch_is_imported():
    environ = {**torchrun_variables(0, 999, 5), "TORCHELASTIC_RUN_ID": "1"}
    code = "import sys; from train import main; from utils.entrypoint import run_main\n"
    code += "try: run_main(main, ['--device', 'cpu', *sys.argv[1:]])\nfinally: print('torch' in sys.modules)"
    for variables, flags in ((environ, []), ({}, ["--spawn", "999"])):
        plain = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        done = subprocess.run(
            [sys.executable, "-c", code, *flags], cwd=ROOT, env=plain | variables, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
        assert done.stderr.count("\n") == 1
        assert "999 processes on " in done.stderr
