"""SECURITY.md, "Writing": a command that writes into an existing folder of a run follows no link in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

import detect
import export
import train
import val
from tests.helpers.scripts import PLAIN, call, training, write_inputs
from tests.helpers.tiny import write_weights
from tools.check.__main__ import main as check_main
from tools.kfold import main as kfold_main

KEPT = b"of somebody else"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = write_inputs(tmp_path_factory.mktemp("inputs"), train=4, val=3)
    write_weights(root / "w.pt", ["light", "dark"])
    (root / "frames" / "a").mkdir(parents=True)
    video = cv2.VideoWriter(str(root / "frames" / "clip.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 64))
    for number in range(3):
        image = np.full((64, 64, 3), 90 * number, np.uint8)
        video.write(image)
        cv2.imwrite(str(root / "frames" / "a" / f"{number}.png"), image)
    video.release()
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_train(inputs: Path, folder: Path, *more: str) -> None:
    call(train.main, *experiment(inputs, folder), "--plots", "--exist-ok", *more)


def run_val(inputs: Path, folder: Path) -> None:
    given = ["--weights", inputs / "w.pt", "--data", inputs / "set" / "data.yaml", *PLAIN[:-1]]
    given += ["--cache-dir", inputs / "cache", "--save-json"]
    call(val.main, *given, "--project", folder.parent, "--name", folder.name, "--exist-ok")


def run_detect(*more: str) -> Callable[[Path, Path], None]:
    def run(inputs: Path, folder: Path) -> None:
        given = ["--weights", inputs / "w.pt", "--source", inputs / "frames" / "**" / "*", "--device", "cpu"]
        given += ["--save-txt", "--save-json", "--save-crop", "--conf-thres", "0.0001", *more]
        call(detect.main, *given, "--project", folder.parent, "--name", folder.name, "--exist-ok")

    return run


def run_export(inputs: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copy(inputs / "w.pt", folder / "source.pt")
    call(export.main, "--weights", folder / "source.pt", "--format", "torchscript", "onnx", "--no-check")


def run_check(inputs: Path, folder: Path) -> None:
    call(check_main, "--data", inputs / "set" / "data.yaml", "--out", folder)


COMMANDS = {
    "train": run_train,
    "val": run_val,
    "detect": run_detect(),
    "track": run_detect("--track"),
    "export": run_export,
    "check": run_check,
}


QUICK = ("val", "detect", "check")


def names_below(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("events.out"):  # names that nobody can know before
            yield str(path.relative_to(folder))


@pytest.mark.parametrize(
    "command", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS if name not in QUICK)]
)
def test_a_file_that_a_command_writes_replaces_a_link(inputs, tmp_path, command):
    """Symbolic links and hard links in turn."""
    folder = tmp_path / "exp"
    COMMANDS[command](inputs, folder)
    names = sorted({*names_below(folder)} - {"train.log", ".lock", "source.pt"})
    assert names
    shutil.rmtree(folder)
    targets = {name: tmp_path / str(number) for number, name in enumerate(names)}
    for number, (name, target) in enumerate(targets.items()):
        target.write_bytes(KEPT)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (os.link if number % 2 else os.symlink)(target, folder / name)
    COMMANDS[command](inputs, folder)
    assert [name for name, target in targets.items() if target.read_bytes() != KEPT] == []


@pytest.mark.parametrize(
    ("command", "name"),
    [("train", "train.log"), ("train", ".lock"), ("detect", "labels"), ("detect", "crops"), ("track", "tracks")],
)
def test_a_link_that_would_be_written_through_is_refused(inputs, tmp_path, command, name):
    """A folder, and a file that is appended to."""
    folder = tmp_path / "exp"
    folder.mkdir()
    outside = tmp_path / "outside"
    if name in ("train.log", ".lock"):
        outside.write_bytes(KEPT)
    else:
        outside.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(SystemExit):
        COMMANDS[command](inputs, folder)
    assert outside.read_bytes() == KEPT if outside.is_file() else not any(outside.iterdir())


@pytest.mark.slow  # MLflow creates its tables
@pytest.mark.parametrize("planted", ["experiment", "database"])
def test_mlflow_is_not_led_out_of_the_folder_of_runs(inputs, tmp_path, monkeypatch, planted):
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    outside = tmp_path / "outside"
    outside.mkdir()
    project = tmp_path / "runs"
    project.mkdir()
    if planted == "experiment":
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{project / 'mlflow.db'}")
        client.create_experiment("lockstep", artifact_location=outside.as_uri())
    else:
        (project / "mlflow.db").symlink_to(outside / "new")
    run_train(inputs, project / "exp", "--tracker", "mlflow")
    assert not any(outside.iterdir())


def run_kfold(inputs: Path, folder: Path) -> None:
    call(kfold_main, "--folds", "2", *experiment(inputs, folder))


def run_search(inputs: Path, folder: Path) -> None:
    pytest.importorskip("optuna")
    from tools.search import main

    (folder.parent / "ranges.yaml").write_text("lr0: [0.001, 0.01]\n")
    call(main, "--hyp", folder.parent / "ranges.yaml", "--trials", "1", *experiment(inputs, folder))


def experiment(inputs: Path, folder: Path) -> list[str]:
    return training(inputs, folder.parent, "--epochs", 1, "--name", folder.name)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (run_kfold, "fold1"),
        (run_search, "trials/0000"),
        (run_search, "journal.log"),
        (run_kfold, "."),
        (run_train, "."),
        (run_val, "."),
        (run_detect(), "."),
    ],
)
def test_a_command_is_led_nowhere_by_the_folder_that_it_writes_into(inputs, tmp_path, run, name):
    """A fold or trial that is a link, and with "." the folder of the run itself."""
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = outside / "best.pt"
    kept.write_bytes(KEPT)
    link = tmp_path / "exp" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if name.startswith("trials"):
        (tmp_path / "exp" / "journal.log").touch()
    elif name == "fold1":  # a training that is refused leaves the files of its folds
        with pytest.raises(SystemExit):
            call(kfold_main, "--folds", "2", *experiment(inputs, tmp_path / "exp"), "--weights", "nothere.pt")
        shutil.rmtree(link)
    link.symlink_to(kept if name == "journal.log" else outside)
    with pytest.raises(SystemExit):
        run(inputs, tmp_path / "exp")
    assert [path.read_bytes() for path in outside.iterdir()] == [KEPT]
