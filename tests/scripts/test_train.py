"""train.py as its users start it: real processes, a tiny model, a tiny data set."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train as train_script
from tests.helpers.preloaded import python
from tests.helpers.same_content import same_content, untimed
from tests.helpers.scripts import error_of
from tests.helpers.tiny import TINY_ANCHOR_MODEL, write_dataset, write_model
from utils.distributed.launch import torchrun_variables
from utils.files.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]
TORCHRUN = [python(), "-m", "torch.distributed.run", "--standalone"]
COMMON = ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--amp", "off", "--noplots"]


def run(command: list[str], expect: int = 0, timeout: int = 240) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == expect, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("world")
    return {"data": str(write_dataset(root / "set")), "model": str(write_model(root / "tiny.yaml"))}


def flags(world: dict[str, str], project: Path, *more: str) -> list[str]:
    return ["--data", world["data"], "--model", world["model"], "--project", str(project), *COMMON, *more]


def train(world, project: Path, *more: str, launcher: list[str] | None = None, **options):
    return run([*(launcher or [python()]), "train.py", *flags(world, project, *more)], **options)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return untimed(csv.DictReader(file))


@pytest.mark.parametrize("fine_tuned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_resumed_run_equals_the_uninterrupted_one(world, tmp_path, fine_tuned):
    """Also, the same command gives the same table twice, and --resume may have larger --epochs. In fine-tuning,
    pretrained parameters have another rate than new ones."""
    whole, more = tmp_path / "whole" / "exp", ["--set", "close_mosaic=1", "close_scale=1"]
    if fine_tuned:
        train(world, tmp_path, "--epochs", "1", "--single-cls", "--name", "one class")
        more += ["--weights", str(tmp_path / "one class" / "last.pt")]
    train(world, whole.parent, "--epochs", "4", "--optimizer", "Muon", "--save-period", "2", *more)
    table = rows(whole / "results.csv")
    assert ("lr/new_weight" in table[0]) == fine_tuned
    if fine_tuned:
        assert all(float(row["lr/weight"]) < 0.5 * float(row["lr/new_weight"]) for row in table)
        assert re.search(
            r"lr_mult 0.125: .*last.pt hardly detects the training objects", (whole / "train.log").read_text()
        )
        assert "\n  lr_mult: 0.125\n" in (whole / "settings.yaml").read_text()
        (tmp_path / "one class" / "last.pt").unlink()  # not needed to resume
    assert {p.name for p in whole.iterdir()} >= {"last.pt", "best.pt", "epoch2.pt", "results.csv", "settings.yaml"}
    assert [row["epoch"] for row in rows(whole / "results.csv")] == ["1", "2", "3", "4"]
    broken = tmp_path / "broken" / "exp"
    broken.mkdir(parents=True)
    for name in ("epoch2.pt", "results.csv"):
        (broken / name).write_bytes((whole / name).read_bytes())
    (broken / "epoch2.pt").rename(broken / "last.pt")
    done = run([python(), "train.py", "--resume", "--project", str(broken.parent), "--workers", "1"])
    assert "after epoch 2 of 4" in done.stdout + done.stderr
    assert "workers 0 -> 1" in done.stdout + done.stderr
    same_content(read_checkpoint(whole / "last.pt"), read_checkpoint(broken / "last.pt"))
    assert rows(whole / "results.csv") == rows(broken / "results.csv")
    finished = run([python(), "train.py", "--resume", str(whole / "last.pt")], expect=2)
    assert "all epochs are done (4)" in finished.stderr
    finished = run([python(), "train.py", "--resume", str(whole / "last.pt"), "--epochs", "3"], expect=2)
    assert "--epochs 3: 4 are done already; to continue" in finished.stderr
    done = run([python(), "train.py", "--resume", str(whole / "last.pt"), "--epochs", "5"])
    assert "\nMuon (as when the run began), learning rate" in done.stdout
    assert "\nstarting; the first step is the slowest: it waits for the first batch\nfirst step " in re.sub(
        "resume: the learning rate.*\n", "", done.stdout
    )
    assert len(rows(whole / "results.csv")) == 5


@pytest.mark.parametrize(
    "launcher",
    [
        [*TORCHRUN, "--nproc_per_node", "2"],
        pytest.param(
            [python(), "-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", "29617"],
            marks=pytest.mark.slow,
        ),
        pytest.param("spawn", marks=pytest.mark.slow),
    ],
    ids=["torchrun", "old launcher", "spawn"],
)
def test_two_processes_equal_one_process_up_to_rounding(world, tmp_path, launcher, monkeypatch):
    """Only one process writes files, and the results equal those of one process up to rounding, with synchronized batch
    statistics. The second process of torchrun is an interpreter of its own, with its own seed of string hashes."""
    (tmp_path / "python").write_text(
        f'#!/bin/sh\n[ "$RANK" = 1 ] && exec {sys.executable} "$@"\nexec {python()} "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(tmp_path / "python"))
    more = ["--epochs", "2", "--optimizer", "SGD", "--sync-bn"]
    if launcher == "spawn":
        train(world, tmp_path, *more, "--spawn", "2")
    else:
        train(world, tmp_path, *more, launcher=launcher)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir() and p.name.startswith("exp")] == ["exp"]
    train(world, tmp_path, *more, "--name", "one")
    two, one = (rows(tmp_path / name / "results.csv") for name in ("exp", "one"))
    assert len(two) == 2
    for a, b in zip(two, one):
        for key in ("train/box", "train/cls", "train/dfl", "val/total"):
            assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-3), key
        assert float(a["metrics/AP"]) == pytest.approx(float(b["metrics/AP"]), abs=5e-3)


def test_a_run_resumes_on_another_number_of_processes(world, tmp_path):
    more = ["--epochs", "1", "--optimizer", "AdamW"]
    two = [*TORCHRUN, "--nproc_per_node", "2"]
    train(world, tmp_path, *more, "--name", "two", launcher=two)
    train(world, tmp_path, *more, "--name", "one")
    run([python(), "train.py", "--resume", str(tmp_path / "two" / "last.pt"), "--epochs", "2"])
    run([*two, "train.py", "--resume", str(tmp_path / "one" / "last.pt"), "--epochs", "2"])
    for name in ("one", "two"):
        assert read_checkpoint(tmp_path / name / "last.pt")["progress"]["epoch"] == 2
        assert len(rows(tmp_path / name / "results.csv")) == 2


@pytest.mark.slow
def test_training_options_work_together(world, tmp_path):
    """An anchor model with all options that can be combined; then the others."""
    hyp = tmp_path / "hyp.yaml"
    hyp.write_text("mixup: 0.5\ndegrees: 10\nperspective: 0.0005\nalbumentations:\n- {name: Blur, p: 0.5}\n")
    model = write_model(tmp_path / "anchors.yaml", TINY_ANCHOR_MODEL)
    first = ["--image-weights", "--multi-scale", "--cache", "disk", "--nominal-batch", "8", "--cos-lr", "--freeze", "1",
             "--label-smoothing", "0.1", "--single-cls", "--deterministic", "--amp", "bf16", "--patience", "1",
             "--cache-dir", str(tmp_path / "cache"), "--hyp", str(hyp), "--optimizer", "Adam",
             "--epochs", "2"]  # fmt: skip
    train(world, tmp_path, *first, "--model", str(model), "--name", "first")
    content = read_checkpoint(tmp_path / "first" / "last.pt")
    assert content["names"] == ["object"]
    fresh = read_checkpoint(tmp_path / "first" / "best.pt")
    assert fresh["progress"]["updates"] <= 4  # three batches an epoch, two a step
    last = tmp_path / "first" / "last.pt"
    run([python(), "train.py", "--resume", str(last), "--epochs", "4", "--no-image-weights", "--patience", "0"])
    assert read_checkpoint(last)["progress"]["epoch"] == 4
    second = ["--quad", "--cache", "ram", "--nominal-batch", "8", "--val-every", "2",
              "--weights", str(tmp_path / "first" / "last.pt"), "--epochs", "3", "--offline", "--exist-ok"]  # fmt: skip
    done = train(world, tmp_path, *second, "--model", str(model), "--name", "second")
    assert "each of 2 batches of 4 images at 64 px" in done.stdout + done.stderr
    table = rows(tmp_path / "second" / "results.csv")
    assert [row["metrics/AP"] != "" for row in table] == [False, True, True]
    train(world, tmp_path, "--rect", "--epochs", "1", "--noautoanchor", "--name", "third")


@pytest.mark.slow
def test_epochs_fit_into_the_time(world, tmp_path):
    """The schedule ends with the last epoch, which is validated; a resumed run has the number of its checkpoint."""
    done = train(world, tmp_path, "--time", "0.001", "--save-period", "1", "--val-every", "0", "--optimizer", "SGD")
    folder = tmp_path / "exp"
    table, last = rows(folder / "results.csv"), read_checkpoint(folder / "last.pt")
    assert len(table) == last["progress"]["epoch"] == last["config"]["epochs"] != 100
    assert f"--time 0.001: {len(table)} epoch" in done.stdout
    assert table[-1]["metrics/AP"]
    assert float(table[-1]["lr/weight"]) == pytest.approx(0.01 * 0.01)
    first = read_checkpoint(folder / "epoch1.pt")
    assert first["config"]["epochs"] < 100
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "last.pt").write_bytes((folder / "epoch1.pt").read_bytes())
    again = run([python(), "train.py", "--resume", str(tmp_path / "again" / "last.pt"), "--time", "1e-9"])
    assert f"after epoch 1 of {first['config']['epochs']}" in again.stdout
    assert read_checkpoint(tmp_path / "again" / "last.pt")["config"]["epochs"] == 2


def test_frozen_layers_do_not_change(world, tmp_path):
    train(world, tmp_path, "--epochs", "1", "--freeze", "0", "2", "--save-period", "1", "--name", "a")
    train(
        world, tmp_path, "--epochs", "1", "--freeze", "0", "2", "--save-period", "1", "--name", "b", "--set", "lr0=0.2"
    )
    a, b = (read_checkpoint(tmp_path / name / "last.pt")["model"] for name in "ab")
    same = {
        key.split(".")[1] for key in a if torch.equal(a[key], b[key]) and "running" not in key and "num_" not in key
    }
    assert {"0", "2"} <= same
    assert torch.equal(a["model.2.bn.running_mean"], torch.zeros(16))
    assert not torch.equal(a["model.1.conv.weight"], b["model.1.conv.weight"])


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--data", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--model", "yolov9z"], "yolov9z"),
        (["--imgsz", "65"], "use 64 or 96"),
        (["--device", "3"], "no GPU 3|no CUDA GPU"),
        (["--weights", "none.pt", "--offline"], "none.pt"),
        (["--resume", "none.pt"], "none.pt: no such checkpoint"),
        (["--hyp", "none.yaml"], "none.yaml: no such file"),
        (["--set", "mosaik=1"], "did you mean 'mosaic'"),
        (["--freeze", "99"], "has layers 0 to"),
        (["--amp", "fp16"], "not supported on CPUs"),
    ],
)
def test_mistakes_end_in_one_line(world, tmp_path, capsys, more, complaint):
    assert re.search(complaint, error_of(capsys, train_script.main, *flags(world, tmp_path, "--epochs", "1", *more)))


def test_a_batch_smaller_than_the_number_of_ranks_is_refused(world, tmp_path):
    done = run([python(), "train.py", *flags(world, tmp_path, "--batch-size", "1", "--spawn", "2")], expect=2)
    assert "batch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_is_one_line(world, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = os.environ | torchrun_variables(0, 2, taken.getsockname()[1])
        done = subprocess.run(
            [python(), "train.py", *flags(world, tmp_path)], cwd=ROOT, env=environment, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "port" in done.stderr
    assert "Traceback" not in done.stderr
