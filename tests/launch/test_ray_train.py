"""launch/ray_train.py, on a real cluster of this machine where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.same_bits import leaves
from launch import ray_train
from tests.helpers.messages import refused
from tests.helpers.same_content import same_content
from tests.helpers.scripts import error_of
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint
from utils.process.child import RunResult

ROOT = Path(__file__).parents[2]
SCRIPT = "launch/ray_train.py"
HAS_RAY = importlib.util.find_spec("ray") is not None
FLAGS = "--data demo --model yolov8n --imgsz 64 --epochs 4 --fraction 0.05 --batch-size 8 --device cpu --threads 1"
FLAGS = [*FLAGS.split(), "--workers", "0", "--noplots", "--optimizer", "SGD"]


@pytest.mark.parametrize(("given", "used"), [({}, "0"), ({"RAY_USAGE_STATS_ENABLED": "1"}, "1")])
def test_ray_reports_no_usage_unless_the_user_wants_it(monkeypatch, given, used):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []

    def import_ray(*_: str) -> None:
        seen.append(os.environ["RAY_USAGE_STATS_ENABLED"])
        raise UserError("not installed")

    monkeypatch.setattr(ray_train, "require_package", import_ray)
    with pytest.raises(UserError, match="not installed"):
        ray_train.main(["--", "--data", "demo"])
    assert seen == [used]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "--resume"], "leave out --resume and --spawn"),
        (["--", "--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--workers", "1:"], "--workers 1:: must be a number from 1, or two as in 1:4"),
        (["--workers=2:1"], "--workers 2:1: must be"),
        (["--workers", "0"], "--workers 0: must be"),
    ],
)
def test_flags_that_cannot_be(capsys, flags, message):
    line = error_of(capsys, ray_train.main, *flags)
    assert line.startswith(f"error: {message}")


RUNS = None
DONE = RunResult.of(0, {"folder": "exp"})
PEER_FAILED = RunResult.of(2, {})
REFUSED = RunResult.of(2, {"error": "--device 3: no such GPU", "refused": True})
FAILED = RunResult.of(2, {"error": "not finite", "folder": "exp", "refused": False})
KILLED = RunResult.of(-9, {})
STOPPED = RunResult.of(75, {"folder": "exp"})


@pytest.mark.parametrize(
    ("results", "is_over", "refusal"),
    [
        ([RUNS, RUNS], False, ""),
        ([RUNS, FAILED], True, ""),
        ([RUNS, REFUSED], True, "--device 3: no such GPU"),
        ([REFUSED, RUNS], True, "--device 3: no such GPU"),
        ([PEER_FAILED, RUNS], False, ""),  # the other one has a line, or is killed
        ([PEER_FAILED, REFUSED], True, "--device 3: no such GPU"),
        ([PEER_FAILED, PEER_FAILED], True, ""),
        ([RUNS, KILLED], True, ""),
        ([STOPPED, RUNS], True, ""),
        ([FAILED, PEER_FAILED], True, ""),
        ([RUNS, DONE], False, ""),
        ([DONE, RUNS], True, ""),
    ],
)
def test_a_refusal_by_any_process_ends_the_job(results, is_over, refusal):
    assert ray_train.is_over(results) == is_over
    assert ray_train.refusal_of(results) == refusal


def test_a_damaged_checkpoint_is_a_refusal_which_ray_does_not_retry(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    (tmp_path / "last.pt").write_bytes(b"x" * 100)
    plan = ray_train.make_plan(TrainConfig(), tmp_path)
    assert plan.refusal.startswith(f"{tmp_path}/last.pt: ")


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Returns a function that launches with flags, on a stand-in for the cluster that trains one epoch."""
    folder = tmp_path / "exp"

    def run(config: TrainConfig, options: object) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "last.pt").touch()

    monkeypatch.setattr(ray_train, "_connect", lambda address: None)
    monkeypatch.setattr(ray_train, "run", run)
    return lambda *flags: ray_train.main(["--", "--data", "demo", "--project", str(tmp_path), *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "other.yaml"], "exp: was begun with --data demo, not other.yaml; "),
        (["--model", "yolov8s"], "exp: was begun with --model yolov8n, not yolov8s; "),
        (["--set", "lr0=0.5"], "exp: was begun with hyper-parameter lr0 "),
        (["--epochs", "9", "--patience", "3", "--device", "cpu"], ""),
    ],
)
def test_another_training_in_the_folder_of_a_job_is_refused(launch, flags, message):
    """Else the first job's results would be reported as its own."""
    launch("--model", "yolov8n")
    launch("--model", "yolov8n")
    with refused(f"...{message}...") if message else nullcontext():
        launch("--model", "yolov8n", *flags)


def test_a_run_of_train_py_is_not_taken_for_one_of_ray(launch, tmp_path):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "results.csv").touch()
    with refused(".../exp: has a run that was not begun with launch/ray_train.py; choose another --name"):
        launch()


def test_settings_with_which_nothing_was_trained_may_be_corrected(launch, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(ray_train, "run", lambda *_: None)
        launch("--model", "yolov8m")
    launch("--model", "yolov8n")
    with refused("...was begun with --model yolov8n, not yolov8m; ..."):
        launch("--model", "yolov8m")


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray(capsys):
    assert 'is not installed; pip install "ray[default,train]", or start train.py' in error_of(capsys, ray_train.main)


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_a_killed_process_resumes_and_the_bits_are_those_of_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "train.py"]
    subprocess.run([*torchrun, *FLAGS, "--project", str(tmp_path / "torchrun")], cwd=ROOT, check=True)
    command = [sys.executable, SCRIPT, "--workers", "2", "--", *FLAGS, "--project", str(tmp_path / "ray")]
    table = tmp_path / "ray" / "exp" / "results.csv"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        while not (table.exists() and len(table.read_text().splitlines()) > 2):
            assert job.poll() is None
            time.sleep(0.1)
        found = subprocess.run(["pgrep", "-f", f"train.*{tmp_path}/ray"], capture_output=True, text=True, check=True)
        os.kill(max(map(int, found.stdout.split())), signal.SIGKILL)
        output, _ = job.communicate()
    assert job.returncode == 0, output
    assert "done: " in output
    same_tensors(*(tmp_path / name / "exp" / "last.pt" for name in ("ray", "torchrun")))


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_refused_data_ends_the_job_at_once_with_one_line(tmp_path):
    (tmp_path / "d.yaml").write_text("train: nosuch\nval: nosuch\nnames: [a]\n")
    command = [sys.executable, SCRIPT, "--", *FLAGS, "--project", str(tmp_path / "my runs")]
    command[command.index("demo")] = str(tmp_path / "d.yaml")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    printed = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stderr
    (line,) = printed
    assert line.startswith(f"error: {tmp_path}/nosuch: not found (named by {tmp_path}/d.yaml); ")
    assert "RETRY" not in done.stdout + done.stderr


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_a_refusal_of_one_process_ends_the_job_at_once(tmp_path):
    """That of rank 1, as its machine lacks a file."""
    (tmp_path / "user_one.py").write_text("import os\nassert os.environ['RANK'] == '0'\ndef on_end(run): pass\n")
    command = [sys.executable, str(ROOT / SCRIPT), "--workers", "2", "--", *FLAGS, "--callbacks", "user_one:on_end"]
    done = subprocess.run([*command, "--project", "runs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "user_one" in done.stderr.splitlines()[-1], done.stderr
    assert "RETRY" not in done.stdout + done.stderr


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
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
    while "stopped by a signal after" not in (folder / "train.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def same_tensors(*files: Path) -> None:
    found = (dict(leaves(read_checkpoint(file))) for file in files)
    same_content(*({place: v for place, v in values.items() if isinstance(v, torch.Tensor)} for values in found))
