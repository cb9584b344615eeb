"""launch/ray_train.py, on a real cluster of this machine where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.same_bits import leaves
from engine.train.checkpoint import Checkpoint
from launch import ray_train
from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model
from utils.config.parser import parse_config
from utils.config.settings import AUTO, TrainConfig
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint
from utils.process.child import RunResult, start_child
from utils.process.ports import free_port

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
        raise ModuleNotFoundError(name="ray")

    monkeypatch.setattr("utils.machine.packages.import_quietly", import_ray)
    with pytest.raises(UserError, match="not installed"):
        ray_train.main(["--", "--data", "demo"])
    assert seen == [used]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "--resume"], "leave out --resume and --spawn"),
        (["--", "--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--data", "x.yaml"], "unrecognized arguments: --data x.yaml; flags of train.py follow '--'"),
        (["--work", "2", "--"], "unrecognized arguments: --work 2 (did you mean '--workers'?)"),
        (["--workers", "1:"], "--workers 1:: must be a number, at least 1, or a range such as 1:4"),
        (["--workers=2:1"], "--workers 2:1: must be"),
        (["--workers", "0"], "--workers 0: must be"),
        (["--cpus", "0"], "--cpus 0: must be a whole number, at least 1"),
        (["--cpus", "2.5"], "--cpus 2.5: must be a whole number, at least 1"),
        (["--failures", "-3"], "--failures -3: must be a whole number, at least 0"),
    ],
)
def test_invalid_flags_are_refused(capsys, flags, message):
    line = error_of(capsys, ray_train.main, *flags)
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("flags", "variable", "source"),
    [
        (["--address", "10.0.0.1:1"], "10.0.0.2:2", "--address 10.0.0.1:1"),
        ([], "10.0.0.2:2", "RAY_ADDRESS=10.0.0.2:2"),
        ([], "", "a cluster on this machine"),
    ],
)
def test_the_error_names_the_cluster_address_as_given(monkeypatch, capsys, flags, variable, source):
    def init(**_: object) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(ray_train, "require_package", lambda *_: SimpleNamespace(init=init))
    line = error_of(capsys, ray_train.main, *flags, "--", "--data", "demo")
    assert line == f"error: {source}: nobody answers"


@pytest.mark.parametrize(("note", "epochs"), [("1", [2]), ("", [1, 2]), ("\0\0", [1, 2])])
def test_a_damaged_note_of_the_reported_epoch_does_not_end_the_job(tmp_path, note, epochs):
    (tmp_path / "results.csv").write_text("epoch,time\n1,1\n2,2\n")
    (tmp_path / ray_train.REPORTED_EPOCH).write_text(note)
    assert [row["epoch"] for row in ray_train.unreported_epochs(tmp_path)] == epochs


RUNS = None
DONE = RunResult.of(0, {"folder": "exp"})
PEER_FAILED = RunResult.of(2, {})
REFUSED = RunResult.of(2, {"error": "--device 3: no such GPU", "cause": "machine"})
LOST = RunResult.of(2, {"error": "process 1 was killed", "cause": "lost process"})
FAILED = RunResult.of(2, {"error": "not finite", "folder": "exp", "begun": True})
KILLED = RunResult.of(-9, {})
CRASHED = RunResult.of(-11, {})
BUG = RunResult.of(70, {"error": "RuntimeError: Connection refused"})
CRASHED_LATER = RunResult.of(-11, {"folder": "exp", "begun": True})
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
        ([LOST, RUNS], True, ""),
        ([RUNS, CRASHED], True, ""),
        ([BUG, RUNS], True, ""),
        ([BUG, REFUSED], True, "--device 3: no such GPU"),
        ([RUNS, CRASHED_LATER], True, ""),
        ([LOST, REFUSED], True, "--device 3: no such GPU"),
        ([RUNS, DONE], False, ""),
        ([DONE, RUNS], True, ""),
    ],
)
def test_a_refusal_by_any_process_ends_the_job(results, is_over, refusal):
    assert ray_train.is_over(results) == is_over
    assert ray_train.refusal_of(results) == refusal


def test_a_refusal_is_seen_after_the_loss_that_it_has_caused(tmp_path, work, monkeypatch):
    """Rank 1 is refused a moment after its worker has polled. A job that can never succeed is not tried again."""
    rounds = iter([(LOST, RUNS), (LOST, REFUSED)])
    monkeypatch.setattr(ray_train, "gather", lambda _: [ray_train.Status(result, []) for result in next(rounds)])
    with start_child(["true"]) as child:
        results = ray_train.report_until_done(tmp_path, child, rank=0)
    assert ray_train.refusal_of(results) == REFUSED.reason


class Context:
    """The only worker of a job, as `ray.train.get_context` describes it."""

    def get_world_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 1

    get_local_rank = get_node_rank = get_world_rank
    get_local_world_size = get_world_size


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Returns a function that does the work of a job's only worker, with its process of train.py, and a list of the
    epochs that are reported to Ray."""
    reported: list[int] = []
    ray = ModuleType("ray")
    ray.train = ModuleType("ray.train")
    ray.train.get_context = Context
    ray.train.report = lambda row: reported.append(int(row["epoch"]))
    ray.train.collective = ModuleType("ray.train.collective")
    ray.train.collective.broadcast_from_rank_zero = lambda value: value
    for name, module in {"ray": ray, "ray.train": ray.train, "ray.train.collective": ray.train.collective}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_train, "rendezvous_address", lambda: ("127.0.0.1", free_port()))
    monkeypatch.setattr(ray_train, "gather", lambda status: [status])
    monkeypatch.setattr(ray_train, "POLL_S", 0.1)
    write_dataset(tmp_path / "set", train=4, val=2)
    write_model(tmp_path / "tiny.yaml")

    def run(**settings: object) -> str:
        files = {"data": str(tmp_path / "set" / "data.yaml"), "model": str(tmp_path / "tiny.yaml")}
        small = parse_config(TrainConfig, [*SMALL, "--cache-dir", str(tmp_path), "--project", str(tmp_path)])
        config = replace(small, **files, resume=AUTO, **settings)
        return ray_train.run_worker(config, str(tmp_path))

    return run, reported


@pytest.mark.usefixtures("preloaded")
def test_a_job_goes_on_with_defaults_and_with_another_time(tmp_path, work):
    """It may have ended already. Rows that a lost worker has not reported are reported by the next one."""
    run, reported = work
    assert run(epochs=3, patience=1, cache="ram") == ""
    assert reported == [1, 2]  # the models of tests detect nothing
    (tmp_path / "exp" / ray_train.REPORTED_EPOCH).write_text("1")
    assert run(epochs=3) == ""
    assert reported == [1, 2, 2, 3]
    checkpoint = Checkpoint.read(tmp_path / "exp" / "last.pt")
    assert (checkpoint.description.config.patience, checkpoint.description.config.cache) == (0, "none")
    assert run(time=checkpoint.header.run.seconds * 1.4 / 3600) == ""
    in_time = reported[5:]
    assert [*reported[:5], *in_time] == [1, 2, 2, 3, 4, *range(5, 5 + len(in_time))]  # as many as fit
    more = reported[-1] + 1
    assert run(epochs=more) == ""  # in place of a time
    assert reported[-1] == more
    (tmp_path / "exp" / "last.pt").write_bytes(b"x" * 100)
    assert run(epochs=more + 1).startswith(f"{tmp_path}/exp/last.pt: ")  # Ray does not try again


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Returns a function that launches with flags, on a stand-in for the cluster that trains one epoch."""
    folder = tmp_path / "exp"

    def run(config: TrainConfig, options: object) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "last.pt").touch()

    monkeypatch.setattr(ray_train, "require_package", lambda *_: SimpleNamespace(init=lambda **_: None))
    monkeypatch.setattr(ray_train, "run", run)
    return lambda *flags: ray_train.main(["--", "--data", "demo", "--project", str(tmp_path), *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "other.yaml"], "exp: was started with --data demo, not ...; "),
        (["--model", "yolov8s"], "exp: was started with --model yolov8n, not yolov8s; "),
        (["--set", "lr0=0.5"], "exp: was started with hyper-parameter lr0 "),
        (["--epochs", "9", "--patience", "3", "--device", "cpu"], ""),
    ],
)
def test_another_training_in_the_folder_of_a_job_is_refused(launch, flags, message):
    """Otherwise, the results of the first job would be reported as its own."""
    launch("--model", "yolov8n")
    launch("--model", "yolov8n")
    with refused(f"...{message}...") if message else nullcontext():
        launch("--model", "yolov8n", *flags)


def test_a_run_of_train_py_is_not_taken_for_one_of_ray(launch, tmp_path):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "results.csv").touch()
    with refused(".../exp: has a run that was not started with launch/ray_train.py; choose another --name"):
        launch()


def test_settings_with_which_nothing_was_trained_may_be_corrected(launch, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(ray_train, "run", lambda *_: None)
        launch("--model", "yolov8m")
    launch("--model", "yolov8n")
    with refused("...was started with --model yolov8n, not yolov8m; ..."):
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
        os.kill(max(training_processes(tmp_path / "ray" / "exp")), signal.SIGKILL)
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
    """Rank 1 refuses because its machine lacks a file."""
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
