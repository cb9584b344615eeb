"""A row of docs/training.md's table of resume each: what a command continues, what it may change, and what it refuses.

tests/scripts/test_run_safety.py has signals, restarts by torchrun and two runs in one folder,
tests/robustness/test_kills.py kill -9 at random moments and other numbers of processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from tests.helpers.processes import Processes, position
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content, assert_same_run, read_csv
from tests.helpers.scripts import call, error_of, run_python, training, write_inputs
from utils.files.torch_file import read_checkpoint, write_checkpoint

STEPS = 7  # of an epoch
FLAGS = ["--epochs", "2", "--optimizer", "SGD", "--save-minutes", "1e-6", "--set", "close_mosaic=1"]


def flags(root: Path, project: Path, *more: object) -> list[str]:
    return training(root, project, *FLAGS, *more)


def run(*argv: object) -> str:
    """Runs a training in this process, and returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        call(train.main, *argv)
    return printed.getvalue()


def run_process(folder: Path, *argv: object, faults: str = "", code: int = 0) -> str:
    """Runs a training as a process, and returns what it prints. ``faults``: see tests/robustness/faulty_train.py."""
    with Processes(folder / "log.txt", faults=faults) as processes:
        processes.ranks(1, *map(str, argv))
        assert processes.codes() == [code], processes.output()
        return processes.output()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Has ``whole``, an uninterrupted run, and ``saved``, the same run with only its first steps."""
    root = write_inputs(tmp_path_factory.mktemp("root"), train=4 * STEPS, val=4)
    run_process(root, *flags(root, root, "--name", "whole"))
    run_process(root, *flags(root, root, "--name", "saved"), faults="refuse:0:6", code=2)
    epoch, batch = position(root / "saved")
    assert epoch == 0
    assert 2 < batch < STEPS - 1
    return root


@pytest.fixture
def saved(root, tmp_path) -> Path:
    return Path(shutil.copytree(root / "saved", tmp_path / "runs" / "saved"))


@pytest.fixture
def whole(root, tmp_path) -> Path:
    return Path(shutil.copytree(root / "whole", tmp_path / "runs" / "whole"))


def test_a_setting_that_has_ended_is_named_once_and_the_run_continues(root, saved):
    content = read_checkpoint(saved / "last.pt")
    content["config"]["old_flag"] = content["hyp"]["clip_norm"] = 10.0
    write_checkpoint(content, saved / "last.pt")
    out = run("--resume", saved / "last.pt")
    assert out.count("old_flag (10.0), clip_norm (10.0)") == 1
    assert_same_run(root / "whole", saved)


@pytest.mark.parametrize("way", ["newest", "name", "auto"])
def test_a_run_continues_at_its_step(root, saved, way):
    if way == "name":
        shutil.copytree(saved, saved.with_name("newer"), copy_function=shutil.copy)
    ways = {
        "newest": ["--resume", "--project", saved.parent],
        "name": ["--resume", "--project", saved.parent, "--name", "saved"],
        "auto": flags(root, saved.parent, "--name", "saved", "--resume", "auto"),
    }
    (saved / "results.csv").write_text("epoch,time\n9,lost by a power cut")  # it is written from last.pt
    assert "resuming" in run(*ways[way])
    assert_same_run(root / "whole", saved)


def test_a_new_run_counts_up_and_exist_ok_replaces(root, saved):
    before = position(saved)
    run(*flags(root, saved.parent, "--name", "saved", "--epochs", "1"))
    assert position(saved.with_name("saved2")) == (1, 0)
    assert position(saved) == before
    (saved / "best.pt").touch()
    (saved / "epoch9.pt").touch()
    earlier = saved / "events.out.tfevents.1.host.1.0"
    earlier.touch()
    again = flags(root, saved.parent, "--name", "saved", "--exist-ok")
    run_process(saved.parent, *again, faults="refuse:0:1", code=2)
    assert not [*saved.glob("*.pt")]  # neither the earlier run's nor, before a step, its own
    assert not earlier.exists()
    run(*again)
    assert_same_run(root / "whole", saved)


def test_an_ended_run_is_complete_or_trains_longer(root, whole):
    before = read_checkpoint(whole / "last.pt")
    output = run("--resume", whole, "--epochs", 1)
    assert "complete: all epochs are done (2)" in output
    assert "to draw its report again: val.py --weights " in output  # which a kill may have prevented
    assert_same_content(read_checkpoint(whole / "last.pt"), before)
    assert "resume: epochs 2 -> 3" in run("--resume", whole, "--epochs", 3)
    assert [row["epoch"] for row in read_csv(whole / "results.csv")] == ["1", "2", "3"]
    assert run("--resume", whole, "--epochs", 9, "--patience", 1).count("stopped early") == 1


def test_a_command_changes_what_it_may(root, saved):
    """With another batch size, the run continues at the same image."""
    _, batch = position(saved)
    more = ["--batch-size", "2", "--workers", "1", "--cache", "ram", "--save-period", "1", "--patience", "9"]
    assert f"resume: continues at batch {2 * batch} of {2 * STEPS}" in run("--resume", saved, *more)
    assert position(saved) == (2, 0)
    assert len(read_csv(saved / "results.csv")) == 2


def images_of(steps: Path) -> list[int]:
    """Returns the images of all steps that the fault ``log:STEPS`` has noted."""
    (log,) = steps.iterdir()
    return [int(index) for line in log.read_text().splitlines() for index in line.partition(":")[2].split()]


def test_moved_data_continue_and_changed_data_continue_at_the_next_epoch(root, saved, tmp_path):
    other = Path(shutil.copytree(saved, saved.with_name("other")))
    moved = Path(shutil.copytree(root / "set", tmp_path / "moved"))
    assert "have changed" not in run("--resume", saved, "--data", moved / "data.yaml")
    assert_same_run(root / "whole", saved)
    next((moved / "labels" / "train").glob("*.txt")).write_text("0 0.4 0.4 0.3 0.3\n")
    steps = tmp_path / "steps"
    steps.mkdir()
    output = run_process(tmp_path, "--resume", other, "--data", moved / "data.yaml", faults=f"log:{steps}")
    assert output.count("images or labels have changed since the run began") == 1
    assert "the run continues at the next epoch" in output
    assert sorted(images_of(steps)) == list(range(4 * STEPS))  # once each, in epoch 2
    assert position(other) == (2, 0)
    assert read_checkpoint(other / "last.pt")["progress"]["updates"] == 2 * STEPS
    losses = [row["train/box"] for row in read_csv(other / "results.csv")]
    assert all(losses)  # also those of the steps of epoch 1


def test_an_epoch_without_a_step_left_is_not_trained_again(root, tmp_path):
    """Not even with other labels, or where another batch size gives other batches."""
    folder = tmp_path / "exp"
    with Processes(tmp_path / "log.txt", faults="slowval:60") as process:
        process.ranks(1, *flags(root, tmp_path, "--rect"))
        process.until(lambda: (folder / "last.pt").exists() and position(folder) >= (0, STEPS))
        process.kill_all()
    changed = Path(shutil.copytree(root / "set", tmp_path / "changed"))
    next((changed / "labels" / "train").glob("*.txt")).write_text("0 0.4 0.4 0.3 0.3\n")
    steps = tmp_path / "steps"
    steps.mkdir()
    more = ["--batch-size", "2", "--data", changed / "data.yaml"]
    run_process(tmp_path, "--resume", folder, *more, faults=f"log:{steps}")
    assert sorted(images_of(steps)) == list(range(4 * STEPS))  # once each, in epoch 2
    assert position(folder) == (2, 0)


def test_changed_validation_labels_begin_only_the_search_for_the_best_epoch_again(root, saved, tmp_path):
    """Within epoch 1, no image is trained on twice: the weights are those of the uninterrupted run."""
    changed = Path(shutil.copytree(root / "set", tmp_path / "changed"))
    next((changed / "labels" / "val").glob("*.txt")).write_text("0 0.4 0.4 0.3 0.3\n")
    output = run("--resume", saved, "--data", changed / "data.yaml")
    (line,) = (line for line in output.splitlines() if "have changed since the run began" in line)
    assert len(set(re.findall("[0-9a-f]{8}", line.partition("fingerprint")[2]))) == 2
    resumed, whole = (read_checkpoint(folder / "last.pt") for folder in (saved, root / "whole"))
    for part in ("model", "ema", "optimizer"):
        assert_same_content(resumed[part], whole[part])


def recorded_epochs(folder: Path) -> list[int]:
    """Returns the epochs whose losses TensorBoard shows."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars("train/box")]


def test_tensorboard_shows_each_epoch_once_after_a_kill(root, whole, tmp_path):
    log = tmp_path / "log.txt"
    with Processes(log, faults=f"hold:0:{STEPS * 4 - 2}:{tmp_path / 'never'}") as process:
        process.ranks(1, "--resume", str(whole), "--epochs", "4")
        process.until(lambda: position(whole)[0] == 3 and "epoch 3: P " in log.read_text())
        process.started[0].kill()
        assert process.codes() == [-signal.SIGKILL], process.output()
    run("--resume", whole)
    assert recorded_epochs(whole) == [1, 2, 3, 4]


def ask_for(folder: Path, **settings: object) -> None:
    """Writes settings into the checkpoint of a run."""
    content = read_checkpoint(folder / "last.pt")
    content["config"] |= settings
    write_checkpoint(content, folder / "last.pt")


def test_what_a_checkpoint_names_acts_only_if_the_command_gives_it_again(saved, tmp_path):
    """Its code is not imported, its service not called, and its folders are not written."""
    (tmp_path / "evil.py").write_text("open('imported', 'w').close()\ndef on_start(run): pass\n")
    named = [tmp_path / name for name in ("imported", "staged", "cached")]
    _, staged, cached = named
    ask_for(
        saved, callbacks="evil:on_start", stage=str(staged), cache_dir=str(cached), tracker=["mlflow"], compile=True
    )
    command = [ROOT / "train.py", "--resume", saved]
    refused = run_python(*command, folder=tmp_path, code=2).stderr
    assert "last.pt asks for --callbacks evil:on_start, which runs code: add --callbacks evil:on_start" in refused
    output = run_python(*command, "--callbacks=", folder=tmp_path).stdout
    assert f"to use it, add --cache-dir {cached} --stage {staged} --compile --tracker mlflow\n" in output
    assert not any(path.exists() for path in named)
    assert not list(saved.parent.glob("ml*"))
    assert position(saved) == (2, 0)
    ask_for(saved, tracker=[])
    again = ["--callbacks", "evil:on_start", "--stage", staged, "--cache-dir", cached, "--epochs", "3"]
    run_python(*command, *again, folder=tmp_path)
    assert all(path.exists() for path in named)


def test_a_teacher_at_an_address_is_fetched_only_if_the_command_names_it(saved, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/teacher.pt"
        ask_for(saved, teacher=url)
        line = error_of(capsys, train.main, "--resume", saved)
        assert f"asks for the teacher {url}, which is no file on this machine: add --teacher {url}" in line
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


REFUSED = {  # flags beside --resume FOLDER, and how the line begins
    "imgsz": (["--imgsz", "96"], "--imgsz 96: the run has 64"),
    "recipe": (["--set", "lr0=0.1"], "--set lr0=0.1: the run has ['close_mosaic=1']"),
    "weights": (["--weights", "/a/last.pt"], "--weights /a/last.pt: weights begin a new run; to continue that one: "),
    "name": (["--name", "other"], "--name other: the run continues in its own folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_setting_is_refused_with_the_stored_one(saved, capsys, name):
    before = (saved / "last.pt").read_bytes()
    given, line = REFUSED[name]
    assert error_of(capsys, train.main, "--resume", saved, *given).startswith(f"error: {line}")
    assert (saved / "last.pt").read_bytes() == before


def break_last(folder: Path) -> None:
    content = bytearray((folder / "last.pt").read_bytes())
    content[len(content) // 2] ^= 255
    (folder / "last.pt").write_bytes(content)


def write_as_earlier_version(folder: Path) -> None:
    write_checkpoint(read_checkpoint(folder / "last.pt") | {"version": 1}, folder / "last.pt")


BROKEN = {  # a change of an ended run's folder, the file to resume, and the line
    "damaged": (break_last, "last.pt", "last.pt: "),
    "of an earlier version": (write_as_earlier_version, "", "written by an earlier version"),
    "missing": (lambda folder: (folder / "last.pt").unlink(), "last.pt", "last.pt: no such checkpoint"),
    "weights as last.pt": (lambda folder: os.replace(folder / "best.pt", folder / "last.pt"), "", "weights only"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_resumed_is_one_line(whole, capsys, name):
    change, file, line = BROKEN[name]
    change(whole)
    assert line in error_of(capsys, train.main, "--resume", whole / file)


def test_auto_refuses_a_run_that_has_lost_its_record(root, whole, capsys):
    (whole / "last.pt").unlink()
    command = flags(root, whole.parent, "--name", "whole", "--resume", "auto")
    assert "has best.pt, but no last.pt" in error_of(capsys, train.main, *command)
    assert len(read_csv(whole / "results.csv")) == 2
