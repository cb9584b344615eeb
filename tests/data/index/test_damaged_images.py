"""Damaged images, and files that are not regular: found by the scan, and named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data.images.decode import read_image
from data.index import read_images
from data.source.dataset_yaml import load_dataset_spec
from tests.data.index.small_set import load, take_messages
from tests.helpers.damaged_jpegs import write_jpegs
from tests.helpers.messages import refused
from tools.check.scan_splits import scan_dataset


def test_files_with_zeros_in_the_middle_are_bad(tmp_path, lines):
    root = tmp_path / "set"
    write_jpegs(root, damaged=20)
    with refused(
        "set/d.yaml: 'train': 20 of 24 images and 20 of 24 labeled objects can't be used (--max-bad is "
        "0.1): unreadable image: 20 images with 20 objects, first images/train/000.jpg: damaged image "
        "(its image ends before its coded data); report: ..."
    ):
        load(root, tmp_path / "cache")
    index = load(root, tmp_path / "cache", max_bad=0.9)
    assert [os.path.basename(p) for p in index.paths] == ["020.jpg", "021.jpg", "022.jpg", "023.jpg"]


def test_damage_in_the_sample_causes_all_images_to_be_decoded(tmp_path, lines, monkeypatch):
    """Parts of other JPEGs look like valid coded data."""
    root = tmp_path / "set"
    data = write_jpegs(root, damaged=12, kind="other")
    monkeypatch.setattr(read_images, "SAMPLED", 0)
    assert len(load(root, tmp_path / "c0", max_bad=0)) == 24
    (full,) = scan_dataset(load_dataset_spec(data), ("train",), workers=0)  # a check
    assert len(full.index) == 12
    monkeypatch.setattr(read_images, "SAMPLED", 8)
    take_messages(lines)
    sampled = load(root, tmp_path / "c2", max_bad=0.9)
    assert list(sampled.paths) == list(full.index.paths)
    assert "of 8 sampled images are damaged; decoding all images" in "".join(take_messages(lines))


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (
            "folder",
            "set/d.yaml: 'train': 3 of 7 images can't be used (--max-bad is 0.1): unreadable image: 2 images, "
            "first images/train/pipe.jpg: a pipe or device, not a file; unreadable image: "
            "images/train/extra.jpg: an empty folder, not a file; report: ...",
        ),
        (
            "list",
            "set/d.yaml: 'train': 2 of 6 images can't be used (--max-bad is 0.1): unreadable image: "
            "list.txt:5: images/train/pipe.jpg: a pipe or device, not a file; unreadable image: list.txt:6: "
            "images/train/zero.jpg: a pipe or device, not a file; report: ...",
        ),
    ],
)
def test_a_pipe_or_folder_named_jpg_is_a_bad_file(tmp_path, by, message):
    root = tmp_path / "set"
    path = write_jpegs(root, 4)
    images = root / "images/train"
    os.mkfifo(images / "pipe.jpg")
    os.symlink("/dev/zero", images / "zero.jpg")
    if by == "list":
        (root / "list.txt").write_text("".join(f"images/train/{p.name}\n" for p in sorted(images.iterdir())))
        path.write_text(path.read_text().replace("train: images/train", "train: list.txt"))
    else:
        for name in ("extra.jpg", "more.gif", "pages.png"):
            (images / name).mkdir()
        for path in (images / "003.jpg", root / "labels/train/003.txt"):
            (path.parent / "pages.png").mkdir(exist_ok=True)
            path.rename(path.parent / "pages.png" / path.name)
    with refused(message):
        load(root, tmp_path / "cache")
    assert len(load(root, tmp_path / "cache", max_bad=0.5)) == 4
    with refused("set/images/train/pipe.jpg: cannot be read (is a pipe or device, not a file)"):
        read_image(images / "pipe.jpg")


IRREGULAR = {
    "pipe": (os.mkfifo, "a pipe or device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a pipe or device"),
    "folder": (Path.mkdir, "a folder"),
    "hole": (lambda path: path.touch() or os.truncate(path, 2**40), "has 1,099,511,627,776 bytes, more than such a"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "labels/train/001.txt") for kind in IRREGULAR), ("hole", "images/train/001.jpg")]
)
def test_a_file_that_is_not_regular_is_named_at_once(tmp_path, kind, name):
    """Reading a pipe would block forever; a sparse file of a terabyte would fill the memory."""
    root = tmp_path / "set"
    make, what = IRREGULAR[kind]
    write_jpegs(root, 4)
    (root / name).unlink()
    make(root / name)
    index = load(root, tmp_path / "cache", max_bad=0.5)
    assert len(index) == 3
    assert any(name in line and what in line for line in index.report.lines)
