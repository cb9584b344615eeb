"""train.py as its users start it: real processes, a tiny model, a tiny data set."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import detect
import train
import val
from models.weights.load import load_detector
from tests.helpers.same_content import assert_same_content, read_csv, without_times
from tests.helpers.scripts import PLAIN, SMALL, call, run_python
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model
from utils.files.torch_file import read_checkpoint
from utils.process.spawn import free_port


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("inputs")
    return {"data": str(write_dataset(root / "set")), "model": str(write_model(root / "tiny.yaml"))}


def flags(inputs: dict[str, str], project: Path, *more: object) -> list[object]:
    return ["train.py", "--data", inputs["data"], "--model", inputs["model"], "--project", project, *SMALL, *more]


def rows(path: Path) -> list[dict[str, str]]:
    return without_times(read_csv(path))


def test_each_split_says_how_many_images_without_a_label_file_it_has(inputs, tmp_path, capsys):
    """Also a held-out part, to val.py too; what the scan warns of is said once."""
    data = write_dataset(tmp_path / "set", train=12, val=5)
    for name in ("train/000", "train/002", "train/003", "val/001"):
        (tmp_path / "set" / "labels" / f"{name}.txt").unlink()
    one = {"data": str(data), "model": inputs["model"]}
    call(train.main, *flags(one, tmp_path, "--epochs", "1")[1:])
    starts = re.findall(
        "^(train|val): .*; (.*) without a label file, (.*) as showing no object", capsys.readouterr().out, re.M
    )
    assert starts == [("train", "3 images", "trained"), ("val", "1 image", "scored")]

    data.write_text("train: images/train\nnames: [light, dark]\n")
    call(train.main, *flags(one, tmp_path, "--epochs", "1", "--val-fraction", "0.5", "--name", "part")[1:])
    out = capsys.readouterr().out
    assert out.count("warning: train: image without labels: 3 images") == 1
    parts = re.findall(r"^(train|val): .*, (\d) findings?.*; (\d) images? without a label file", out, re.M)
    assert [split for split, *_ in parts] == ["train", "train", "val"]
    (whole, train_part, val_part) = (int(number) for _, number, same in parts if number == same)
    assert whole == train_part + val_part == 3
    call(val.main, "--weights", tmp_path / "part" / "last.pt", "--project", tmp_path, "--name", "val", *PLAIN)
    assert f"; {val_part} image" in capsys.readouterr().out


def test_a_resumed_fine_tuning_equals_the_uninterrupted_one(inputs, tmp_path, capsys):
    """Fine-tuning gives pretrained parameters another rate than new ones. --resume may have larger --epochs."""
    whole = tmp_path / "whole" / "exp"
    weights = tmp_path / "one class" / "last.pt"
    call(train.main, *flags(inputs, tmp_path, "--epochs", "1", "--single-cls", "--name", "one class")[1:])
    more = ["--set", "close_mosaic=1", "close_scale=1", "--weights", weights]
    arguments = ["--epochs", "2", "--optimizer", "Muon", "--save-period", "1", *more]
    call(train.main, *flags(inputs, whole.parent, *arguments)[1:])
    table = rows(whole / "results.csv")
    assert all(float(row["lr/weight"]) < 0.5 * float(row["lr/new_weight"]) for row in table)
    log = (whole / "train.log").read_text()
    assert re.search(r"loaded weights learn [\d.]+ times slower: .* hardly find these objects", log)
    assert "\n  lr_mult: 0.125\n" in (whole / "settings.yaml").read_text()
    weights.unlink()  # not needed to resume
    assert {p.name for p in whole.iterdir()} >= {"last.pt", "best.pt", "epoch1.pt", "results.csv", "settings.yaml"}
    assert [row["epoch"] for row in table] == ["1", "2"]
    broken = tmp_path / "broken" / "exp"
    broken.mkdir(parents=True)
    for name, copy in (("epoch1.pt", "last.pt"), ("best.pt", "best.pt"), ("results.csv", "results.csv")):
        (broken / copy).write_bytes((whole / name).read_bytes())
    done = run_python("train.py", "--resume", "--project", broken.parent, "--workers", "1")
    assert "/last.pt after 1 epoch" in done.stdout
    assert "workers 0 -> 1" in done.stdout
    assert_same_content(read_checkpoint(whole / "last.pt"), read_checkpoint(broken / "last.pt"))
    assert table == rows(broken / "results.csv")
    capsys.readouterr()
    call(train.main, "--resume", whole / "last.pt", "--epochs", "3")
    assert "with Muon (as when the run began), learning rate" in capsys.readouterr().out
    assert len(rows(whole / "results.csv")) == 3


@pytest.mark.parametrize(
    "launcher", ["torchrun", *(pytest.param(other, marks=pytest.mark.slow) for other in ("launch", "spawn"))]
)
def test_two_processes_equal_one_process_up_to_rounding(inputs, tmp_path, launcher, monkeypatch):
    """Only one process writes files, and the results equal those of one process up to rounding, with synchronized batch
    statistics. The processes of the older launcher are interpreters with seeds of string hashes of their own."""
    if launcher == "launch":
        monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    model = write_model(tmp_path / "sizes.yaml", {**TINY_MODEL, "scales": {"n": [1, 1], "s": [1, 2]}})
    arguments = flags({**inputs, "model": model}, tmp_path, "--epochs", "1", "--optimizer", "SGD", "--sync-bn")
    older = ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", str(free_port())]
    spawned = ["--spawn", "2"] if launcher == "spawn" else []
    done = run_python(
        *(older if launcher == "launch" else []), *arguments, *spawned, torchrun=1 + (launcher == "torchrun")
    )
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert "no scale chosen" in warnings[0]
    assert len(set(warnings)) == len(warnings)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir() and p.name.startswith("exp")] == ["exp"]
    call(train.main, *arguments[1:], "--name", "one")
    two, one = (rows(tmp_path / name / "results.csv") for name in ("exp", "one"))
    assert len(two) == 1
    for a, b in zip(two, one):
        for key in ("train/box", "train/cls", "train/dfl", "val/total"):
            assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-3), key
        assert float(a["metrics/AP"]) == pytest.approx(float(b["metrics/AP"]), abs=5e-3)


@pytest.mark.slow
def test_a_sharded_optimizer_changes_no_bit_and_resumes_on_one_process(inputs, tmp_path):
    """Two processes, which also choose images by the scores of their classes, and skip gradients that are zero."""
    more = ["--epochs", "2", "--optimizer", "AdamW", "--image-weights", "--skip-zero-grads", "--deterministic"]
    for name, zero in (("whole", []), ("sharded", ["--zero"])):
        run_python(*flags(inputs, tmp_path, *more, *zero, "--name", name), torchrun=2)
    last = tmp_path / "sharded" / "last.pt"
    whole = read_checkpoint(tmp_path / "whole" / "last.pt")
    sharded = read_checkpoint(last)
    for part in ("model", "ema", "optimizer"):
        assert_same_content(whole[part], sharded[part])
    call(train.main, "--resume", last, "--epochs", "3")
    assert read_checkpoint(last)["progress"]["epoch"] == len(rows(last.with_name("results.csv"))) == 3


def test_a_run_that_stopped_early_or_ran_out_of_time_continues(inputs, tmp_path, capsys):
    """It takes a larger patience, or a longer time for the epochs that fit into it."""
    call(train.main, *flags(inputs, tmp_path, "--epochs", "30", "--patience", "1", "--set", "lr0=0")[1:])
    assert "stopped early (--patience 1)" in capsys.readouterr().out
    last = tmp_path / "exp" / "last.pt"
    epoch = read_checkpoint(last)["progress"]["epoch"]
    call(train.main, "--resume", last, "--epochs", "40")
    assert "complete: stopped early" in capsys.readouterr().out
    call(train.main, "--resume", last, "--patience", "2", "--time", "1e-9")
    out = capsys.readouterr().out
    assert f"--time 1e-09: {epoch + 1} epochs" in out
    call(train.main, "--resume", last, "--time", "2e-9")
    assert "complete: --time 2e-09: no further epoch fits" in capsys.readouterr().out
    hours = 1.01 * read_checkpoint(last)["run"]["seconds"] * (epoch + 2) / (epoch + 1) / 3600
    call(train.main, "--resume", last, "--patience", "0", "--time", hours)
    assert f"resume: time 1e-09 -> {hours}" in capsys.readouterr().out
    stored = read_checkpoint(last)
    assert stored["progress"]["epoch"] == stored["config"]["epochs"] >= epoch + 2


def test_frozen_layers_do_not_change(inputs, tmp_path):
    arguments = flags(inputs, tmp_path, "--epochs", "1", "--freeze", "0", "2")
    call(train.main, *arguments[1:], "--name", "a")
    call(train.main, *arguments[1:], "--name", "b", "--set", "lr0=0.2")
    a, b = (read_checkpoint(tmp_path / name / "last.pt")["model"] for name in "ab")
    keys = [key for key in a if "running" not in key and "num_" not in key and torch.equal(a[key], b[key])]
    assert {"0", "2"} <= {key.split(".")[1] for key in keys}
    assert torch.equal(a["model.2.bn.running_mean"], torch.zeros(16))
    assert not torch.equal(a["model.1.conv.weight"], b["model.1.conv.weight"])


def test_train_val_and_detect_work_with_two_heads(tmp_path, capsys) -> None:
    data = write_dataset(tmp_path / "set")
    model = write_model(tmp_path / "pair.yaml", TINY_MODEL | {"end2end": True, "reg_max": 1})
    folder = tmp_path / "exp"
    given = ["--data", data, "--model", model, "--epochs", "2", *SMALL, "--project", tmp_path]
    call(train.main, *given, "--cache-dir", tmp_path / "cache")
    assert load_detector(folder / "last.pt")[0].head.is_dual
    common = ["--weights", folder / "last.pt", "--device", "cpu", "--project", tmp_path]
    source = ["--source", data.parent / "images" / "val", "--conf-thres", "0.001", "--nosave", "--save-json"]

    def rows_of(name: str, *more: str) -> list:
        script, given = (
            (detect.main, source) if name.startswith("detect") else (val.main, [*PLAIN, "--cache-dir", tmp_path])
        )
        call(script, *common, *given, "--name", name, *more)
        return json.loads((tmp_path / name / "predictions.json").read_text())

    for prefix in ("", "detect_"):
        one = rows_of(f"{prefix}one")
        many = rows_of(f"{prefix}many", "--nms")
        both = rows_of(f"{prefix}both", "--iou-thres", "0.3")
        assert one
        assert one != many
        assert len(both) < len(one), "a threshold that is given is used"
        assert {str(d) for d in both} < {str(d) for d in one}, "without box voting"
    assert "does nothing" not in capsys.readouterr().out
    assert len(rows_of("detect_agnostic", "--agnostic-nms")) < len(one)
