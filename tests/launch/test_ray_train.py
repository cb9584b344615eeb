"""launch/ray_train.py, on a real cluster of this machine where Ray is installed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.same_bits import leaves
from launch import ray_train
from tests.helpers.same_content import same_content
from tests.helpers.scripts import run_python
from utils.files.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]
SCRIPT = "launch/ray_train.py"
HAS_RAY = importlib.util.find_spec("ray") is not None
FLAGS = "--data demo --model yolov8n --imgsz 64 --epochs 4 --fraction 0.05 --batch-size 8 --device cpu --threads 1"
FLAGS = [*FLAGS.split(), "--workers", "0", "--noplots", "--optimizer", "SGD"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "--resume"], "--resume after --: --storage and --name say where the run is, and Ray resumes it"),
        (["--", "--name=a"], "--name after --"),
        (["--", "--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--workers", "1:"], "--workers 1:: must be a number from 1, or two as in 1:4"),
        (["--workers=2:1"], "--workers 2:1: must be"),
        (["--workers", "0"], "--workers 0: must be"),
        (["--name", ".."], "--name '..': must be the name of a folder, without its path"),
        (["--name", ""], "--name '': must be the name of a folder, without its path"),
        (["--name", "a\nb"], r"--name 'a\nb': must be the name of a folder, without its path"),
    ],
)
def test_flags_that_cannot_be(flags, message):
    done = run_python(SCRIPT, "--storage", "x", *flags, code=2)
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


def test_no_address_of_a_store_leads_out_of_the_cache():
    """Workers replace the folder of a run whose checkpoints come from a store."""
    for storage in ("s3://a/../../../../..", "s3://../../../../", "s3:///etc", "s3://" + "a" * 300):
        options = argparse.Namespace(storage=storage, name="work", search=False, gpus=0)
        folder = ray_train.read_job(options, []).folder
        assert folder.parent.parent == Path.home() / ".cache/lockstep/ray"
        assert folder.resolve() == folder


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray():
    done = run_python(SCRIPT, "--storage", "x", code=2)
    assert done.stderr == 'error: Ray is not installed: pip install "ray[default,train]"\n'


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
    same_tensors(*(tmp_path / name / "exp" / "last.pt" for name in ("ray", "torchrun")))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_a_stopped_job_resumes_from_a_store_where_the_folder_is_gone(tmp_path):
    """pyarrow's file system of a URI stands for S3's."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    store = tmp_path / "store" / "exp"
    command = [sys.executable, SCRIPT, "--storage", f"file://{tmp_path}/store", "--", *FLAGS]
    output = interrupted(command, store / "checkpoint_manager_snapshot.json", environment)
    assert f"stopped: file://{tmp_path}/store/exp; the same command resumes it" in output
    shutil.rmtree(tmp_path / ".cache" / "lockstep" / "ray")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 1: precision" not in done.stdout + done.stderr
    straight = [sys.executable, "train.py", *FLAGS, "--project", str(tmp_path / "straight")]
    subprocess.run(straight, cwd=ROOT, env=environment, check=True)
    same_tensors(max(store.glob("checkpoint_*/last.pt")), tmp_path / "straight" / "exp" / "last.pt")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_refused_data_ends_the_job_at_once_with_one_line(tmp_path):
    (tmp_path / "d.yaml").write_text("train: nosuch\nval: nosuch\nnames: [a]\n")
    command = [sys.executable, SCRIPT, "--storage", str(tmp_path / "my runs"), "--", *FLAGS]
    command[command.index("demo")] = str(tmp_path / "d.yaml")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    printed = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    (line,) = printed
    assert line.startswith(f"error: {tmp_path}/nosuch: not found (named by {tmp_path}/d.yaml); ")
    assert "RETRY" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_ctrl_c_saves_the_state_though_ray_ends_its_workers_at_once(tmp_path):
    flags = [*FLAGS, "--epochs", "1000"]
    command = [sys.executable, SCRIPT, "--storage", str(tmp_path), "--", *flags]
    folder = tmp_path / "exp"
    output = interrupted(command, folder / "results.csv", os.environ)
    assert f"stopped: {folder}; the same command resumes it" in output
    deadline = time.monotonic() + 60
    while "stopped by a signal after" not in (folder / "train.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def interrupted(command: list[str], path: Path, environment: Mapping[str, str]) -> str:
    """The output of a job that gets Ctrl-C as soon as ``path`` exists."""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as job:
        while not path.exists():
            assert job.poll() is None
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate()
    assert job.returncode == 130, output
    return output


def same_tensors(*files: Path) -> None:
    found = (dict(leaves(read_checkpoint(file))) for file in files)
    same_content(*({place: v for place, v in values.items() if isinstance(v, torch.Tensor)} for values in found))
