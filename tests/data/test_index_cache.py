"""The cached index is read only while nothing has changed that it was made from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.data_set import BOX, DataSet, boxes, coco, give_away, image_bytes, load, refusal, voc
from tests.helpers.open_counter import OpenCounter


@pytest.fixture
def three(data: DataSet) -> DataSet:
    data.pairs("train/a", "train/b", "val/c")
    data.file("voc/a.xml", voc(("a", 5, 5, 20, 20)))
    data.file("all.json", coco([(f"train/{stem}.png", [(1, 5, 5, 20, 20)]) for stem in "ab"]))
    data.yaml()
    return data


def images_opened(data: DataSet, cache: Path) -> int:
    """Returns how many image files reading the training split opens."""
    with OpenCounter(data.root) as counter:
        load(data.data, cache_dir=str(cache))
        return sum(count for name, count in counter.counts().items() if name.endswith(".png"))


def edit(path: Path, content: bytes) -> None:
    """Replaces a file by one of the same size, a moment later."""
    assert len(content) == path.stat().st_size
    later = path.stat().st_mtime_ns + 1
    path.write_bytes(content)
    os.utime(path, ns=(later, later))


CHANGES: dict[str, Callable[[DataSet], object]] = {
    "label edited, same size": lambda data: edit(data.root / "labels/train/a.txt", BOX.replace("0 ", "1 ", 1).encode()),
    "label added": lambda data: data.file("labels/train/new.txt"),
    "label removed": lambda data: os.remove(data.root / "labels/train/a.txt"),
    "image edited, same size": lambda data: edit(data.root / "images/train/a.png", image_bytes()),
    "image added": lambda data: data.images("images/train/d.png"),
    "image removed": lambda data: os.remove(data.root / "images/train/a.png"),
    "classes renamed": lambda data: data.yaml(names=["a", "c"]),
    "another format": lambda data: data.yaml(annotations={"train": "voc"}),
}
NO_CHANGES: dict[str, Callable[[DataSet], object]] = {
    "nothing": lambda data: None,
    "an unrelated file": lambda data: data.file("images/train/README.md"),
    "an unrelated image": lambda data: data.images("other/x.png"),
    "an image of another split": lambda data: data.images("images/val/d.png"),
    "a label of another split": lambda data: data.file("labels/val/c.txt", BOX * 2),
    "the YAML": lambda data: data.yaml(train="images/train", val="images/val", author="me"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_causes_a_scan(three, tmp_path, change):
    before = boxes(load(three.data, cache_dir=str(tmp_path / "cache")))
    CHANGES[change](three)
    assert images_opened(three, tmp_path / "cache") >= 1
    after = boxes(load(three.data, cache_dir=str(tmp_path / "cache")))
    assert after == boxes(load(three.data, use_cache=False))
    assert (after != before) == change.startswith(("label edited", "label rem", "image a", "image rem", "another"))
    assert len(list((tmp_path / "cache").glob("*.index"))) == 1


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_does_not_concern_the_split_causes_none(three, tmp_path, change):
    load(three.data, cache_dir=str(tmp_path / "cache"))
    NO_CHANGES[change](three)
    assert images_opened(three, tmp_path / "cache") == 0


def test_a_moved_folder_causes_none(three, tmp_path):
    before = boxes(load(three.data, cache_dir=str(tmp_path / "cache")))
    moved = DataSet(three.root.rename(tmp_path / "moved"))
    assert images_opened(moved, tmp_path / "cache") == 0
    after = load(moved.data, cache_dir=str(tmp_path / "cache"))
    assert boxes(after) == before
    assert after.path(0) == str(moved.root / "images/train/a.png")


@pytest.mark.parametrize("form", ["yolo", "coco"])
def test_labels_of_an_archive_with_one_time_are_told_apart_by_their_contents(three, tmp_path, form):
    def give_one_time() -> None:
        for path in three.root.rglob("*"):
            os.utime(path, (315_532_800, 315_532_800))

    if form == "coco":
        three.yaml(train="images/train", annotations={"train": "all.json"})
    give_one_time()
    load(three.data, cache_dir=str(tmp_path / "cache"))
    assert images_opened(three, tmp_path / "cache") == 0
    three.file("labels/train/a.txt", BOX.replace("0 ", "1 ", 1))
    three.file("all.json", (three.root / "all.json").read_text().replace('"category_id": 1', '"category_id": 2'))
    give_one_time()
    assert boxes(load(three.data, cache_dir=str(tmp_path / "cache")))["a"][0][0] == "b"


def test_a_moved_json_is_scanned_anew_because_it_may_name_its_folder(three, tmp_path):
    three.file("all.json", coco([(f"{three.root}/images/train/a.png", [(1, 5, 5, 20, 20)])]))
    three.yaml(train="images/train", annotations={"train": "all.json"})
    load(three.data, cache_dir=str(tmp_path / "cache"))
    moved = DataSet(three.root.rename(tmp_path / "moved"))
    assert "images/train/a.png" in refusal(lambda: load(moved.data, cache_dir=str(tmp_path / "cache")))


def test_a_damaged_cache_is_made_anew(three, tmp_path):
    cache = tmp_path / "cache"
    expected = boxes(load(three.data, cache_dir=str(cache)))
    (path,) = cache.glob("*.index")
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    for damaged in (b"", whole[:-64], b"x" * len(whole), flipped):
        path.write_bytes(damaged)
        assert boxes(load(three.data, cache_dir=str(cache))) == expected
        assert path.read_bytes() == whole


def test_a_cache_folder_of_another_user_is_refused(three, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    load(three.data, cache_dir=str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)
    assert f"chmod go-w {folder}" in refusal(lambda: load(three.data, cache_dir=str(folder)))
    folder.chmod(0o755)
    load(three.data, cache_dir=str(folder))
    give_away(folder, monkeypatch)
    assert str(folder) in refusal(lambda: load(three.data, cache_dir=str(folder)))
