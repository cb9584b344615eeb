"""Lists of images, also those written for another folder: no row is read as an image of another split."""

import os
import re
from pathlib import Path

import pytest

from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from tests.data.index.small_set import SIZES, assert_same, load, take_messages
from tests.helpers.messages import refused
from tests.helpers.three_formats import write_image
from utils.errors import UserError


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
    """If no row names an image as it is written, the first that fits one image decides how all are read."""
    expected = load(root, tmp_path / "cache")
    names = ["gone.jpg", *SIZES] if suffixes else ["gone", *(os.path.splitext(name)[0] for name in SIZES)]
    text = "".join(f"{folder}/{name}\n" for name in names)
    (root / "list.txt").write_text(text.replace("/", "\\") if windows else text, encoding="utf-8")
    (root / "d.yaml").write_text("train: list.txt\nnames: [cat, dog, cow]\n")
    take_messages(lines)
    index = load(root, tmp_path / "cache", max_bad=0.2)
    if (folder, windows, suffixes) == ("images/train", False, True):
        assert take_messages(lines)[0].startswith("train: 5 images")
    else:
        assert "rows are read like line 2: " in (line := take_messages(lines)[0])
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


RELATIVE = "give paths of images relative to .../set"


@pytest.mark.parametrize(
    ("train", "val", "row"),
    [
        ("lists/train.txt", "images/val", "images/train/0.png"),
        ("lists/train.txt", "val/images", "train/images/0.png"),
        ("lists/train.txt", "val/images", "/home/me/train/images/0.png"),
        ("lists/train.txt", "images/val", "0.png"),
        ("train/train.txt", "val/val.txt", "images/0.png"),
    ],
)
def test_a_list_without_images_does_not_take_those_of_another_split(tmp_path, train, val, row):
    """They would get the labels of the split's own annotations."""
    root = tmp_path / "set"
    folder = "val/images" if val == "val/val.txt" else val
    write_image(root / folder / "0.png", 9, 9)
    for name, text in ((train, row), (val, "images/0.png")):
        if name.endswith(".txt"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    (root / "d.yaml").write_text(f"train: {train}\nval: {val}\nnames: [cat]\n")
    with refused(
        f"set/{train}:1: '{row}' is not an image, and neither is any other row; {folder}/0.png has the "
        f"same name, but is an image of 'val'; {RELATIVE}"
    ):
        list_split(load_dataset_spec(root / "d.yaml"), "train")


def split_names(root: Path, split: str) -> list[str]:
    return sorted(image.name for image in list_split(load_dataset_spec(root / "d.yaml"), split).images)


def write_lists(root: Path, images: list[str], splits: dict[str, str], lists: dict[str, list[str]]) -> None:
    for name in images:
        write_image(root / name, 9, 9)
    for name, rows in lists.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(rows))
    (root / "d.yaml").write_text("".join(f"{key}: {name}\n" for key, name in splits.items()) + "names: [cat]\n")


@pytest.mark.parametrize(
    ("folder", "train", "train_rows", "val", "val_row"),
    [
        ("images", "images", [], "val.txt", "val/images/0.png"),
        ("images", "train.txt", ["images/0.png"], "val.txt", "val/images/0.png"),
        (".", "train.txt", ["0.png"], "val.txt", "val/0.png"),
        ("images/train", "lists/train.txt", ["images/train/0.png"], "lists/val.txt", "0.png"),
        ("images/train", "lists/train.txt", ["images\\train\\0.png"], "lists/val.txt", "0.png"),
    ],
)
def test_a_relocated_list_is_refused_if_another_split_has_its_images(tmp_path, folder, train, train_rows, val, val_row):
    root = tmp_path / "set"
    image = "0.png" if folder == "." else f"{folder}/0.png"
    lists = {val: [val_row]} | ({train: train_rows} if train_rows else {})
    write_lists(root, [image], {"train": train, "val": val}, lists)
    message = f"; {image} has the same name, but is an image of 'train'; give paths of images relative to "
    with pytest.raises(UserError, match=re.escape(message)):
        split_names(root, "val")


@pytest.mark.parametrize("row", ["old/images/{}.png", "/home/me/set/images/{}.png", "{}"])
def test_relocated_lists_that_are_read_alike_may_share_images(tmp_path, row):
    images = [f"images/{number}.png" for number in range(3)]
    rows = [row.format(number) for number in range(3)]
    write_lists(
        tmp_path / "set", images, {"train": "all.txt", "val": "part.txt"}, {"all.txt": rows, "part.txt": rows[1:]}
    )
    assert split_names(tmp_path / "set", "train") == images
    assert split_names(tmp_path / "set", "val") == images[1:]


@pytest.mark.parametrize("train", ["JPEGImages", "ImageSets/Main/trainval.txt"])
def test_lists_of_voc_may_share_images_with_other_splits(tmp_path, train):
    images = [f"JPEGImages/{number}.png" for number in range(3)]
    lists = {"ImageSets/Main/val.txt": ["2"]}
    if train.endswith(".txt"):
        lists[train] = ["0", "1", "2"]
    write_lists(tmp_path / "set", images, {"train": train, "val": "ImageSets/Main/val.txt"}, lists)
    assert split_names(tmp_path / "set", "train") == images
    assert split_names(tmp_path / "set", "val") == images[2:]


def test_a_relocated_list_is_refused_if_only_a_later_row_names_an_image_of_another_split(tmp_path):
    root = tmp_path / "set"
    rows = [f"/home/me/{number}.png" for number in range(12)]
    images = [f"{number}.png" for number in range(12)]
    write_lists(root, images, {"train": "train.txt", "val": "val.txt"}, {"train.txt": ["11.png"], "val.txt": rows})
    assert split_names(root, "train") == ["11.png"]
    reason = "11.png has the same name, but is an image of 'train'"
    with refused(f"set/val.txt:12: '/home/me/11.png' is not an image; {reason}; {RELATIVE}"):
        split_names(root, "val")


@pytest.mark.parametrize(
    ("image", "file", "row"),
    [
        ("data/0.png", "val.txt", "0"),  # the list of another split is beside the image
        ("foo/images/0.png", "foo/lists/val.txt", "/old/bar/images/0.png"),
        ("darknet/data/obj/0.png", "darknet/cfg/val.txt", "C:\\me\\data\\obj\\0.png"),
        ("images/val/2.png", "val.txt", "/home/me/set/images/val/2.png"),  # a copy ends in more of the row
        ("data/0.png", "val.txt", "data\\0.png"),
        ("data/1.png", "val.txt", "data\\1.png"),  # complete, and an image of both splits
    ],
)
def test_a_relocated_list_takes_the_image_that_no_other_split_names(tmp_path, image, file, row):
    root = tmp_path / "set"
    images = [image, "data/1.png", "backup/set/images/val/2.png"]
    write_lists(root, images, {"train": "data/train.txt", "val": file}, {"data/train.txt": ["1.png"], file: [row]})
    assert split_names(root, "val") == [image]


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
            f"'data/other/a.jpg' is not an image, and neither is any other row; images/train/a.jpg has "
            f"the same name, but is in another folder; {RELATIVE}",
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
