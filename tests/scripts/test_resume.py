"""A row of docs/training.md's table of resume each: what a command continues, what it may change, and what it refuses.

Real processes train. tests/scripts/test_run_safety.py has signals, restarts by torchrun and two runs in one folder,
tests/robustness/test_kills.py kill -9 at random moments and other numbers of processes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from tests.helpers.processes import Processes
from tests.helpers.repository import ROOT
from tests.helpers.same_content import assert_same_content, assert_same_run, read_csv
from tests.helpers.scripts import SMALL, error_of, run_python
from tests.helpers.tiny import write_dataset, write_model
from utils.files.torch_file import read_checkpoint, write_checkpoint

STEPS = 7  # of an epoch
FLAGS = [*SMALL, "--epochs", "2", "--optimizer", "SGD", "--save-minutes", "0", "--set", "close_mosaic=1"]


def flags(root: Path, project: Path, *more: object) -> list[str]:
    given = ["--data", root / "set" / "data.yaml", "--model", root / "tiny.yaml", "--project", project]
    return [*map(str, given), "--cache-dir", str(root / "cache"), *FLAGS, *map(str, more)]


def run(*argv: object, faults: str = "", code: int = 0) -> str:
    """Runs a training as one process, and returns what it prints. ``faults``: see tests/robustness/faulty_train.py."""
    log = Path(os.environ["PYTEST_RUN_LOGS"]) / f"{len(os.listdir(os.environ['PYTEST_RUN_LOGS']))}.txt"
    with Processes(log, faults=faults) as processes:
        processes.ranks(1, *map(str, argv))
        assert processes.codes() == [code], processes.output()
        return processes.output()


@pytest.fixture(autouse=True)
def logs(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("PYTEST_RUN_LOGS", str(tmp_path_factory.mktemp("logs")))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Has ``whole``, an uninterrupted run, and ``saved``, the same run with only its first four steps."""
    root = tmp_path_factory.mktemp("root")
    write_dataset(root / "set", train=4 * STEPS, val=4)
    write_model(root / "tiny.yaml")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTEST_RUN_LOGS", str(tmp_path_factory.mktemp("logs")))
        run(*flags(root, root, "--name", "whole"))
        run(*flags(root, root, "--name", "saved"), faults="save:4;refuse:0:6", code=2)
    assert position(root / "saved") == (0, 4)
    return root


@pytest.fixture
def saved(root, tmp_path) -> Path:
    return Path(shutil.copytree(root / "saved", tmp_path / "runs" / "saved"))


@pytest.fixture
def whole(root, tmp_path) -> Path:
    return Path(shutil.copytree(root / "whole", tmp_path / "runs" / "whole"))


def position(folder: Path) -> tuple[int, int]:
    progress = read_checkpoint(folder / "last.pt")["progress"]
    return progress["epoch"], progress["batch"]


def test_a_setting_that_has_ended_is_named_once_and_the_run_continues(root, saved):
    content = read_checkpoint(saved / "last.pt")
    content["config"]["old_flag"] = content["hyp"]["clip_norm"] = 10.0
    write_checkpoint(content, saved / "last.pt")
    out = run("--resume", saved / "last.pt")
    assert out.count("old_flag (10.0), clip_norm (10.0)") == 1
    assert_same_run(root / "whole", saved)


@pytest.mark.parametrize("way", ["last.pt", "newest", "name", "auto"])
def test_a_run_continues_at_its_step(root, saved, way):
    if way == "name":
        shutil.copytree(saved, saved.with_name("newer"), copy_function=shutil.copy)
    ways = {
        "last.pt": ["--resume", saved / "last.pt"],
        "newest": ["--resume", "--project", saved.parent],
        "name": ["--resume", "--project", saved.parent, "--name", "saved"],
        "auto": flags(root, saved.parent, "--name", "saved", "--resume", "auto"),
    }
    (saved / "results.csv").write_text("epoch,time\n9,lost by a power cut")  # it is written from last.pt
    assert "resuming" in run(*ways[way])
    assert_same_run(root / "whole", saved)


def test_a_new_run_counts_up_and_exist_ok_replaces(root, saved):
    run(*flags(root, saved.parent, "--name", "saved", "--epochs", "1"))
    assert position(saved.with_name("saved2")) == (1, 0)
    assert position(saved) == (0, 4)
    (saved / "best.pt").touch()
    (saved / "epoch9.pt").touch()
    earlier = saved / "events.out.tfevents.1.host.1.0"
    earlier.touch()
    run(*flags(root, saved.parent, "--name", "saved", "--exist-ok"), faults="refuse:0:1", code=2)
    assert not [*saved.glob("*.pt")]  # neither the earlier run's nor, before a step, its own
    assert not earlier.exists()
    run(*flags(root, saved.parent, "--name", "saved", "--exist-ok"))
    assert_same_run(root / "whole", saved)


def test_an_ended_run_is_complete_or_trains_longer(root, whole):
    before = read_checkpoint(whole / "last.pt")
    assert "complete: all epochs are done (2)" in run("--resume", whole)
    assert "complete: all epochs are done (2)" in run("--resume", whole, "--epochs", 1)
    assert_same_content(read_checkpoint(whole / "last.pt"), before)
    assert "resume: epochs 2 -> 3" in run("--resume", whole, "--epochs", 3)
    assert [row["epoch"] for row in read_csv(whole / "results.csv")] == ["1", "2", "3"]
    output = run("--resume", whole, "--epochs", 9, "--patience", 1, "--plots")
    assert "complete: stopped early" in output
    assert output.count("stopped early") == 1


@pytest.mark.parametrize(
    ("more", "start"),
    [
        (["--batch-size", "2"], "resume: continues at batch 8 of 14"),  # at the same image
        (["--workers", "1", "--cache", "ram", "--save-period", "1", "--patience", "9"], "resuming"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_changes_what_it_may(root, saved, more, start):
    assert start in run("--resume", saved, *more)
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
    output = run("--resume", other, "--data", moved / "data.yaml", faults=f"log:{steps}")
    assert output.count("images or labels have changed since the run began") == 1
    assert "the run continues at the next epoch" in output
    assert sorted(images_of(steps)) == list(range(4 * STEPS))  # once each, in epoch 2
    assert position(other) == (2, 0)
    assert read_checkpoint(other / "last.pt")["progress"]["updates"] == 2 * STEPS
    losses = [row["train/box"] for row in read_csv(other / "results.csv")]
    assert all(losses)  # also those of the four steps of epoch 1


def test_an_epoch_without_a_step_left_is_not_trained_again(root, tmp_path):
    """Not even with other labels, or where another batch size gives other batches."""
    folder = tmp_path / "exp"
    with Processes(tmp_path / "log.txt", faults=f"save:{STEPS};slowval:60") as process:
        process.ranks(1, *flags(root, tmp_path, "--rect"))
        process.until(lambda: (folder / "last.pt").exists() and position(folder) == (0, STEPS))
        process.kill_all()
    changed = Path(shutil.copytree(root / "set", tmp_path / "changed"))
    next((changed / "labels" / "train").glob("*.txt")).write_text("0 0.4 0.4 0.3 0.3\n")
    steps = tmp_path / "steps"
    steps.mkdir()
    more = ["--batch-size", "2", "--data", changed / "data.yaml"]
    output = run("--resume", folder, *more, faults=f"log:{steps}")
    assert sorted(images_of(steps)) == list(range(4 * STEPS))  # once each, in epoch 2
    assert "the run continues at the next epoch" in output
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


def test_tensorboard_shows_each_epoch_once_after_an_end_and_after_a_kill(root, whole, tmp_path):
    run("--resume", whole, "--epochs", "3")  # after a normal end
    assert recorded_epochs(whole) == [1, 2, 3]
    log = tmp_path / "log.txt"
    with Processes(log, faults=f"hold:0:{STEPS * 5 - 2}:{tmp_path / 'never'}") as process:
        process.ranks(1, "--resume", str(whole), "--epochs", "5")
        process.until(lambda: position(whole)[0] == 4 and "epoch 4: P " in log.read_text())
        process.started[0].kill()
        assert process.codes() == [-signal.SIGKILL], process.output()
    run("--resume", whole)
    assert recorded_epochs(whole) == [1, 2, 3, 4, 5]


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
    "model": (["--model", "yolov8n"], "--model yolov8n: the run has '"),
    "seed": (["--seed", "1"], "--seed 1: the run has 0"),
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
    "in weights": (lambda folder: None, "weights/last.pt", "weights/last.pt: no such checkpoint"),
    "weights": (lambda folder: None, "best.pt", "a run continues from its last.pt"),
    "weights as last.pt": (lambda folder: os.replace(folder / "best.pt", folder / "last.pt"), "", "weights only"),
    "folder": (lambda folder: shutil.rmtree(folder), "", "no such checkpoint"),
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


def test_an_older_checkpoint_continues_in_another_folder(root, tmp_path):
    """Its best.pt is not there: the next validated epoch writes one."""
    run(*flags(root, tmp_path, "--save-period", "1"))
    back = tmp_path / "back"
    back.mkdir()
    shutil.copy(tmp_path / "exp" / "epoch1.pt", back / "last.pt")
    run("--resume", back)
    assert read_checkpoint(back / "best.pt")["progress"]["epoch"] == 2
    last, expected = (read_checkpoint(folder / "last.pt") for folder in (back, tmp_path / "exp"))
    assert_same_content(last["ema"], expected["ema"])


SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})

def write_report(path, history):
    epochs = len(history.get("epoch", ()))
    if place == "report" and epochs == 2:
        while read_checkpoint(Path("runs/exp/last.pt"))["progress"]["epoch"] < 2:  # it is written in the background
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    path.write_text(f"{{epochs}} epochs")

def export(config, *, by_training):
    if place == "export":
        os.kill(os.getpid(), signal.SIGKILL)
    path = Path(config.weights).with_suffix(".torchscript")
    path.touch()

if __name__ == "__main__":
    import engine.commands.export
    import train
    from engine.train import plots
    from utils.files.torch_file import read_checkpoint
    from utils.process.main import run_main
    place = sys.argv.pop(1)
    plots.report_content = lambda subject, evaluation, history: history
    plots.write_page = write_report
    engine.commands.export.export = export
    run_main(train.main)
"""


@pytest.mark.usefixtures("preloaded")
def test_a_job_that_is_killed_in_its_report_says_how_to_draw_it_and_exports(root, tmp_path):
    (tmp_path / "killed.py").write_text(SCRIPT)
    given = [flag for flag in flags(root, Path("runs"), "--resume", "auto") if flag != "--noplots"]
    given += ["--export", "torchscript"]
    folder = tmp_path / "runs" / "exp"
    run_python("killed.py", "report", *given, folder=tmp_path, code=-9)
    last = read_checkpoint(folder / "last.pt")
    assert (folder / "report.html").read_text() == "1 epochs"
    output = run_python("killed.py", "export", *given, folder=tmp_path, code=-9).stdout
    assert "to draw its report again: val.py --weights " in output
    assert not (folder / "best.torchscript").exists()
    run_python("killed.py", "", *given, folder=tmp_path)
    assert (folder / "best.torchscript").exists()
    assert (folder / "report.html").read_text() == "1 epochs"
    assert_same_content(read_checkpoint(folder / "last.pt"), last)
