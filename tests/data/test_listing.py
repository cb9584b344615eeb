"""Which files of the folders and lists of a split are its images (rule D4)."""

from __future__ import annotations

import numpy as np
import pytest

from data.findings import DUPLICATE, MISSING_IMAGE, UNSUPPORTED
from tests.data.data_set import BOX, Counts, counts, num_boxes, places


def test_images_of_folders_are_sorted_by_name_and_others_are_counted(data):
    data.pairs("train/b", "train/a/z", "train/a.b/y", "more/x")
    data.images("images/train/UPPER.PNG", "images/train/photo.jpeg", "images/train/.hidden.png")
    data.file("images/train/._b.png", b"left by macOS")
    data.file("images/train/.cache/c.png", b"")
    data.file("images/train/Thumbs.db", b"")
    data.file("images/train/p.heic", b"")
    data.file("images/train/q.heic", b"")
    data.yaml(train=["images/train", "images/more"])
    index = data.index()
    names = ["more/x.png", "train/UPPER.PNG", "train/a.b/y.png", "train/a/z.png", "train/b.png", "train/photo.jpeg"]
    assert list(index.paths) == [f"images/{name}" for name in names]
    assert places(index, UNSUPPORTED) == ["images/train/p.heic"]
    assert counts(index)[2:] == (0, 0)


def test_an_array_beside_an_image_of_its_name_is_its_copy(data):
    data.pairs("train/x")
    for stem in "xy":
        np.save(data.root / f"images/train/{stem}.npy", np.zeros((60, 80, 1), np.uint8))
    data.yaml(train="images/train", channels=1)
    assert list(data.index().paths) == ["images/train/x.png", "images/train/y.npy"]
    data.yaml()
    assert list(data.index().paths) == ["images/train/x.png"]  # of 8-bit RGB, other programs cache arrays


def test_a_broken_link_is_a_lost_image(data):
    data.pairs("train/x")
    (data.root / "images/train/gone.png").symlink_to("nowhere.png")
    (data.root / "images/train/itself.png").symlink_to("itself.png")
    data.file("labels/train/gone.txt", BOX * 2)
    data.yaml()
    index = data.index()
    assert counts(index) == Counts(1, 1, 2, 2)
    assert places(index, MISSING_IMAGE) == ["images/train/gone.png", "images/train/itself.png"]


ROWS = {
    "from the root": "images/train/{}",
    "absolute": "{root}/images/train/{}",
    "from the list": "./../images/train/{}",
    "windows": "images\\train\\{}",
    "other case": "images/train/X{}",
    "dropped folders": "data/obj/images/train/{}",
    "of another machine": "C:\\sets\\mine\\images\\train\\{}",
    "from the root, with a slash": "/images/train/{}",
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_a_list_name_images(data, case):
    data.pairs("train/a", "train/b", "train/xc")
    names = ["c.PNG"] if case == "other case" else ["b.png", "a.png"]
    data.file("lists/train.txt", "\n".join(ROWS[case].format(name, root=data.root) for name in names) + "\n\n")
    data.yaml(train="lists/train.txt")
    index = data.index()
    expected = ["images/train/xc.png"] if case == "other case" else ["images/train/a.png", "images/train/b.png"]
    assert num_boxes(index) == dict.fromkeys(expected, 1)
    assert len(index.report.findings) == 0


def test_a_row_without_an_image_is_a_lost_image_and_a_repeated_row_none(data):
    data.pairs("train/a", "train/b", "train/c")
    data.file("train.txt", "".join(f"images/train/{name}.png\n" for name in ("a", "gone", "b", "a")))
    data.yaml(train="train.txt")
    index = data.index()
    assert counts(index) == Counts(2, 2, 1, 0)
    assert places(index, MISSING_IMAGE) == ["train.txt:2"]
    assert places(index, DUPLICATE) == ["train.txt:4"]


def test_folders_are_dropped_only_if_no_row_is_a_path_as_written(data):
    data.pairs("train/a", "train/b")
    data.file("train.txt", "images/train/a.png\nold/images/train/b.png\n")
    data.yaml(train="train.txt")
    assert data.counts() == Counts(1, 1, 1, 0)


def test_all_rows_drop_as_many_folders_as_the_first_that_is_found(data):
    data.pairs("train/a", "train/b")
    data.file("train.txt", "x/y/images/train/gone.png\nx/y/images/train/a.png\nx/images/train/b.png\n")
    data.yaml(train="train.txt")
    index = data.index()
    assert list(index.paths) == ["images/train/a.png"]
    assert places(index, MISSING_IMAGE) == ["train.txt:1", "train.txt:3"]


def test_rows_that_become_equal_without_their_folders_name_one_image(data):
    """The second row means another image, which is not here."""
    data.pairs("train/a")
    data.file("train.txt", "p/images/train/a.png\nq/images/train/a.png\n")
    data.yaml(train="train.txt")
    assert data.counts() == Counts(1, 1, 1, 0)


def test_rows_of_pascal_voc_are_stems(data):
    data.images("JPEGImages/000012.jpg")
    data.file("labels/000012.txt")
    data.file("JPEGImages/000012.txt")
    data.file("ImageSets/Main/train.txt", "000012\n000013\n")
    data.yaml(train="ImageSets/Main/train.txt")
    assert data.counts() == Counts(1, 1, 1, 0)


def test_lists_of_one_split_may_share_images(data):
    data.pairs("train/a", "train/b")
    data.file("one.txt", "images/train/a.png\nimages/train/b.png\n")
    data.file("two.txt", "images/train/b.png\n")
    data.yaml(train=["one.txt", "two.txt"])
    assert data.counts()[:2] == (2, 2)
