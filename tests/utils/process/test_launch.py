"""Launches: the variables of launchers, and real processes with them."""

from __future__ import annotations

import pytest

import detect
from tests.helpers.messages import refused
from utils.process.launch import Launch, environment_of_child, read_launch, require_one_process, torchrun_variables
from utils.process.main import run_main

LAUNCH = torchrun_variables(1, 2, 29500)
STEP = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[003-004]"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (LAUNCH, Launch(1, 2, 1, 2, 0, "127.0.0.1", 29500)),
        (LAUNCH | STEP, Launch(1, 2, 1, 2, 0, "127.0.0.1", 29500)),  # torchrun's processes under srun
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}, None),  # sbatch
        (STEP | {"SLURM_PTY_PORT": "4000", "SLURM_PROCID": "0"}, None),  # srun --pty bash
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_positions_are_read_from_the_launcher_s_variables(environ, expected):
    assert read_launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (LAUNCH | {"RANK": "two"}, "RANK is 'two'; ..."),
        (LAUNCH | {"RANK": "2"}, "...impossible...RANK=2..."),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "...RANK, WORLD_SIZE, LOCAL_RANK..."),
    ],
)
def test_variables_of_no_launcher_are_one_line_that_names_them(environ, message):
    with refused(message):
        read_launch(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (STEP, "srun has started 4 separate processes"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, "mpirun has started 3 separate processes"),
    ],
)
def test_copies_of_one_process_are_one_line(monkeypatch, environ, message):
    with refused(f"{message}; use torchrun or --spawn"):
        read_launch(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with refused(f"{message}; start it once"):
        require_one_process("tools.demo", "start it once")


def test_a_single_process_may_have_variables_that_a_cluster_exports_to_all(monkeypatch):
    """Neither it nor the trainings that it starts are among several processes."""
    for name, value in {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    require_one_process("detect.py", "start it once")
    assert read_launch(environment_of_child()) is None


def test_a_program_for_one_process_is_refused_once_under_a_launcher(capsys, monkeypatch):
    """Its settings are known to be valid then, but no file has been opened."""
    monkeypatch.setattr("utils.process.main.PEER_GRACE_S", 0.0)
    for rank in range(2):
        for name, value in torchrun_variables(rank, 2, 29500).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run_main(detect.main, ["--weights", "none.pt", "--source", "."])
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1 - rank)
        assert ("runs in one process" in err) == (rank == 0)
