"""Indexes of lists of images, also of those written for another folder."""

import os
from pathlib import Path

import pytest

from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from tests.data.index.small_set import SIZES, assert_same, load, take_messages
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_image


def test_txt_lists_of_images_are_read(root, tmp_path, lines):
    expected = load(root, tmp_path / "cache")
    absolute = root / "images/train/a.jpg"
    rows = [str(absolute), "./images/train/b.png", "images/train/sub/c.jpg", "", "./images/train/d.png"]
    rows.append("images/train/ü.jpg")
    (root / "list.txt").write_text("\n".join(rows), encoding="utf-8")
    (root / "d.yaml").write_text("train: list.txt\nval: [images/train/sub, list.txt]\nnames: [cat, dog, cow]\n")
    assert_same(expected, load(root, tmp_path / "cache"))
    both = load(root, tmp_path / "cache", "val")
    assert_same(expected, both)
    assert both.report.lines[0] == "list.txt:3: image listed twice: images/train/sub/c.jpg is listed twice; used once"
    (root / "list.txt").write_text("images/train/a.jpg\nimages/train/no\0where.jpg\nnotes.md\n")
    (root / "lists").mkdir()
    index = load(root, tmp_path / "cache", max_bad=0.7)
    first, second = index.report.lines
    assert first.startswith("list.txt:2: missing image: ")
    assert second.startswith("list.txt:3: bad row of a list: 'notes.md' is not the path of an image")
    with refused(
        "set/d.yaml: 'train': 2 of 3 images can't be used (--max-bad is 0.1): missing image: list.txt:2: "
        "images/train/no...where.jpg not found; bad row of a list: list.txt:3: 'notes.md' is not the path "
        "of an image; report: ..."
    ):
        load(root, tmp_path / "cache", max_bad=0.1)


@pytest.mark.parametrize(
    "folder", ["images/train", "data/images/train", "/home/me/set/images/train", "C:/set/images/train"]
)
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("suffixes", [False, True])
def test_lists_that_were_written_for_another_folder(root, tmp_path, lines, folder, windows, suffixes):
    """If no row is a path in the data set's folder, the first that fits one image decides how all are read."""
    expected = load(root, tmp_path / "cache")
    names = ["gone.jpg", *SIZES] if suffixes else ["gone", *(os.path.splitext(name)[0] for name in SIZES)]
    text = "".join(f"{folder}/{name}\n" for name in names)
    (root / "list.txt").write_text(text.replace("/", "\\") if windows else text, encoding="utf-8")
    (root / "d.yaml").write_text("train: list.txt\nnames: [cat, dog, cow]\n")
    take_messages(lines)
    index = load(root, tmp_path / "cache", max_bad=0.2)
    if folder == "images/train":
        assert take_messages(lines)[0].startswith("train: 5 images")
    else:
        line = take_messages(lines)[0]
        assert "rows are read like line 2: " in line
        assert line.endswith(" is images/train/a.jpg")
    assert_same(expected, index)
    assert index.report.lines[0].startswith("list.txt:1: missing image: ")


def test_a_row_with_fewer_folders_than_the_others_is_a_missing_image(root, tmp_path):
    """The rows are for another folder, whose parts are left out: nothing would be left of this one but the folder."""
    (root / "list.txt").write_text("far/away/images/train/a.jpg\nfar/away/images/train/b.png\nd.png\n")
    (root / "d.yaml").write_text("train: list.txt\nnames: [cat, dog, cow]\n")
    index = load(root, tmp_path, max_bad=0.5)
    assert list(index.paths) == ["images/train/a.jpg", "images/train/b.png"]
    assert "list.txt:3: missing image: d.png not found" in list(index.report.lines)


def listed_row(root: Path, row: str) -> None:
    """Makes a data set of the images in ``row``, the second one of a list."""
    write_image(root / "images/val/b.jpg", 9, 9)
    (root / "list.txt").write_text(f"\n{row}\n{row}x\n", encoding="utf-8")
    (root / "d.yaml").write_text("train: list.txt\nnames: [cat, dog, cow]\n")


@pytest.mark.parametrize("row", ["train/a.jpg", "a", "c:\\images\\train\\a.jpg"])
def test_a_row_of_a_list_that_is_the_end_of_the_path_of_one_image(root, row):
    listed_row(root, row)
    (image,) = list_split(load_dataset_spec(root / "d.yaml"), "train").images
    assert image.name == "images/train/a.jpg"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x.jpg", "'x.jpg' is not an image, and neither is any other row; give paths of images relative to .../set"),
        (
            "train/sub",
            "'train/sub' is not an image, and neither is any other row; give paths of images relative to .../set",
        ),
        (
            "data/other/a.jpg",
            "'data/other/a.jpg' is not an image, and neither is any other row; images/train/a.jpg has the same name, "
            "but is in another folder; give paths of images relative to .../set: 'images/train/a.jpg' if this image is "
            "meant",
        ),
        (
            "b",
            "2 images fit 'b': .../images/train/b.png, .../images/val/b.jpg; name images by their paths relative to "
            ".../set",
        ),
    ],
)
def test_rows_of_a_list_that_match_no_image_or_several(root, tmp_path, row, message):
    listed_row(root, row)
    with refused(f"set/list.txt:2: {message}"):
        load(root, tmp_path / "cache")
