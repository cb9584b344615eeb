"""Processes that `spawn` starts: how their ends are reported, and how many may be started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.preloaded import python
from tests.helpers.processes import LAUNCHED, ROOT
from utils.distributed import spawn as spawning
from utils.distributed.launch import torchrun_variables
from utils.distributed.spawn import check_processes
from utils.errors import PeerFailure, UserError

PROGRAM = """
import os, signal, sys, time
from utils.distributed.spawn import spawn
from utils.entrypoint import run_main
from utils.errors import PeerFailure, UserError

def work(end):
    if os.environ["RANK"] == "0" and end != "'nothing'":
        time.sleep(60)
    exec(end)

def main(argv):
    spawn(work, 2, argv, run=run_main)
    print("all done")

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        ("os._exit(3)", 2, "error: process 1 of 2 ended with status 3 and without a message"),
        ("os._exit(1)", 2, "error: process 1 of 2 ended with status 1 and without a message"),
        ("os._exit(0)", 2, "error: process 1 of 2 ended with status 0 and without a message"),
        ("sys.exit(4)", 2, "error: process 1 of 2 ended with status 4 and without a message"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, "error: process 1 of 2 was killed by SIGKILL; is there enough"),
        ("raise UserError('wrong flag')", 2, "error: wrong flag"),
        ("raise ValueError('a bug')", 2, "ValueError: a bug"),
        ("'nothing'", 0, ""),
    ],
)
def test_the_end_of_each_process_is_reported_once(tmp_path, end, code, line):
    (tmp_path / "program.py").write_text(PROGRAM)
    begun = time.monotonic()
    done = subprocess.run(
        [python(), str(tmp_path / "program.py"), end],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1:]
    assert [text[: len(line)] for text in last] == ([line] if line else [])
    assert done.stderr.count("rror: ") == bool(line), done.stderr
    assert done.stdout == ("" if code else "all done\n")
    assert time.monotonic() - begun < 50


@pytest.mark.parametrize(("given", "code"), [("", 143), ("stop_code=75", 75)])
def test_a_signal_before_processes_handle_it(tmp_path, given, code):
    program = PROGRAM.replace("run=run_main)", f"run=run_main, {given})")
    (tmp_path / "program.py").write_text(program)
    process = subprocess.Popen(
        [python(), str(tmp_path / "program.py"), "print('begun', flush=True); time.sleep(60)"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == code


SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "99", "SLURM_STEP_NUM_TASKS": "99", "SLURM_STEP_NUM_NODES": "1",
         "SLURM_STEP_NODELIST": "gpu003"}  # fmt: skip


@pytest.fixture
def small_machine(monkeypatch) -> None:
    """Four cores of which launched processes see one, memory for eight processes, and no GPU."""
    monkeypatch.setattr(spawning, "available_cores", lambda affinity_of: 4 if affinity_of in (0, os.getppid()) else 1)
    monkeypatch.setattr(spawning, "available_memory", lambda: 8 * spawning.PROCESS_BYTES)
    monkeypatch.setattr(os, "listdir", lambda _: ["null", "zero"])
    for name in (*LAUNCHED, *SLURM, "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("count", "device", "threads", "files", "line"),
    [
        (4, "cpu", 0, [], ""),
        (5, "cpu", 0, [], "5 processes on 4 CPU cores; start at most 4, or add --threads 1 if they shall share"),
        (5, "", 0, [], "5 processes on 4 CPU cores"),
        (5, "", None, [], "5 processes on 4 CPU cores; start at most 4$"),  # val.py
        (5, "", 0, ["nvidia0"], ""),
        (5, "cpu", 0, ["nvidia0"], "5 processes on 4 CPU cores"),
        (8, "cpu", 1, [], ""),
        (9, "cpu", 1, [], "9 processes need about 5.4 GB before the first batch, and 4.8 GB are free; start at most 8"),
        (9, "0", 0, ["nvidia0"], "9 processes need about 5.4 GB"),
    ],
)
@pytest.mark.parametrize("flag", ["--spawn", "--nproc_per_node"])
def test_more_processes_than_the_machine_carries_are_refused(monkeypatch, flag, count, device, threads, files, line):
    monkeypatch.setattr(os, "listdir", lambda _: ["null", *files])
    if flag == "--nproc_per_node":
        for name, value in {**torchrun_variables(0, count, 5), "TORCHELASTIC_RUN_ID": "1"}.items():
            monkeypatch.setenv(name, value)
    spawned = count if flag == "--spawn" else 0
    if not line:
        check_processes(spawned, device, None, None, threads=threads)
        return
    with pytest.raises(UserError, match=f"^{flag} {count}: .*{line}"):
        check_processes(spawned, device, None, None, threads=threads)


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
                check_processes(0, "cpu", None, None, threads=0)
            else:
                with pytest.raises(expected):
                    check_processes(0, "cpu", None, None, threads=0)


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
