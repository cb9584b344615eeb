"""--callbacks: what is refused before data is read, and real runs that hooks watch, end and break."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train
from engine.checkpoint.progress import Progress
from engine.hooks.callbacks import RunState, UserCallbacks, load_callbacks
from engine.hooks.hook import Epoch, Hook, Hooks, Training
from engine.hooks.writers import ResultsCsv
from engine.run.results_csv import ResultsTable
from engine.run.run import TrainingOutcome
from models.detector import build_detector
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL, error_of, run_python
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model
from tests.helpers.training import hook_training
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import FailedCheck, UserError
from utils.files.torch_file import read_checkpoint

HOOKS = '''
"""Hooks of a user."""
import json
import math
import os

import torch


class Watch:
    def __init__(self):
        self.seen = []

    def on_start(self, run):
        self.seen.append(["start", run.epoch, run.step])

    def on_step(self, run):
        assert all(math.isfinite(v) or run.step % run.steps_per_epoch == 1 for v in run.losses.values())
        self.seen.append(["step", run.epoch, run.step])

    def on_epoch(self, run):
        assert set(run.metrics) >= {"time", "train/box", "metrics/AP", "val/box"}
        parameters = sum(p.numel() for p in run.model.parameters())
        self.seen.append(["epoch", run.epoch, run.step, run.metrics["metrics/AP"], run.settings["lr0"], parameters])

    def on_end(self, run):
        name = f"seen{run.rank}of{run.world_size}.json"
        (run.folder / name).write_text(json.dumps(self.seen))


class StopAtStep(Watch):
    def on_step(self, run):
        super().on_step(run)
        if run.step == 4 and run.rank == run.world_size - 1:
            run.stop()


class StopAtEpoch:
    def on_epoch(self, run):
        if run.epoch == 1 and run.is_main:
            run.stop()


class Breaks:
    def on_step(self, run):
        if run.step == 2 and run.rank == run.world_size - 1:
            run.step / 0


class BreaksFirst:
    def on_start(self, run):
        open("/nonexistent/file")


class BreaksLast:
    def on_end(self, run):
        raise RuntimeError("too late\\nsecond line")


class Typo:
    def on_epoch_end(self, run):
        pass


class Needs:
    def __init__(self, argument):
        pass


class Refuses:
    def __init__(self):
        raise ValueError("no")


class Exits:
    def on_step(self, run):
        if run.rank == 1:
            os._exit(run.settings["seed"])


class Computed:
    @property
    def on_epoch(self):
        raise LookupError("too early")


class Silent(Exception):
    def __str__(self):
        return self.absent


class BreaksBadly:
    def on_epoch(self, run):
        run.settings.clear()
        raise Silent


def on_epoch(run):
    pass


class Empty:
    on_step = None


nothing = object()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_hooks.py").write_text(HOOKS)
    (tmp_path / "user_broken.py").write_text("import user_hooks\nx = 1 +\n")
    (tmp_path / "user_lacks.py").write_text("\nimport nowhere_to_be_found\n")
    (tmp_path / "user_raises.py").write_text("def f():\n    raise SystemExit(3)\nf()\n")
    monkeypatch.chdir(tmp_path)
    path = sys.path[:]
    yield tmp_path
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("user_hooks", "must be MODULE:OBJECT, such as hooks:Hooks for the class Hooks of hooks.py"),
        (":Watch", "must be MODULE:OBJECT, such as hooks:Hooks for the class Hooks of hooks.py"),
        ("user_hook:Watch", "ModuleNotFoundError: No module named 'user_hook'"),
        ("user_broken:x", ".../user_broken.py:2: SyntaxError: invalid syntax"),
        ("user_lacks:x", ".../user_lacks.py:2: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("user_raises:x", ".../user_raises.py:2: SystemExit: 3"),
        ("utils:Needs", "AttributeError: module 'utils' has no attribute 'Needs'"),
        ("user_hooks:Wach", "AttributeError: module 'user_hooks' has no attribute 'Wach'"),
        (
            "user_hooks:Typo",
            "'on_epoch_end' is not a callback (did you mean 'on_epoch'?); callbacks are on_start, on_step, on_epoch, "
            "on_end",
        ),
        ("user_hooks:Refuses", ".../user_hooks.py:72: ValueError: no"),
        ("user_hooks:Needs", "TypeError: Needs.__init__() missing 1 required positional argument: 'argument'"),
        ("user_hooks:Computed", ".../user_hooks.py:84: LookupError: too early"),
        ("user_hooks:Empty", "on_step is not callable; callbacks are on_start, on_step, on_epoch, on_end"),
        ("user_hooks:nothing", "has no callback; callbacks are on_start, on_step, on_epoch, on_end"),
    ],
)
def test_a_wrong_object_is_one_line_before_anything_is_read(folder, capsys, source, message):
    with refused(f"--callbacks {source}: {message}") as caught:
        load_callbacks(source, ResultsTable())
    unread = ["--data", str(write_dataset(folder / "set", train=0, val=0))]
    assert error_of(capsys, train.main, *SMALL, *unread, "--callbacks", source) == f"error: {caught.value}"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("user_calls:Both", ["start", "epoch"]),
        ("user_calls:on_epoch", ["function"]),
        ("user_package.inner:user_calls", ["function"]),
        ("user_package.inner:ready", ["start", "epoch"]),
    ],
)
def test_classes_functions_modules_and_objects_have_callbacks(folder, source, calls):
    (folder / "user_package").mkdir()
    (folder / "user_package" / "inner.py").write_text("import user_calls\nready = user_calls.Both()\n")
    (folder / "user_calls.py").write_text(
        "calls = []\n"
        "class Both:\n"
        "    def on_start(self, run): calls.append('start')\n"
        "    def on_epoch(self, run): calls.append('epoch')\n"
        "def on_epoch(run): calls.append('function')\n"
    )
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2))
    trainer = hook_training(folder, step=step)
    hooks = Hooks([load_callbacks(source, ResultsTable())])
    hooks.call("start", trainer)
    hooks.call("after_epoch", trainer, Epoch(1))
    assert sys.modules["user_calls"].calls == calls


def run(folder: Path, *flags: str, expect: int = 0, epochs: int = 2, processes: int = 1) -> subprocess.CompletedProcess:
    if not (folder / "set").exists():
        write_dataset(folder / "set", train=12, val=4)
        write_model(folder / "tiny.yaml")
    new = ["--data", "set/data.yaml", "--model", "tiny.yaml", "--project", "runs", "--epochs", epochs, *SMALL]
    spawned = ["--spawn", processes] if processes > 1 else []
    given = [*(new if "--resume" not in flags else []), *flags, *spawned]
    return run_python(ROOT / "train.py", *given, folder=folder, code=expect)


def seen(folder: Path, name: str = "seen0of1.json") -> list:
    return json.loads((folder / "runs" / "exp" / name).read_text())


def test_hooks_follow_the_run_and_change_nothing(folder):
    run(folder, "--name", "plain")
    run(folder, "--callbacks", "user_hooks:Watch")
    calls = seen(folder)
    assert [call[:3] for call in calls] == [
        ["start", 0, 0], ["step", 0, 1], ["step", 0, 2], ["step", 0, 3], ["epoch", 1, 3],
        ["step", 1, 4], ["step", 1, 5], ["step", 1, 6], ["epoch", 2, 6],
    ]  # fmt: skip
    last = (folder / "runs" / "exp" / "results.csv").read_text().splitlines()
    row = dict(zip(last[0].split(","), last[-1].split(",")))
    assert calls[-1][3] == pytest.approx(float(row["metrics/AP"]))
    plain, watched = (read_checkpoint(folder / "runs" / name / "last.pt") for name in ("plain", "exp"))
    assert all(bool((value == watched["model"][name]).all()) for name, value in plain["model"].items())
    assert calls[-1][5] == sum(v.numel() for k, v in plain["model"].items() if k.endswith(("weight", "bias")))


def test_a_signal_during_the_import_of_hooks_is_not_their_error(folder):
    (folder / "user_slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command = [python(), str(ROOT / "train.py"), *SMALL, "--callbacks", "user_slow:Watch"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 75)


@pytest.mark.parametrize("status", [pytest.param(3, marks=pytest.mark.slow), 0])
def test_a_process_that_a_hook_ends_is_named_with_its_status(folder, status):
    done = run(folder, "--callbacks", "user_hooks:Exits", "--seed", str(status), expect=2, processes=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: process 1 of 2 ended with status {status} without a message")


def test_a_run_that_a_hook_ends_is_saved_and_continues_with_its_hooks(folder):
    done = run(folder, "--callbacks", "user_hooks:StopAtStep")
    assert "ended by a callback after the steps of epoch 2; continue with: --resume runs/exp/last.pt" in done.stdout
    assert seen(folder)[-1][0] == "step"
    hooks = (folder / "user_hooks.py").rename(folder / "away.py")
    done = run(folder, "--resume", "runs/exp/last.pt", expect=2)
    assert "error: --callbacks user_hooks:StopAtStep: ModuleNotFoundError: No module named 'user_hooks'" in done.stderr
    hooks.rename(folder / "user_hooks.py")
    done = run(folder, "--resume", "runs/exp/last.pt")
    assert "done: 2 epochs" in done.stdout
    assert [call[0] for call in seen(folder)] == ["start", "epoch"]
    assert len((folder / "runs" / "exp" / "results.csv").read_text().splitlines()) == 3


@pytest.mark.slow
def test_two_processes_end_together(folder):
    """The last rank requests the end in a step, rank 0 after an epoch."""
    done = run(folder, "--callbacks", "user_hooks:StopAtStep", "--epochs", "4", processes=2)
    assert done.stdout.count("ended by a callback after the steps of epoch 2;") == 1
    first, second = (seen(folder, f"seen{rank}of2.json") for rank in range(2))
    assert first == second
    done = run(folder, "--callbacks", "user_hooks:StopAtEpoch", "--name", "two", "--epochs", "4", processes=2)
    assert done.stdout.count("ended by a callback after 1 epoch") == 1


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_hook_that_raises_ends_the_run_with_a_checkpoint_and_one_line(folder, processes):
    done = run(folder, "--callbacks", "user_hooks:Breaks", expect=2, processes=processes)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    at = next(number for number, text in enumerate(HOOKS.splitlines(), 1) if "run.step / 0" in text)
    assert f"on_step failed: {folder}/user_hooks.py:{at}: ZeroDivisionError: division by zero" in line
    assert "continue with: --resume runs/exp/last.pt" in line
    assert "Traceback" not in done.stderr
    log = (folder / "runs" / "exp" / "train.log").read_text()
    assert log.count("Traceback") == 1
    assert "run.step / 0\n" in log
    (folder / "user_hooks.py").write_text(HOOKS.replace("run.step / 0", "pass"))
    assert "done: 2 epochs" in run(folder, "--resume", "runs/exp/last.pt", processes=processes).stdout


@pytest.mark.slow
def test_a_hook_that_raises_before_or_after_training_also_leaves_a_checkpoint(folder):
    """A resume needs no hooks."""
    done = run(folder, "--callbacks", "user_hooks:BreaksFirst", expect=2)
    assert f"on_start failed: {folder}/user_hooks.py:" in done.stderr
    assert "FileNotFoundError" in done.stderr
    assert read_checkpoint(folder / "runs" / "exp" / "last.pt")["progress"]["updates"] == 0
    done = run(folder, "--callbacks", "user_hooks:BreaksLast", "--name", "late", expect=2, epochs=1)
    assert "done: 1 epoch; " in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "RuntimeError: too late second line" in line
    assert line.endswith("; when it is fixed, write the report with: --resume auto --project runs --name late")
    assert read_checkpoint(folder / "runs" / "late" / "last.pt")["progress"]["epoch"] == 1
    (folder / "user_hooks.py").unlink()
    assert "done: 2 epochs" in run(folder, "--resume", "runs/exp/last.pt", "--callbacks", "").stdout


def test_an_error_without_a_text_is_one_line(folder):
    done = run(folder, "--callbacks", "user_hooks:BreaksBadly", expect=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "--callbacks user_hooks:BreaksBadly: on_epoch failed: " in line
    assert "Silent: <exception str() failed>; the traceback is in runs/exp/train.log" in line


@pytest.mark.parametrize("records", [False, True], ids=["report alone", "pending epoch"])
def test_metrics_are_the_newest_row_at_every_point(tmp_path, records):
    """This includes the time before the first epoch of this start, a start without epochs (``--resume auto`` writes an
    interrupted report), and an epoch whose scores came after the last call of on_epoch (``--eval-ranks``)."""
    seen = []
    table = ResultsTable()
    for number in (1, 2, 3):
        table.add(number, {"time": float(number), "metrics/AP": number / 10})
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2))
    trainer = hook_training(tmp_path, step=step, progress=Progress(epoch=2))
    callbacks = dict.fromkeys(("on_start", "on_end"), lambda state: seen.append(state.metrics["metrics/AP"]))
    hooks = Hooks([ResultsCsv(tmp_path / "results.csv", table), UserCallbacks("", callbacks, None, table)])
    hooks.call("start", trainer)
    if records:
        hooks.call("record", trainer, Epoch(3, {"time": 9.0, "metrics/AP": 0.7}))
    hooks.call("finish", trainer)
    assert seen == [0.2, 0.7 if records else 0.2]


@pytest.mark.parametrize("export_fails", [False, True])
def test_a_failing_on_end_skips_neither_other_hooks_nor_exports(tmp_path, monkeypatch, caplog, export_fails):
    """The other hooks, such as the summary, and ``--export`` still run. An error of the export does not hide that of
    the callback."""
    happened = []

    class Later(Hook):
        def finish(self, trainer: Training) -> None:
            happened.append("summary")

    def break_down(state: RunState) -> None:
        raise ValueError("too late")

    def export(*_: object, failure: UserError | None) -> None:
        assert failure is not None  # it is logged before the first export
        happened.append("export")
        if export_fails:
            raise FailedCheck("onnx: failed")

    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2))
    trainer = hook_training(tmp_path, config=TrainConfig(export=["onnx"]), step=step, progress=Progress(epoch=1))
    callbacks = UserCallbacks("--callbacks user:Hooks", {"on_end": break_down}, None, ResultsTable())
    hooks = Hooks([callbacks, Later()])
    hooks.call("start", trainer)
    hooks.call("finish", trainer)
    outcome = TrainingOutcome(trainer.run.folder, trainer.run.config, trainer.control.late_failure("go on"))
    monkeypatch.setattr(train, "_start", lambda *_: outcome)
    monkeypatch.setattr("engine.commands.export.export_best", export)
    with refused(
        "--callbacks user:Hooks: on_end failed: ...: ValueError: too late; the traceback is in .../train.log; "
        "when it is fixed, go on"
    ):
        train.main([])
    assert happened == ["summary", "export"]
    assert ("--export: onnx: failed" in caplog.messages) == export_fails
