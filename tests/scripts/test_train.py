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
from tests.helpers.same_content import assert_same_content, read_csv, without_times
from tests.helpers.scripts import PLAIN, call, run_python, training, write_inputs
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model
from utils.files.torch_file import read_checkpoint
from utils.process.spawn import free_port


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def rows(path: Path) -> list[dict[str, str]]:
    return without_times(read_csv(path))


def test_each_split_says_how_many_images_without_a_label_file_it_has(inputs, tmp_path, capsys):
    """Also a held-out part, to val.py too; what the scan warns of is said once."""
    data = write_dataset(tmp_path / "set", train=12)
    for name in ("000", "002", "003"):
        (tmp_path / "set" / "labels" / "train" / f"{name}.txt").unlink()
    data.write_text("train: images/train\nnames: [light, dark]\n")
    call(train.main, *training(inputs, tmp_path, "--data", data, "--epochs", "1", "--val-fraction", "0.5"))
    out = capsys.readouterr().out
    assert out.count("warning: train: image without labels: 3 images") == 1
    parts = re.findall(r"^(train|val): .*, (\d) findings?.*; (\d) images? without a label file", out, re.M)
    assert [split for split, *_ in parts] == ["train", "train", "val"]
    (whole, train_part, val_part) = (int(number) for _, number, same in parts if number == same)
    assert whole == train_part + val_part == 3
    call(val.main, "--weights", tmp_path / "exp" / "last.pt", "--project", tmp_path, "--name", "val", *PLAIN)
    assert f"; {val_part} image" in capsys.readouterr().out


def test_a_resumed_fine_tuning_equals_the_uninterrupted_one(inputs, tmp_path):
    """Fine-tuning gives pretrained parameters another rate than new ones."""
    whole = tmp_path / "whole" / "exp"
    weights = tmp_path / "one class" / "last.pt"
    call(train.main, *training(inputs, tmp_path, "--epochs", "1", "--single-cls", "--name", "one class"))
    more = ["--set", "close_mosaic=1", "close_scale=1", "--weights", weights]
    arguments = ["--epochs", "2", "--optimizer", "Muon", "--save-period", "1", *more]
    call(train.main, *training(inputs, whole.parent, *arguments))
    table = rows(whole / "results.csv")
    assert all(float(row["lr/weight"]) < 0.5 * float(row["lr/new_weight"]) for row in table)
    weights.unlink()  # not needed to resume
    broken = tmp_path / "broken" / "exp"
    broken.mkdir(parents=True)
    for name, copy in (("epoch1.pt", "last.pt"), ("best.pt", "best.pt")):
        (broken / copy).write_bytes((whole / name).read_bytes())
    done = run_python("train.py", "--resume", "--project", broken.parent, "--workers", "1")
    assert "/last.pt after 1 epoch" in done.stdout
    assert_same_content(read_checkpoint(whole / "last.pt"), read_checkpoint(broken / "last.pt"))
    assert table == rows(broken / "results.csv")


@pytest.mark.parametrize(
    "launcher", ["torchrun", *(pytest.param(other, marks=pytest.mark.slow) for other in ("launch", "spawn"))]
)
def test_two_processes_equal_one_process_up_to_rounding(inputs, tmp_path, launcher, monkeypatch):
    """Only one process writes files, and the results equal those of one process up to rounding, with synchronized batch
    statistics. The processes of the older launcher are interpreters with seeds of string hashes of their own."""
    if launcher == "launch":
        monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    model = write_model(tmp_path / "sizes.yaml", {**TINY_MODEL, "scales": {"n": [1, 1], "s": [1, 2]}})
    arguments = training(inputs, tmp_path, "--model", model, "--epochs", "1", "--optimizer", "SGD", "--sync-bn")
    older = ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", str(free_port())]
    spawned = ["--spawn", "2"] if launcher == "spawn" else []
    done = run_python(
        *(older if launcher == "launch" else []),
        "train.py",
        *arguments,
        *spawned,
        torchrun=1 + (launcher == "torchrun"),
    )
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert "no scale chosen" in warnings[0]
    assert len(set(warnings)) == len(warnings)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir() and p.name.startswith("exp")] == ["exp"]
    call(train.main, *arguments, "--name", "one")
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
        run_python("train.py", *training(inputs, tmp_path, *more, *zero, "--name", name), torchrun=2)
    last = tmp_path / "sharded" / "last.pt"
    whole = read_checkpoint(tmp_path / "whole" / "last.pt")
    sharded = read_checkpoint(last)
    for part in ("model", "ema", "optimizer"):
        assert_same_content(whole[part], sharded[part])
    call(train.main, "--resume", last, "--epochs", "3")
    assert read_checkpoint(last)["progress"]["epoch"] == len(rows(last.with_name("results.csv"))) == 3


def test_a_run_that_stopped_early_or_ran_out_of_time_continues(inputs, tmp_path, capsys):
    """It takes a larger patience, or a longer time for the epochs that fit into it."""
    call(train.main, *training(inputs, tmp_path, "--epochs", "30", "--patience", "1", "--set", "lr0=0"))
    assert "stopped early (--patience 1)" in capsys.readouterr().out
    last = tmp_path / "exp" / "last.pt"
    epoch = read_checkpoint(last)["progress"]["epoch"]
    call(train.main, "--resume", last, "--patience", "2", "--time", "1e-9")
    assert f"--time 1e-09: {epoch + 1} epochs" in capsys.readouterr().out
    hours = 1.01 * read_checkpoint(last)["run"]["seconds"] * (epoch + 2) / (epoch + 1) / 3600
    call(train.main, "--resume", last, "--patience", "0", "--time", hours)
    stored = read_checkpoint(last)
    assert stored["progress"]["epoch"] == stored["config"]["epochs"] >= epoch + 2


def test_frozen_layers_do_not_change(inputs, tmp_path):
    arguments = training(inputs, tmp_path, "--epochs", "1", "--freeze", "0", "2")
    call(train.main, *arguments, "--name", "a")
    call(train.main, *arguments, "--name", "b", "--set", "lr0=0.2")
    a, b = (read_checkpoint(tmp_path / name / "last.pt")["model"] for name in "ab")
    keys = [key for key in a if "running" not in key and "num_" not in key and torch.equal(a[key], b[key])]
    assert {"0", "2"} <= {key.split(".")[1] for key in keys}
    assert torch.equal(a["model.2.bn.running_mean"], torch.zeros(16))
    assert not torch.equal(a["model.1.conv.weight"], b["model.1.conv.weight"])


def test_train_val_and_detect_work_with_two_heads(inputs, tmp_path) -> None:
    model = write_model(tmp_path / "pair.yaml", TINY_MODEL | {"end2end": True, "reg_max": 1})
    call(train.main, *training(inputs, tmp_path, "--model", model, "--epochs", "2"))
    common = ["--weights", tmp_path / "exp" / "last.pt", "--device", "cpu", "--project", tmp_path]
    source = ["--source", inputs / "set" / "images" / "val", "--conf-thres", "0.001", "--nosave", "--save-json"]
    commands = {"val": (val.main, *PLAIN, "--cache-dir", tmp_path), "detect": (detect.main, *source)}

    def rows_of(command: str, *more: str) -> list:
        main, *flags = commands[command]
        call(main, *common, *flags, "--name", "found", "--exist-ok", *more)
        return json.loads((tmp_path / "found" / "predictions.json").read_text())

    for command in commands:
        one = rows_of(command)
        both = rows_of(command, "--iou-thres", "0.3")
        assert one not in ([], rows_of(command, "--nms"))
        assert len(both) < len(one), "a threshold that is given is used"
        assert {str(d) for d in both} < {str(d) for d in one}, "without box voting"
