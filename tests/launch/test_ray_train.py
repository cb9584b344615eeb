"""launch/ray_train.py, on a real cluster of this machine where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.same_bits import leaves
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from utils.files.torch_file import read_checkpoint

SCRIPT = "launch/ray_train.py"
FLAGS = "--data demo --model yolov8n --imgsz 64 --epochs 4 --fraction 0.05 --batch-size 8 --device cpu --threads 1"
FLAGS = [*FLAGS.split(), "--workers", "0", "--noplots", "--optimizer", "SGD"]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def test_a_killed_process_resumes_and_the_bits_are_those_of_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "train.py"]
    subprocess.run([*torchrun, *FLAGS, "--project", str(tmp_path / "torchrun")], cwd=ROOT, check=True)
    command = [sys.executable, SCRIPT, "--workers", "2", "--", *FLAGS, "--project", str(tmp_path / "ray")]
    table = tmp_path / "ray" / "exp" / "results.csv"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        while not (table.exists() and len(table.read_text().splitlines()) > 2):
            assert job.poll() is None
            time.sleep(0.1)
        os.kill(max(training_processes(tmp_path / "ray" / "exp")), signal.SIGKILL)
        output, _ = job.communicate()
    assert job.returncode == 0, output
    assert "done: " in output
    same_tensors(*(tmp_path / name / "exp" / "last.pt" for name in ("ray", "torchrun")))


def test_ctrl_c_saves_the_state_though_ray_ends_its_workers_at_once(tmp_path):
    command = [sys.executable, SCRIPT, "--", *FLAGS, "--epochs", "1000", "--project", str(tmp_path)]
    folder = tmp_path / "exp"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        while not (folder / "results.csv").exists():
            assert job.poll() is None
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate()
    assert job.returncode == 130, output
    assert f"stopped: {folder}; the same command resumes it" in output
    deadline = time.monotonic() + 60
    while "stopped by a signal" not in (folder / "train.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def training_processes(folder: Path) -> list[int]:
    """Returns the processes that have a file in ``folder`` open: rank 0 has the log."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if folder in link.readlink().parents:
                found.add(int(link.parts[2]))
    return sorted(found)


def same_tensors(*files: Path) -> None:
    found = (dict(leaves(read_checkpoint(file))) for file in files)
    assert_same_content(*({place: v for place, v in values.items() if isinstance(v, torch.Tensor)} for values in found))
