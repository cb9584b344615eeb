"""A cached index is never stale: any change of the files causes a new scan, and damaged caches are rebuilt."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest

from data.cache.disk import CacheName
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from tests.data.index.small_set import NAMES, assert_same, load, take_messages, write_yaml
from tests.helpers.hostile_files import OCCUPANTS, occupy
from tests.helpers.index_fingerprint import index_fingerprint
from tests.helpers.three_formats import write_image
from tests.helpers.tiny import write_dataset


def edit(path, start=b""):
    """Writes a file and changes its modification time explicitly, because a coarse clock might not."""
    data = path.read_bytes()
    after = path.stat().st_mtime_ns + 1
    path.write_bytes(start + data[len(start) :])
    os.utime(path, ns=(after, after))


def give_one_time(folder):
    """Gives all files the constant time that some archives contain."""
    for path in folder.rglob("*.txt"):
        os.utime(path, (315_532_800, 315_532_800))


def test_labels_of_an_archive_with_constant_times_are_told_apart_by_their_contents(root, tmp_path, lines):
    give_one_time(root / "labels")
    before = load(root, tmp_path / "cache")
    take_messages(lines)
    assert_same(load(root, tmp_path / "cache"), before)
    assert "(cached)" in take_messages(lines)[0]

    label = root / "labels/train/a.txt"
    content = label.read_bytes()
    label.write_bytes(b"1" + content[1:])  # of the same size
    give_one_time(root / "labels")
    after = load(root, tmp_path / "cache")
    assert "(cached)" not in take_messages(lines)[0]
    assert content[:1] != b"1"
    assert before.classes.tolist() != after.classes.tolist()


CHANGES = {
    "label edited, same size": lambda root: edit(root / "labels/train/a.txt", b"1"),
    "image touched": lambda root: edit(root / "images/train/a.jpg"),
    "label added": lambda root: (root / "labels/train/ü.txt").touch(),
    "label removed": lambda root: (root / "labels/train/a.txt").unlink(),
    "image removed": lambda root: (root / "images/train/a.jpg").unlink(),
    "image added": lambda root: write_image(root / "images/train/z.jpg", 8, 8),
    "image renamed": lambda root: (root / "images/train/b.png").rename(root / "images/train/b2.png"),
    "class renamed": lambda root: write_yaml(root, names=("cat", "dog", "ox")),
    "class added": lambda root: write_yaml(root, names=(*NAMES, "ox")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_files_causes_a_new_scan(root, tmp_path, lines, change):
    load(root, tmp_path / "cache")
    take_messages(lines)
    CHANGES[change](root)
    after = load(root, tmp_path / "cache", max_bad=0.5)  # a label file may be left without its image
    assert "(cached)" not in take_messages(lines)[0]
    assert len(list((tmp_path / "cache").glob("*.index"))) == 1
    if change.startswith("label edited"):
        np.testing.assert_array_equal(after.classes[:2], [1, 2])


def test_a_data_set_that_has_been_moved_is_not_scanned_again(root, tmp_path, lines):
    before = load(root, tmp_path / "cache")
    take_messages(lines)
    moved = root.rename(tmp_path / "moved")
    after = load(moved, tmp_path / "cache")
    assert "(cached)" in take_messages(lines)[0]
    assert_same(before, after)
    assert after.path(0) == str(moved / before.paths[0])


def test_version_split_and_annotation_file_are_part_of_the_fingerprint(root, monkeypatch):
    def fingerprint(split="train"):
        return index_fingerprint(load_dataset_spec(root / "d.yaml"), split)

    prints = {fingerprint(), fingerprint("val")}
    monkeypatch.setattr("data.index.cache_file.CACHE_VERSION", 99)
    prints.add(fingerprint())
    write_yaml(root, "annotations: instances.json\n")
    prints.add(fingerprint())
    edit(root / "instances.json")
    prints.add(fingerprint())
    assert len(prints) == 5


@pytest.mark.parametrize("kind", ["index", "txt"])
@pytest.mark.parametrize("taken", OCCUPANTS[:-1])
def test_what_is_not_our_file_but_has_its_name_is_neither_read_nor_waited_for(root, tmp_path, kind, taken):
    index = load(root, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.index")
    path.unlink()
    occupy(path.with_suffix(f".{kind}"), taken, 500)
    assert_same(index, load(root, tmp_path / "cache"))
    assert taken == "folder" or (path.is_file() and not path.is_symlink())
    assert taken != "link" or (path.parent / "target").stat().st_size == 500


def test_damaged_caches_are_rebuilt_and_reported(root, tmp_path, lines):
    expected = load(root, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.index")
    whole = path.read_bytes()
    take_messages(lines)
    flipped = bytearray(whole)
    in_header = bytearray(whole)
    flipped[-100] ^= 1
    in_header[40] ^= 1
    for damaged in (b"", whole[:10], whole[:-64], b"x" * len(whole), flipped, in_header, whole + b"more"):
        path.write_bytes(damaged)
        path.with_name(".train.0123456789abcdef.tmp").write_bytes(whole[:10])  # as a killed process leaves it
        assert_same(expected, load(root, tmp_path / "cache"))
        warning, total = take_messages(lines)
        assert "can't be used" in warning
        assert "scanning again" in warning
        assert "(cached)" not in total
        assert path.read_bytes() == whole
    assert [p.suffix for p in sorted((tmp_path / "cache").iterdir())] == [".index", ".txt"]  # no temporary files


def test_an_old_file_that_cannot_be_removed_does_not_keep_the_others(root, tmp_path):
    load(root, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*.index")
    cache_key = path.name.rpartition("-")[0]
    kept = path.with_name(f"{cache_key}-folder")
    kept.mkdir()
    for number in range(9):
        path.with_name(f"{cache_key}-{number}.index").touch()
    path.with_name(".train.0123456789abcdef.tmp").touch()  # as a killed process leaves it
    edit(root / "labels/train/a.txt")
    load(root, tmp_path / "cache")
    new, report = sorted({*(tmp_path / "cache").iterdir()} - {kept})
    assert (new.suffix, report) == (".index", new.with_suffix(".txt"))
    assert new != path


@pytest.mark.parametrize("is_full", [False, True])
def test_a_cache_that_cannot_be_written_causes_a_warning_only(root, tmp_path, lines, monkeypatch, is_full):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("in the way")
    if is_full:
        monkeypatch.setattr(os, "fsync", full)
    assert len(load(root, tmp_path / ("cache" if is_full else "file/cache"))) == 5
    assert ("No space left" if is_full else "can't be cached") in take_messages(lines)[0]
    assert not list((tmp_path / "cache").glob("*"))


def test_images_that_other_classes_leave_out_have_another_cache(tmp_path):
    """Decoded images are stored by number."""
    data = write_dataset(tmp_path, train=4)
    for number, rows in enumerate(["0 .5 .5 .2 .2\nbad\n", "1 .5 .5 .2 .2\nbad\n", "0 .5 .5 .2 .2\n1 .5 .5 .2 .2\n"]):
        (tmp_path / "labels" / "train" / f"{number:03}.txt").write_text(rows)
    spec = load_dataset_spec(data)
    selections = []
    for name in spec.names:
        chosen = replace(spec, classes=(spec.names.index(name),))
        selections.append(load_index(chosen, "train", IndexSettings(progress=False, max_bad=1.0)))
    assert list(selections[0].paths) != list(selections[1].paths)
    assert CacheName.of(selections[0]) != CacheName.of(selections[1])
