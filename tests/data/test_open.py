"""How commands open a data set: by path or name, with optional splits, and with the same refusals."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import train
import val
from tests.data.data_set import BOX, DataSet, counts, load, num_boxes, open_set, refusal
from tests.helpers.scripts import PLAIN, SMALL, call, error_of
from tests.helpers.tiny import write_model, write_weights
from tools.check.__main__ import main as check
from tools.kfold import main as kfold
from tools.shard.__main__ import main as shard


@pytest.mark.parametrize("state", ["missing", "empty"])
def test_an_optional_split_without_images_is_left_out(data, lines, state):
    data.pairs("train/x")
    if state == "empty":
        (data.root / "images/val").mkdir()
    data.yaml()
    spec = open_set(data.data, ["train"], is_val_optional=True)
    assert list(spec.splits) == ["train"]
    is_warned = any(record.levelno == logging.WARNING and "val" in record.getMessage() for record in lines.records)
    assert is_warned == (state == "missing")  # its name may be misspelled
    assert "images/val" in refusal(lambda: load(open_set(data.data, ["train", "val"]), "val"))


@pytest.mark.parametrize("name", ["", "runs", "deep/runs"])
def test_an_output_inside_an_image_folder_is_refused(data, lines, name):
    data.pairs("train/x", "val/y")
    data.yaml()
    output = data.root / "images/train" / name
    assert str(output) in refusal(lambda: open_set(data.data, ["train"], output=str(output)))
    open_set(data.data, ["train"], output=str(data.root / "runs"))
    open_set(data.data, ["train"], output=str(data.root / "images/train2" / name))
    lines.clear()
    open_set(data.data, ["train"], output=str(output), continues_output=True)
    assert [record.levelno for record in lines.records] == [logging.WARNING]


def lossy(data: DataSet, reader: str) -> Path:
    """Writes a data set of which half of the objects are lost in each split."""
    data.pairs("train/x", "train/y", "val/v", rows=BOX + "7 0.5 0.5 0.2 0.2\n")
    data.yaml(
        train="images/train", val="images/val", names=["light", "dark"], **({"tile": 32} if reader == "tiles" else {})
    )
    if reader != "joined":
        return data.data
    (data.root / "data.yaml").rename(data.root / "part.yaml")
    return data.file("data.yaml", "train: [part.yaml]\nval: [part.yaml]\n")


@pytest.mark.parametrize("reader", ["files", "joined", "tiles"])
def test_every_command_refuses_a_data_set_with_the_same_line(data, tmp_path, monkeypatch, capsys, reader):
    monkeypatch.chdir(tmp_path)
    path = lossy(data, reader)
    named = data.root / "part.yaml" if reader == "joined" else path
    lost = {split: refusal(lambda split=split: load(path, split, max_bad=0.1)) for split in ("train", "val")}
    reasons = {split: message.partition("; report:")[0] for split, message in lost.items()}
    assert reasons["train"].startswith(str(named))
    model = write_model(tmp_path / "tiny.yaml")
    trained = ["--data", path, *SMALL, "--model", model, "--epochs", 1]
    assert reasons["train"] in error_of(capsys, train.main, *trained)
    assert reasons["train"] in error_of(capsys, kfold, *trained, "--folds", 2)
    assert reasons["train"] in error_of(capsys, shard, path, tmp_path / "out")
    weights = write_weights(tmp_path / "w.pt", ["light", "dark"])
    assert reasons["val"] in error_of(capsys, val.main, "--weights", weights, "--data", path, *PLAIN)
    with pytest.raises(SystemExit) as ended:
        call(check, path, "--noplots", "--split", "train")
    assert ended.value.code == 1
    assert reasons["train"].partition(": ")[2] in capsys.readouterr().out
    assert not (tmp_path / "runs/train").exists()


def test_shards_keep_what_a_data_set_has_lost(data, tmp_path):
    path = lossy(data, "files")
    shard([str(path), str(tmp_path / "out"), "--max-bad", "0.6"])
    for split in ("train", "val"):
        files, shards = load(path, split), load(tmp_path / "out", split)
        assert counts(shards) == counts(files)
        assert list(num_boxes(shards).values()) == list(num_boxes(files).values())
        assert (shards.boxes_xywh_px == files.boxes_xywh_px).all()
    message = refusal(lambda: load(tmp_path / "out", max_bad=0.1))
    assert "labels/train/x.txt" in message
