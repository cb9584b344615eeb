"""How a command ends: its exit code, and what it prints or tells the process that started it."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.repository import ROOT
from utils.errors import FailedCheck, PeerFailure, Stopped, UserError
from utils.process.child import read_result
from utils.process.main import run_main


def failing(error: BaseException) -> Callable:
    """Returns a main function that raises ``error``."""

    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("data.yaml:3: no such\n folder"), 2, "data.yaml:3: no such folder\n"),
        (FailedCheck("a.onnx: differs"), 1, "a.onnx: differs\n"),
        (PeerFailure("rank 0 failed"), 2, ""),
        (PeerFailure("rank 0 failed", 1), 1, ""),
        (Stopped(75), 75, ""),
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 2, "runs/x: the disk is full;"),
        (OSError(errno.EIO, "Input/output error", "set/a.png"), 2, "set/a.png: input/output error;"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), 2, "a/b: read-only file system;"),
        (MemoryError(), 2, "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), 2, "not enough memory on the GPU"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "not enough memory on this machine"),
        (RuntimeError("CUDA error: no kernel image is available"), 2, "torch or torchvision has no kernels"),
        (RuntimeError("received 0 items of ancdata"), 2, "too many open files; raise the limit"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 2, "no more processes can be started"),
        (ModuleNotFoundError("No module named 'cv4'", name="cv4"), 2, "the package cv4 is not installed; pip install"),
    ],
)
def test_an_error_has_its_exit_code_and_one_line(error, code, line, capsys, monkeypatch, result_file):
    monkeypatch.setattr("utils.process.main.PEER_GRACE_S", 0)
    for is_child in (False, True):
        if is_child:  # the process that started it prints the line
            monkeypatch.setenv("LOCKSTEP_RESULT", str(result_file))
        with pytest.raises(SystemExit) as stop:
            run_main(failing(error))
        assert stop.value.code == code
        printed = capsys.readouterr().err
        told = read_result(result_file).get("error", "")
        assert bool(printed) == (bool(line) and not is_child)
        assert (f"{told}\n" if is_child and line else printed.removeprefix("error: "))[: len(line)] == line


@pytest.mark.parametrize(
    "error", [LookupError("no such\nkey"), ModuleNotFoundError("no such\nmodule", name="engine.stepp")]
)
def test_a_bug_has_a_traceback(error, capsys, monkeypatch, result_file):
    monkeypatch.setenv("LOCKSTEP_RESULT", str(result_file))
    with pytest.raises(SystemExit) as stop:
        run_main(failing(error))
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")
    assert read_result(result_file)["error"].startswith(f"{type(error).__name__}: ")


MISSPELLED = """
import multiprocessing, sys
from multiprocessing import resource_tracker
from importlib import import_module
from utils.process.main import run_main
weights, none = sys.argv[1:]
resource_tracker.ensure_running()
multiprocessing.set_executable("/bin/false")  # the processes that --spawn starts
for name, *flags in (
    ("val", "--weights", f"{none}.pt"), ("detect", "--weights", f"{none}.pt", "--source", "0"),
    ("train", "--data", "demo", "--spawn", "2", "--device", "cpu"),
    ("val", "--weights", weights, "--spawn", "2", "--device", "cpu"),
):
    try:
        run_main(import_module(name).main, flags)
    except SystemExit as ended:
        refused = 1 if "--spawn" in flags else 2  # 1: that of /bin/false
        assert ended.code == refused, (name, flags)
    assert "torch" not in sys.modules, (name, flags)
"""


def test_misspelled_paths_are_refused_and_processes_spawned_before_torch_is_imported(tmp_path: Path):
    """Importing it takes seconds, which the parent would add to the start of its processes."""
    weights = tmp_path / "best.pt"
    weights.touch()
    command = [sys.executable, "-c", MISSPELLED, str(weights), str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2  # those that /bin/false ends print nothing
    assert all(line.startswith("error: ") for line in lines)
