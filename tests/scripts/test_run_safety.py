"""Signals, crashes, hangs and restarts of real trainings: no step is lost and no process or file is left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

import train
from tests.helpers.preloaded import python
from tests.helpers.processes import FAULTY_TRAIN, Processes, position
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_run
from tests.helpers.scripts import error_of, training, write_inputs
from utils.files.locks import FileLock
from utils.process.spawn import free_port

STEPS = 7  # of an epoch
COMMON = ["--workers", "1", "--epochs", "2", "--optimizer", "SGD", "--save-minutes", "1e-6"]  # at each step
COMMON += ["--set", "close_mosaic=1", "close_scale=1"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), train=4 * STEPS)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """The uninterrupted run on two ranks (plain DDP, so their batch statistics differ within an epoch)."""
    folder = tmp_path_factory.mktemp("whole")
    with Processes(folder / "log.txt") as run:
        run.ranks(2, *flags(inputs, folder))
        assert run.codes() == [0, 0], run.output()
    return folder / "exp"


def flags(inputs: Path, project: Path, *more: str) -> list[str]:
    return training(inputs, project, *COMMON, *more)


def held_at(step: int, file: Path) -> str:
    """Returns the fault that makes both ranks wait before ``step`` until ``file`` exists, so that a test acts at a
    known step on any machine."""
    return ";".join(f"hold:{rank}:{step}:{file}" for rank in range(2))


def has_saved_a_step(folder: Path) -> bool:
    """Returns whether last.pt, which is there before the first step, is of a later moment."""
    return (folder / "last.pt").exists() and position(folder) != (0, 0)


def resume(project: Path, ranks: int = 2) -> None:
    with Processes(project / "resumed.txt") as run:
        run.ranks(ranks, "--resume", str(project / "exp"))
        assert run.codes() == [0] * ranks, run.output()


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGHUP, 75, id="hup"), pytest.param(signal.SIGINT, 130, id="int", marks=pytest.mark.slow)],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(inputs, whole, tmp_path, number, code):
    """The state is saved, no process is left, and resuming gives the uninterrupted run. Further signals do no harm."""
    go_on = tmp_path / "go on"
    with Processes(tmp_path / "log.txt", faults=held_at(4, go_on)) as run:
        run.ranks(2, *flags(inputs, tmp_path))
        run.until(lambda: has_saved_a_step(tmp_path / "exp"))
        run.started[1].send_signal(number)
        go_on.touch()
        for _ in range(20):
            run.started[0].send_signal(signal.SIGTERM if code == 75 else signal.SIGINT)
            time.sleep(0.02)
        assert run.codes() == [code, code], run.output()
        run.wait_gone()
        assert "Traceback" not in run.output()
        assert "continue with: --resume" in run.output()
    epoch, batch = position(tmp_path / "exp")
    assert epoch == 0
    assert 2 < batch < STEPS
    assert not list((tmp_path / "exp").glob(".*.tmp"))
    resume(tmp_path)
    assert_same_run(whole, tmp_path / "exp")


def test_a_run_that_nohup_has_started_goes_on_when_its_terminal_closes(inputs, tmp_path):
    go_on = tmp_path / "go on"
    with Processes(tmp_path / "log.txt", faults=f"hold:0:5:{go_on}", real=True) as run:
        train_it = [run.python, FAULTY_TRAIN, *flags(inputs, tmp_path, "--epochs", "1")]
        process = run.start(["nohup", *train_it])
        run.until(lambda: has_saved_a_step(tmp_path / "exp"))
        process.send_signal(signal.SIGHUP)
        go_on.touch()
        assert run.codes() == [0], run.output()
    assert position(tmp_path / "exp") == (1, 0)


@pytest.mark.slow
def test_a_kill_during_validation_keeps_the_epochs_steps(inputs, whole, tmp_path):
    """They are saved before validation, if they took at least a minute (here: none)."""
    faults = "slowval:30;set:engine.train.loop:SAVE_BEFORE_VALIDATION_S:0"
    with Processes(tmp_path / "log.txt", faults=faults) as run:
        run.ranks(2, *flags(inputs, tmp_path, "--save-minutes", "10"))
        run.until(lambda: has_saved_a_step(tmp_path / "exp"))
        run.kill_all()
    assert position(tmp_path / "exp") == (1, 0)
    resume(tmp_path)
    assert_same_run(whole, tmp_path / "exp")


def test_a_second_training_is_refused_in_the_same_run_folder(inputs, tmp_path, capsys, monkeypatch):
    """The second gets a line that names the first, however it was started; a killed one blocks nobody, nor do its
    remaining loader processes."""
    with Processes(tmp_path / "log.txt", faults=f"hold:0:5:{tmp_path / 'never'}") as run:
        run.ranks(1, *flags(inputs, tmp_path, "--epochs", "50"))
        run.until(lambda: has_saved_a_step(tmp_path / "exp"))
        acquire = FileLock.acquire
        monkeypatch.setattr(FileLock, "acquire", lambda lock, patience_s=0.0: acquire(lock))  # the first does not end
        for argv in (["--resume", tmp_path / "exp"], flags(inputs, tmp_path, "--exist-ok")):
            line = error_of(capsys, train.main, *argv)
            (pid,) = re.findall(r"exp: another process is training this run \(process (\d+) on ", line)
        os.kill(int(pid), signal.SIGKILL)
        assert run.started[0].wait() == -signal.SIGKILL
        with Processes(tmp_path / "third.txt") as third:
            third.ranks(1, "--resume", str(tmp_path / "exp"))
            third.until(lambda: " s after the start" in third.output())
            third.started[0].send_signal(signal.SIGTERM)
            assert third.codes() == [75], third.output()
        last_line = (tmp_path / "exp" / "train.log").read_text().splitlines()[-1]
        assert last_line == third.output().splitlines()[-1]
        assert last_line.endswith(f"; continue with: --resume {tmp_path / 'exp' / 'last.pt'}")


def test_torchrun_restarts_after_a_kill_and_ends_with_the_uninterrupted_weights(inputs, whole, tmp_path):
    """One worker is killed during an epoch; torchrun restarts all of them, and they find the run without a flag."""
    go_on = tmp_path / "go on"
    with Processes(tmp_path / "log.txt", faults=held_at(5, go_on)) as run:
        options = ["--standalone", "--nproc_per_node", "2", "--max-restarts", "3"]
        run.torchrun(options, *flags(inputs, tmp_path), agent=python())
        run.until(lambda: has_saved_a_step(tmp_path / "exp"))
        os.kill(run.launched()[-1], signal.SIGKILL)
        go_on.touch()
        assert run.codes() == [0], run.output()
        assert "resuming" in run.output()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["exp"]
    assert_same_run(whole, tmp_path / "exp")


TWO_RUNS = """
import os, signal, sys
from pathlib import Path
import train

for name in ("fold10", "fold1"):
    if name == "fold1" and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    train.main([*sys.argv[1:], "--name", name])
"""


def test_a_script_of_several_runs_that_torchrun_restarts_trains_each_in_its_own_folder(inputs, tmp_path):
    (tmp_path / "folds.py").write_text(TWO_RUNS)
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "folds.py"]
    with Processes(tmp_path / "log.txt") as run:
        run.start([*command, *flags(inputs, tmp_path, "--epochs", "1")], tmp_path, PYTHONPATH=str(ROOT))
        assert run.codes() == [0], run.output()
    assert (position(tmp_path / "fold10"), position(tmp_path / "fold1")) == ((1, 0), (1, 0))


@pytest.mark.slow
def test_training_continues_without_a_lost_node(inputs, tmp_path):
    """Two torchruns act as two nodes, one of which disappears: the other continues alone and ends with the same
    weights."""
    port = str(free_port())
    options = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=5"]  # fmt: skip
    more = flags(inputs, tmp_path, "--virtual-ranks", "2", "--deterministic", "--epochs", "3")
    with Processes(tmp_path / "alone.txt") as run:
        run.ranks(1, *more, "--name", "alone")
        assert run.codes() == [0], run.output()
    go_on = tmp_path / "go on"
    with (
        Processes(tmp_path / "log.txt", faults=held_at(5, go_on)) as first,
        Processes(tmp_path / "log2.txt", faults=held_at(5, go_on)) as lost,
    ):
        first.torchrun(options, *more)
        time.sleep(1)
        lost.torchrun(options, *more)
        first.until(lambda: has_saved_a_step(tmp_path / "exp"))
        assert "2 processes" in first.output() + lost.output()
        lost.kill_all()  # the first one hosts the rendezvous
        go_on.touch()
        assert first.codes() == [0], first.output()
        assert "resume: processes 2 -> 1" in first.output()
    assert_same_run(tmp_path / "alone", tmp_path / "exp")


def test_a_killed_rank_ends_the_others(inputs, tmp_path):
    go_on = tmp_path / "go on"
    with Processes(tmp_path / "log.txt", faults=held_at(5, go_on)) as run:
        run.ranks(2, *flags(inputs, tmp_path))
        run.until(lambda: has_saved_a_step(tmp_path / "exp"))
        run.started[1].kill()
        go_on.touch()
        run.wait_gone()
        assert run.codes() == [2, -signal.SIGKILL], run.output()
        text = run.output()
    message = "error: another process of this run has ended; its launcher prints why; continue with: --resume "
    assert text.count("error: ") == text.count(f"{message}{tmp_path}/exp/last.pt\n") == 1, text
    assert "Traceback" not in text


def test_a_stall_prints_the_stacks_of_every_rank(inputs, tmp_path):
    go_on = tmp_path / "go on"
    with Processes(tmp_path / "log.txt", faults=f"hold:1:5:{go_on};set:engine.train.control:STALL_S:2") as run:
        run.ranks(2, *flags(inputs, tmp_path, "--epochs", "1"))
        run.until(lambda: run.output().count("Timeout (0:00:02)!") >= 2)
        go_on.touch()
        assert run.codes() == [0, 0], run.output()
        assert "faulty_train.py" in run.output()  # where it sleeps
