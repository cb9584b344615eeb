"""Public data sets are made from a commit as benchmarks/accuracy/public.md says."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import cv2
import pytest

from benchmarks.accuracy.public import PublicSet, digest, fetch_commit, make_set, read_table, yolo_rows
from tests.helpers.tiny import write_dataset
from utils.errors import UserError

pytestmark = pytest.mark.benchmarks

SET = PublicSet(
    repository="", commit="HEAD", license="MIT", source="", train="images/train", val="images/val",
    names=("light", "dark"), sha256="",
)  # fmt: skip


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True).stdout


def test_no_training_image_is_a_copy_of_a_validation_image(tmp_path: Path):
    original = tmp_path / "original"
    write_dataset(original, train=8, val=3, size=96)
    images = original / "images"
    labels = original / "labels"
    again = cv2.imread(str(images / "val/000.png"))
    cv2.imwrite(str(images / "train/again.jpg"), cv2.resize(again, (80, 80)))
    (labels / "train/again.txt").write_bytes((labels / "val/000.txt").read_bytes())
    moved = {"train/000": "train/a_png.rf.1", "train/001": "train/a_png.rf.2", "train/002": "train/b_png.rf.1"}
    for old, new in (moved | {"val/001": "val/b_png.rf.2"}).items():  # two copies of a in train, of b in both splits
        (images / f"{old}.png").rename(images / f"{new}.png")
        (labels / f"{old}.txt").rename(labels / f"{new}.txt")
    (labels / "train/003.txt").unlink()
    git(original, "init", "--quiet")
    git(original, "add", ".")
    git(original, "commit", "--quiet", "-m", "images")
    public = replace(SET, repository=str(original), commit=git(original, "rev-parse", "HEAD").strip())
    clone = tmp_path / "clone"
    fetch_commit(public, clone)
    with pytest.raises(UserError, match="checksum"):
        make_set("tiny", public, clone, tmp_path)
    root = tmp_path / "tiny"
    assert not (root / "tiny.yaml").exists()
    make_set("tiny", replace(public, sha256=digest(root)), clone, tmp_path)

    def contents(folder: Path, pattern: str = "*") -> set[bytes]:
        return {path.read_bytes() for path in folder.glob(pattern)}

    assert contents(root / "images/val") == contents(images / "val")
    train = contents(root / "images/train")
    one_of_a = contents(images / "train", "a_png.rf.*")
    assert len(train & one_of_a) == 1
    assert train - one_of_a == contents(images / "train", "00[4-7].png")


def test_boxes_of_all_formats_are_clipped_to_the_image():
    polygon_and_box = "1 0.2 0.1 0.6 0.1 0.4 0.5\n0 0.9 0.5 0.4 0.2\n0 0.9 0.5 0.4 0.2\n0 0.5 0.5 0 0.1\n"
    assert yolo_rows(polygon_and_box, SET) == [
        "1 0.400000 0.300000 0.400000 0.400000\n",
        "0 0.850000 0.500000 0.300000 0.200000\n",
    ]
    box = "<bndbox><xmin>20</xmin><ymin>-5</ymin><xmax>60</xmax><ymax>25</ymax></bndbox>"
    size = "<size><width>100</width><height>50</height></size>"
    voc = f"<annotation>{size}<object><name>dark</name>{box}</object></annotation>"
    assert yolo_rows(voc, replace(SET, labels="voc")) == ["1 0.400000 0.250000 0.400000 0.500000\n"]


def test_the_licenses_allow_the_use():
    table = read_table()
    assert len(table) >= 8
    assert {public.license for public in table.values()} <= {"CC BY 4.0", "MIT", "Apache-2.0", "public domain"}
