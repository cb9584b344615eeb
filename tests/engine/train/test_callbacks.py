"""--callbacks: what is refused before data is read, and real runs that callbacks watch, end and break."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import train
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL, call, error_of, run_python
from tests.helpers.tiny import write_dataset, write_model
from utils.files.torch_file import read_checkpoint

HOOKS = """
import json
import math
import os
import signal
import sys


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
        assert sum(p.numel() for p in run.model.parameters()) > 0
        self.seen.append(["epoch", run.epoch, run.step, run.metrics["metrics/AP"]])

    def on_end(self, run):
        assert run.settings["epochs"] == run.epochs
        name = f"seen{run.rank}of{run.world_size}.json"
        (run.folder / name).write_text(json.dumps(self.seen))


class StopAtStep(Watch):
    def on_step(self, run):
        super().on_step(run)
        if run.step == 4 and run.rank == run.world_size - 1:
            run.stop()


class Breaks:
    def on_step(self, run):
        if run.step == 2 and run.rank == run.world_size - 1:
            run.step / 0


class BreaksLast:
    def on_end(self, run):
        sys.exit("too late")


class SignaledLast:
    def on_end(self, run):
        os.kill(os.getpid(), signal.SIGTERM)


class Typo:
    def on_epoch_end(self, run):
        pass


"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_hooks.py").write_text(HOOKS)
    (tmp_path / "user_broken.py").write_text("import user_hooks\nx = 1 +\n")
    (tmp_path / "user_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "source",
    [*("user_hooks", "user_hook:Watch", "user_broken:x", "user_exits:x", "user_hooks:Wach", "user_hooks:Typo")],
)
def test_a_wrong_object_is_one_line_before_anything_is_read(folder, capsys, source):
    unread = write_dataset(folder / "set", train=0, val=0)
    line = error_of(capsys, train.main, *SMALL, "--data", unread, "--callbacks", source)
    assert line.startswith(f"error: --callbacks {source}: ")
    assert not (folder / "runs").exists()


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


def test_callbacks_follow_the_run_and_change_nothing(folder):
    run(folder, "--name", "plain")
    run(folder, "--callbacks", "user_hooks:Watch")
    calls = seen(folder)
    epochs = [
        [["step", epoch, 3 * epoch + n] for n in (1, 2, 3)] + [["epoch", epoch + 1, 3 * epoch + 3]] for epoch in (0, 1)
    ]
    assert [call[:3] for call in calls] == [["start", 0, 0], *epochs[0], *epochs[1]]
    last = (folder / "runs" / "exp" / "results.csv").read_text().splitlines()
    row = dict(zip(last[0].split(","), last[-1].split(",")))
    assert calls[-1][3] == pytest.approx(float(row["metrics/AP"]))
    plain, watched = (read_checkpoint(folder / "runs" / name / "last.pt") for name in ("plain", "exp"))
    assert all(bool((value == watched["model"][name]).all()) for name, value in plain["model"].items())


def test_a_run_that_a_callback_ends_is_saved_and_continues_with_its_callbacks(folder):
    run(folder, "--callbacks", "user_hooks:StopAtStep")
    assert seen(folder)[-1][0] == "step"
    hooks = (folder / "user_hooks.py").rename(folder / "away.py")
    more = ("--resume", "runs/exp/last.pt", "--epochs", "3", "--callbacks", "user_hooks:StopAtStep")
    assert "error: --callbacks user_hooks:" in run(folder, *more, expect=2).stderr
    hooks.rename(folder / "user_hooks.py")
    run(folder, *more)
    assert [call[0] for call in seen(folder)] == ["start", "epoch", "step", "step", "step", "epoch"]
    assert len((folder / "runs" / "exp" / "results.csv").read_text().splitlines()) == 4


def test_a_signal_after_the_last_epoch_loses_neither_the_end_of_the_run_nor_its_exports(folder, monkeypatch):
    exported = []
    monkeypatch.setattr("engine.commands.export.export", lambda config, *, by_training: exported.append(config.format))
    write_dataset(folder / "set", train=4, val=2)
    write_model(folder / "tiny.yaml")
    flags = ["--data", "set/data.yaml", "--model", "tiny.yaml", "--project", "runs", "--epochs", "1", *SMALL]
    call(train.main, *flags, "--callbacks", "user_hooks:SignaledLast", "--export", "torchscript")
    assert "done: 1 epoch" in (folder / "runs" / "exp" / "train.log").read_text()
    assert exported == [["torchscript"]]


@pytest.mark.slow
def test_two_processes_end_together(folder):
    """The last rank requests the end."""
    run(folder, "--callbacks", "user_hooks:StopAtStep", "--epochs", "4", processes=2)
    assert read_checkpoint(folder / "runs" / "exp" / "last.pt")["progress"]["updates"] < 12
    assert seen(folder, "seen0of2.json") == seen(folder, "seen1of2.json")


@pytest.mark.parametrize(
    ("name", "processes", "error", "updates"),
    [
        ("Breaks", 1, "ZeroDivisionError", 3),
        ("BreaksLast", 1, "SystemExit", 6),
        pytest.param("Breaks", 2, "ZeroDivisionError", 4, marks=pytest.mark.slow),
    ],
)
def test_a_callback_that_raises_ends_the_run_with_a_checkpoint_one_line_and_the_traceback(
    folder, name, processes, error, updates
):
    done = run(folder, "--callbacks", f"user_hooks:{name}", expect=2, processes=processes)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"--callbacks user_hooks:{name}: " in line
    assert error in line
    assert done.stdout.count("Traceback") == 1
    assert str(folder / "user_hooks.py") in done.stdout
    assert read_checkpoint(folder / "runs" / "exp" / "last.pt")["progress"]["updates"] <= updates
    if name == "BreaksLast":
        assert "done: 2 epochs" in done.stdout  # the other hooks are called
    else:
        assert "done: 2 epochs" in run(folder, "--resume", "runs/exp/last.pt", "--callbacks", "").stdout
