"""launch/ray_train.py, on a real cluster of this machine where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.preloaded import python

ROOT = Path(__file__).parents[2]
SCRIPT = "launch/ray_train.py"
HAS_RAY = importlib.util.find_spec("ray") is not None
FLAGS = "--data demo --model yolov8n --imgsz 64 --epochs 4 --fraction 0.05 --batch-size 8 --device cpu --threads 1"
FLAGS = [*FLAGS.split(), "--workers", "0", "--noplots", "--optimizer", "SGD"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume"], "--resume after --: --storage and --name say where the run is, and Ray resumes it"),
        (["--name=a"], "--name after --"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
    ],
)
def test_flags_that_cannot_be(flags, message):
    done = subprocess.run([python(), SCRIPT, "--storage", "x", "--", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray():
    done = subprocess.run([python(), SCRIPT, "--storage", "x"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: Ray is not installed: pip install -r requirements-ray.txt\n"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_a_killed_process_resumes_and_the_bits_are_those_of_torchrun(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "train.py"]
    subprocess.run([*torchrun, *FLAGS, "--project", str(tmp_path / "torchrun")], cwd=ROOT, env=environment, check=True)
    command = [sys.executable, SCRIPT, "--workers", "2", "--storage", str(tmp_path / "ray"), "--", *FLAGS]
    table = tmp_path / "ray" / "exp" / "results.csv"
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as job:
        while not (table.exists() and len(table.read_text().splitlines()) > 2):
            assert job.poll() is None
            time.sleep(0.1)
        found = subprocess.run(["pgrep", "-f", f"train.*{tmp_path}/ray"], capture_output=True, text=True, check=True)
        os.kill(max(map(int, found.stdout.split())), signal.SIGKILL)
        output, _ = job.communicate()
    assert job.returncode == 0, output
    assert "done: " in output
    assert list((tmp_path / "ray" / "ray" / "exp").glob("checkpoint_*/last.pt"))
    ours, theirs = (tensors(tmp_path / name / "exp" / "last.pt") for name in ("ray", "torchrun"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found = {}

    def visit(value, name):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{name}/{key}")

    visit(torch.load(path, weights_only=True), "")
    return found
