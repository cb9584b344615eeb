"""val.py --watch: a run's checkpoints are scored as they appear, each once, until the run ends."""

from __future__ import annotations

import csv
import shutil
import signal
from pathlib import Path

import pytest

import train
import val
from engine.checkpoint.run import LOCK_NAME
from tests.helpers.processes import Processes
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model
from utils.entrypoint import run_main

FLAGS = ["--device", "cpu", "--workers", "0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of three epochs, each of which it has kept."""
    root = tmp_path_factory.mktemp("trained")
    data, model = write_dataset(root / "set", train=4), write_model(root / "tiny.yaml")
    run_main(train.main, ["--data", str(data), "--model", str(model), "--project", str(root), *SMALL, "--epochs", "3",
                          "--save-period", "1", "--optimizer", "SGD"])  # fmt: skip
    return root / "exp"


def copied(trained: Path, folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        shutil.copy(trained / name, folder / name)
    return folder


def scores(folder: Path) -> dict[str, dict[str, str]]:
    with open(folder / "watch.csv", newline="") as file:
        return {row["epoch"]: row for row in csv.DictReader(file)}


def test_a_run_that_has_ended_is_scored_once(trained, tmp_path, capsys):
    """With the scores of a validation of the same file."""
    run = copied(trained, tmp_path / "run", "epoch1.pt", "epoch3.pt", "last.pt")
    for _ in range(2):
        run_main(val.main, ["--watch", str(run), *FLAGS])
    assert list(scores(run)) == ["1", "3"]
    assert capsys.readouterr().out.count("epoch 3: ") == 1
    assert list((run / "watch").glob("events*"))
    run_main(val.main, ["--weights", str(run / "epoch3.pt"), "--project", str(tmp_path), "--noplots", *FLAGS])
    text = (tmp_path / "exp" / "results.json").read_text()
    assert f'"AP": {float(scores(run)["3"]["metrics/AP"]):g}'[:9] in text


def test_checkpoints_are_scored_as_they_appear_and_damaged_ones_left_out(trained, tmp_path):
    run = copied(trained, tmp_path / "run", "epoch1.pt")
    (run / LOCK_NAME).touch()
    (run / "epoch2.pt").write_bytes((trained / "epoch2.pt").read_bytes()[:999])
    with Processes(tmp_path / "log.txt") as watching:
        process = watching.start([watching.python, "val.py", "--watch", str(run), *FLAGS])
        watching.until((run / "watch.csv").exists)
        shutil.copy(trained / "last.pt", run / "other")
        (run / "other").rename(run / "last.pt")
        watching.until(lambda: len(scores(run)) == 2)
        (run / LOCK_NAME).unlink()
        assert process.wait(60) == 0, watching.output()
        assert list(scores(run)) == ["1", "3"]
        assert watching.output().count("epoch2.pt") == 1
        assert "no process trains it (3 of 3 epochs done)" in watching.output()


def test_ctrl_c_ends_it_without_a_traceback(trained, tmp_path):
    run = copied(trained, tmp_path / "run", "last.pt")
    (run / LOCK_NAME).touch()
    with Processes(tmp_path / "log.txt") as watching:
        process = watching.start([watching.python, "val.py", "--watch", str(run), *FLAGS])
        watching.until((run / "watch.csv").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, watching.output()
        assert "Traceback" not in watching.output()


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--watch", "/nowhere"], "/nowhere: not the folder of a run"),
        (["--watch=a", "--weights", "b.pt"], "leave out --weights"),
        ([], "required: --weights"),
        (["--watch", "a", "--spawn", "2"], "leave out --spawn"),
    ],
)
def test_mistakes_end_in_one_line(capsys, argv, complaint):
    assert complaint in error_of(capsys, val.main, *argv)
