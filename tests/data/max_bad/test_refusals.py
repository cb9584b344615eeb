"""Each command, and Python, refuses a data set with too many lost labels, with the same reason."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import lockstep
import train
import val
from data.index.index_settings import IndexSettings
from data.source.dataset_yaml import load_dataset_spec
from tests.data.max_bad.twenty_images import IMAGES, NAMES, change_annotations, edit_json, flatten_dogs, write_yaml
from tests.helpers.scripts import PLAIN, SMALL, call, error_of
from tests.helpers.tiny import write_model, write_weights
from tools.check.__main__ import main as check
from tools.check.issue_kinds import REFUSED
from tools.kfold.__main__ import main as kfold
from tools.search.__main__ import main as search
from tools.shard.__main__ import main as shard
from tools.shard.write_shards import write_set


def flags(path: Path, tmp_path: Path) -> list[object]:
    return ["--data", path, *SMALL, "--project", tmp_path / "runs", "--cache-dir", tmp_path / "cache"]


def refusals(capsys: pytest.CaptureFixture) -> list[str]:
    """The issues of this kind that a check has printed."""
    _, _, issues = capsys.readouterr().out.partition(f"{REFUSED}: ")
    return list(itertools.takewhile(lambda line: line.startswith("  "), issues.splitlines()[1:]))


def test_every_command_gives_the_same_refusal(root, tmp_path, capsys):
    path = write_yaml(root, "coco")
    edit_json(root, change_annotations(lambda a, position: position % 4 < 2 and a.update(image_id=7)))
    cause = "20 of 40 labeled objects can't be used (--max-bad is 0.1): annotation without an image: 20 objects, "
    model = write_model(tmp_path / "tiny.yaml")
    weights = write_weights(tmp_path / "w.pt", NAMES)
    trained = [*flags(path, tmp_path), "--model", model, "--epochs", 1]
    message = error_of(capsys, train.main, *trained)
    assert f"error: {path}: 'train': {cause}" in message
    assert f"error: {path}: 'train': {cause}" in error_of(capsys, kfold, *trained, "--folds", 2)
    scored = ["--weights", weights, "--data", path, *PLAIN, "--project", tmp_path / "runs"]
    assert f"error: {path}: 'val': {cause}" in error_of(capsys, val.main, *scored)
    with pytest.raises(SystemExit) as ended:
        call(check, path, "--noplots", "--split", "train")
    assert ended.value.code == 1
    assert [cause in line for line in refusals(capsys)] == [True]


def test_one_cause_is_one_issue_of_a_check(root, capsys):
    path = write_yaml(root, "yolo")
    for label in (root / "labels/train").iterdir():
        label.unlink()
    with pytest.raises(SystemExit):
        call(check, path, "--noplots", "--split", "train")
    out = capsys.readouterr().out
    assert out.count("has 20 images and no label file") == 1
    assert "missing label file: " not in out
    assert "treats these images as background" not in out
    assert "warning: " not in out


def one_yaml(reader: str, **content: object) -> Callable[[Path], Path]:
    return lambda root: write_yaml(root, reader, **content)


def as_shards(root: Path) -> Path:
    write_set(load_dataset_spec(write_yaml(root, "yolo")), root / "shards", 10**9, IndexSettings(max_bad=0.6))
    return root / "shards/data.yaml"


def as_joined(root: Path) -> Path:
    part = write_yaml(root, "coco")
    path = root / "joined.yaml"
    path.write_text(yaml.safe_dump({"train": [part.name], "val": [part.name]}))
    return path


def as_lists(root: Path) -> Path:
    (root / "all.txt").write_text("".join(f"images/train/{name}\n" for name in IMAGES))
    return write_yaml(root, "yolo", train="all.txt", val="all.txt")


# How the data set is described, and flags of training. All lose the same objects.
READERS = {
    "YOLO": (one_yaml("yolo"), []),
    "COCO": (one_yaml("coco"), []),
    "VOC": (one_yaml("voc"), []),
    "lists": (as_lists, []),
    "shards": (as_shards, []),
    "joined": (as_joined, []),
    "tiles": (one_yaml("yolo", tile=32), []),
    "classes:": (one_yaml("voc", classes={"cat": "animal", "dog": "animal"}), []),
    "ignore:": (one_yaml("coco", ignore=["dog"]), []),
    "staging": (one_yaml("coco"), ["--stage", "stage"]),
    "--single-cls": (one_yaml("voc"), ["--single-cls"]),
    "--classes": (one_yaml("yolo"), ["--classes", "cat"]),
    "--fraction": (one_yaml("coco"), ["--fraction", 0.3]),
    "--val-fraction": (one_yaml("yolo", val=None), ["--val-fraction", 0.3]),
}
HALF = "20 of 40 labeled objects can't be used (--max-bad is 0.1): box without area: 20 objects, first "


@pytest.fixture
def half_lost(root, tmp_path, monkeypatch) -> Path:
    flatten_dogs(root)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


@pytest.mark.parametrize("reader", READERS)
def test_train_gives_the_same_refusal_for_each_reader_and_selection(half_lost, tmp_path, capsys, reader):
    write, more = READERS[reader]
    trained = [*flags(write(half_lost), tmp_path), "--model", write_model(tmp_path / "tiny.yaml"), "--epochs", 1]
    assert f"'train': {HALF}" in error_of(capsys, train.main, *trained, *more)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("reader", [name for name, (_, more) in READERS.items() if not more])
def test_val_gives_the_same_refusal_for_each_reader(half_lost, tmp_path, capsys, reader):
    path = READERS[reader][0](half_lost)
    names = {"classes:": ("animal",), "ignore:": ("cat",)}.get(reader, NAMES)
    weights = write_weights(tmp_path / "w.pt", names)
    assert f"'val': {HALF}" in error_of(capsys, val.main, "--weights", weights, "--data", path, *PLAIN)


@pytest.mark.parametrize("reader", ["YOLO", "COCO", "VOC", "lists", "joined", "tiles", "classes:", "ignore:"])
def test_check_and_shard_give_the_same_verdict_for_each_reader(half_lost, tmp_path, capsys, reader):
    path = READERS[reader][0](half_lost)
    with pytest.raises(SystemExit) as ended:
        call(check, path, "--noplots", "--split", "train")
    assert ended.value.code == 1
    assert [HALF in line for line in refusals(capsys)] == [True]
    assert f"'train': {HALF}" in error_of(capsys, shard, path, tmp_path / "out")


@pytest.mark.parametrize("reader", ["YOLO", "COCO", "VOC", "--single-cls", "--classes"])
def test_folds_give_the_same_refusal(half_lost, tmp_path, capsys, reader):
    write, more = READERS[reader]
    trained = [*flags(write(half_lost), tmp_path), "--model", write_model(tmp_path / "tiny.yaml"), "--epochs", 1]
    assert f"'train': {HALF}" in error_of(capsys, kfold, *trained, "--folds", 2, *more)


def test_a_search_gives_the_same_refusal(half_lost, tmp_path, capsys):
    pytest.importorskip("optuna")
    path = write_yaml(half_lost, "yolo")
    trained = [*flags(path, tmp_path), "--model", write_model(tmp_path / "tiny.yaml"), "--epochs", 1]
    (tmp_path / "ranges.yaml").write_text("lr0: [0.001, 0.1]\n")
    message = error_of(capsys, search, *trained, "--hyp", tmp_path / "ranges.yaml", "--trials", 2, "--folds", 2)
    assert f"'train': {HALF}" in message


@pytest.mark.usefixtures("preloaded")
def test_python_gives_the_same_refusal(half_lost, tmp_path):
    """The command runs in a process of its own, like those of the other functions."""
    path = write_yaml(half_lost, "coco")
    settings = {"epochs": 1, "imgsz": 64, "device": "cpu", "workers": 0, "noplots": True}
    with pytest.raises(lockstep.Error, match=re.escape(f"'train': {HALF}")):
        lockstep.train(str(path), model=str(write_model(tmp_path / "tiny.yaml")), **settings)
