"""``--stage``: each node gets a copy of the data set, and each shared file is read once by all nodes together."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from data.open import open_data
from data.spec import DataSource
from tests.data.data_set import BOX, DataSet, boxes, coco, counts, give_away, load, open_set, refusal, voc
from tests.helpers.open_counter import OpenCounter
from tests.helpers.ranks import run_ranks

BOTH = ("train", "val")


def two_splits(root: Path) -> DataSet:
    data = DataSet(root)
    data.pairs(*(f"train/{i}" for i in range(6)), *(f"val/{i}" for i in range(3)))
    data.images("images/train/background.png")
    data.yaml()
    return data


def stage(data: DataSet, folder: Path, splits=BOTH):
    return open_set(data.data, splits, stage=str(folder))


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Returns the bytes and times of the images and labels of a data set."""
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix in (".png", ".txt", ".xml", ".json")]
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def _copy_on_two_nodes(ctx, data: str, places: str):
    """Copies twice, the second time after node 1 has lost its disk. Returns the shared files opened in each."""
    opened = []
    for attempt in range(2):
        if attempt and ctx.rank == 2:
            shutil.rmtree(places.format(node_rank=1))
        dist.barrier()
        with OpenCounter(Path(data).parent) as counter:
            spec = open_data(DataSource(data, BOTH, stage=places), ctx)
            dist.barrier()
            opened.append(counter.counts())
        dist.barrier()
    return opened, str(spec.root), contents(spec.root), boxes(load(spec))


def test_two_nodes_read_each_shared_file_once_and_broadcast_it(tmp_path):
    data = two_splits(tmp_path / "set")
    places = str(tmp_path / "node{node_rank}")
    results = run_ranks(4, _copy_on_two_nodes, str(data.data), places, local_world=2)
    whole = contents(data.root)
    for rank, (opened, root, copied, read) in enumerate(results):
        assert root.startswith(str(tmp_path / f"node{rank // 2}"))
        assert copied == whole
        assert read == boxes(data.index())
        first, second = opened
        assert {name: count for name, count in first.items() if name.endswith(".png")} == dict.fromkeys(
            (name for name in whole if name.endswith(".png")), 1
        )
        assert not [name for name in second if name.endswith(".png")]  # node 0 sent what it had


def _same_place(ctx, data: str, place: str):
    try:
        open_data(DataSource(data, BOTH, stage=place), ctx)
    except Exception as error:
        return str(error)
    return ""


def test_a_folder_that_nodes_share_is_refused(tmp_path):
    data = two_splits(tmp_path / "set")
    messages = run_ranks(2, _same_place, str(data.data), str(tmp_path / "shared"), local_world=1)
    assert all(messages)
    assert any(str(tmp_path / "shared") in message for message in messages)


@pytest.mark.parametrize("form", ["yolo", "voc", "coco", "list"])
def test_a_copy_has_the_images_labels_and_losses_of_its_original(data, tmp_path, form):
    data.pairs("train/a", "train/p/b", "train/no_file", "val/c")
    data.file("labels/train/gone.txt", BOX * 2)
    os.remove(data.root / "labels/train/no_file.txt")
    (data.root / "labels/train/no_file.txt").symlink_to("nowhere")
    for name in ("p/b", "a", "gone"):
        data.file(f"voc/{name}.xml", voc(("a", 5, 5, 20, 20), ("?", 5, 5, 20, 20)))
    absolute = f"{data.root}/images/train/p/b.png"
    entries = [("a.png", [(1, 5, 5, 20, 20)]), (absolute, [(2, 5, 5, 9, 9)]), ("gone.png", [(1, 1, 1, 9, 9)])]
    data.file("all.json", coco(entries))
    data.file("train.txt", "images/train/a.png\nimages/train/gone.png\n./images/train/p/b.png\n")
    content = {"train": "images/train", "val": "images/val"}
    if form in ("voc", "coco"):
        content["annotations"] = {"train": "voc" if form == "voc" else "all.json"}
    elif form != "yolo":
        content["train"] = "train.txt"
    data.yaml(**content)
    spec = stage(data, tmp_path / "stage", ("train",))
    assert spec.root.is_relative_to(tmp_path / "stage")
    copied, original = load(spec), data.index(use_cache=False)  # the copy has the same cache file
    assert boxes(copied) == boxes(original)
    assert counts(copied) == counts(original)
    assert list(copied.paths) == list(original.paths)
    assert list(map(str, copied.report.findings)) == list(map(str, original.report.findings))


def test_changes_of_the_original_are_copied_and_the_rest_is_kept(tmp_path):
    data = two_splits(tmp_path / "set")
    stage(data, tmp_path / "stage")
    data.file("labels/train/0.txt", "1 0.5 0.5 0.1 0.1\n")
    os.remove(data.root / "labels/train/1.txt")
    for name in ("images/train/2.png", "labels/train/2.txt"):
        os.remove(data.root / name)
    data.pairs("train/new")
    with OpenCounter(data.root) as counter:
        spec = stage(data, tmp_path / "stage")
        opened = Counter(counter.counts())
    assert {name for name in opened if name != "data.yaml"} == {
        "images/train/new.png",
        "labels/train/0.txt",
        "labels/train/new.txt",
    }
    assert boxes(load(spec)) == boxes(data.index())


def test_an_interrupted_copy_is_resumed(tmp_path, monkeypatch):
    data = two_splits(tmp_path / "set")
    plain_replace = os.replace
    moved = []

    def replace(source, target, **folders):
        moved.append(target)
        if len(moved) == 6:
            raise KeyboardInterrupt
        return plain_replace(source, target, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            stage(data, tmp_path / "stage")
    spec = stage(data, tmp_path / "stage")
    assert contents(spec.root) == contents(data.root)


def test_a_copy_at_the_place_of_another_user_is_neither_taken_nor_written_to(tmp_path, monkeypatch):
    """They could guess the place, have changed its labels, and know how a complete copy looks."""
    data = two_splits(tmp_path / "set")
    copy = stage(data, tmp_path / "stage").root.parent
    assert copy.stat().st_mode & 0o777 == 0o700
    for folder in (copy, copy.parent):
        mine = folder.stat().st_uid
        give_away(folder, monkeypatch)
        assert str(copy.parent) in refusal(lambda: stage(data, tmp_path / "stage"))
        give_away(folder, monkeypatch, mine)
    assert len(load(stage(data, tmp_path / "stage"))) == 7
    shutil.rmtree(copy)
    (tmp_path / "theirs").mkdir()
    copy.symlink_to(tmp_path / "theirs")
    with pytest.raises(Exception, match=copy.name):
        stage(data, tmp_path / "stage")
    assert list((tmp_path / "theirs").iterdir()) == []
