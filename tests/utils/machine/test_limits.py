"""Machine errors end a command with one line and exit code 2, and leave no run folder; with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
import val
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model
from utils.errors import UserError
from utils.machine.limits import explain_limit
from utils.process.main import run_main

KILLING = """
import multiprocessing, os, signal, sys
import train
from engine.train.step import TrainStep
from utils.process.main import run_main

take = TrainStep.__call__

def step(self, batches, images, updates, **options):
    if updates == 2:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    take(self, batches, images, updates, **options)

TrainStep.__call__ = step
run_main(train.main)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=40)
    write_model(root / "tiny.yaml")
    return root


def flags(inputs: Path, project: Path) -> list[str]:
    data = str(inputs / "set" / "data.yaml")
    model = str(inputs / "tiny.yaml")
    return ["--data", data, "--model", model, *SMALL, "--epochs", "1", "--project", str(project / "runs")]


def run(program: str, *argv: str) -> subprocess.CompletedProcess:
    command = [python(), "-c", program, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def line_of(ended: subprocess.CompletedProcess) -> str:
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("error: ")
    return ended.stderr


def test_a_killed_loader_worker_is_one_line(inputs, tmp_path):
    line = line_of(run(KILLING, *flags(inputs, tmp_path), "--workers", "1"))
    assert "a loader process was killed by SIGKILL; is there enough memory?" in line


def test_a_missing_package_is_reported_only_where_it_is_needed(inputs, tmp_path, capsys, monkeypatch):
    """Before the images are read; a run that does not need them works without them."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]
    for name in {"matplotlib", *loaded}:
        monkeypatch.setitem(sys.modules, name, None)
    given = [f for f in flags(inputs, tmp_path) if f != "--noplots"]
    line = error_of(capsys, train.main, *given, "--data", write_dataset(tmp_path / "set", train=0, val=0))
    assert "the package matplotlib is not installed; pip install matplotlib, or use --" in line
    run_main(train.main, [*given, "--noplots"])
    last = tmp_path / "runs" / "exp" / "last.pt"
    assert last.exists()
    assert "pip install matplotlib" in error_of(capsys, val.main, "--weights", last, "--device", "cpu")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ..."),
            "not enough memory on the GPU (2.50 GiB more was requested); ADVICE",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to "
                "allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "not enough memory on this machine (4.00 GiB more was requested); ADVICE",
        ),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device\nSearch for `cuda"),
            "torch or torchvision has no kernels for this GPU; install a build for it, or use --device cpu",
        ),
        (OSError(12, "Cannot allocate memory"), "not enough memory on this machine; ADVICE"),
        (ImportError("libopenblas.so: failed to map segment from shared object", name="numpy"), "not enough memory"),
        (RuntimeError("received 0 items of ancdata"), "too many open files"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "no more processes can be started; raise the limit"),
        (OSError(5, "Input/output error", "x/a.txt"), "x/a.txt: input/output error; the disk or network file system"),
        (ModuleNotFoundError("No module named 'cv4'", name="cv4"), "cv4 is not installed; pip install"),
    ],
)
def test_machine_errors_are_explained_in_one_line(error, line):
    assert line in explain_limit(error, "ADVICE")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ModuleNotFoundError("No module named 'engine.stepp'", name="engine.stepp"),
        OSError(2, "No such file or directory"),
        UserError("--cache ram: Cannot allocate memory"),
    ],
)
def test_bugs_and_user_errors_are_not_explained_as_machine_errors(error):
    assert explain_limit(error) is None
