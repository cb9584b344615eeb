"""Rows of .txt lists are resolved to their images, and never to images of another split in silence."""

import os
import random
import re
from pathlib import Path

import pytest

from data.labels.findings import NO_LABEL
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from tests.helpers.messages import matches, refused
from tests.helpers.three_formats import write_image
from tests.helpers.tiny import write_dataset
from utils.errors import UserError

RELATIVE = "give paths of images relative to .../set: '{}' if this image is meant"


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
    """These images would otherwise get labels from the split's own annotations."""
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
        f"same name, but is an image of 'val'; {RELATIVE.format(f'{folder}/0.png')}"
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
def test_relocated_lists_that_are_read_alike_may_share_images_with_a_warning(tmp_path, row, lines):
    """They may also name images that are missing, and numbered like others."""
    images = [f"images/{number}.png" for number in range(3)]
    rows = [row.format(number) for number in range(3)]
    write_lists(
        tmp_path / "set", images, {"train": "all.txt", "val": "part.txt"}, {"all.txt": rows, "part.txt": rows[1:]}
    )
    assert split_names(tmp_path / "set", "train") == images
    lines.clear()
    assert split_names(tmp_path / "set", "val") == images[1:]
    assert matches(
        lines.messages[1],
        "set/part.txt: some of its images (first: images/1.png) are also in other lists, whose rows could mean the "
        "same files: 2 in .../set/all.txt of 'train'; if other images of these names are meant, give paths of images "
        "relative to .../set",
    )


def test_relocated_lists_name_the_same_images_as_exact_ones(tmp_path):
    """For random sets in which folders repeat file names."""
    for seed in range(4):
        rng = random.Random(seed)
        folders = rng.sample(("", "images/", "images/train/", "a/images/", "b/images/", "data/obj/"), 3)
        images = [f"{folder}{number}.png" for folder in folders for number in range(4)]
        rng.shuffle(images)
        rows = {"train.txt": images[:6], "lists/val.txt": images[6:]}
        splits = {"train": "train.txt", "val": "lists/val.txt"}
        root = tmp_path / f"{seed}/set"
        write_lists(root, images, splits, rows)
        for prefix in ("/home/me/set/", "D:\\old\\", "cloned/"):
            lists = {
                name: [prefix + (image.replace("/", "\\") if "\\" in prefix else image) for image in of_list]
                for name, of_list in rows.items()
            }
            write_lists(root, [], splits, lists)
            for split, name in splits.items():
                assert split_names(root, split) == sorted(rows[name]), f"seed {seed}, {prefix}"


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_log_tells_once_how_a_relocated_list_is_read(tmp_path, split, lines):
    """The other lists are also read, to find out whether the label file without an image is theirs."""
    root = tmp_path / "set"
    rows = [f"/old/images/{number}.png" for number in range(3)]
    splits = {name: f"{name}.txt" for name in ("train", "val", "test")}
    images = [f"images/{number}.png" for number in range(3)]
    write_lists(root, images, splits, dict.fromkeys(splits.values(), rows))
    (root / "labels").mkdir()
    for name in ("1", "unused"):
        (root / f"labels/{name}.txt").write_text("0 0.5 0.5 0.5 0.5")
    assert split_names(root, split) == images
    assert [line.partition(": ")[0] for line in lines.messages] == [str(root / f"{split}.txt")] * 2
    others = [f"3 in {root}/{file} of '{name}'" for name, file in splits.items() if name != split]
    assert ", ".join(others) in lines.messages[1]


@pytest.mark.parametrize(("split", "other"), [("train", "val"), ("val", "train")])
def test_rows_that_differ_in_dropped_folders_name_different_images(tmp_path, split, other):
    """Only the images of one split exist, and which split it is cannot be known."""
    lists = {"train.txt": ["/x/train/images/0.png"], "val.txt": ["/x/val/images/0.png"]}
    write_lists(tmp_path / "set", ["images/0.png"], {"train": "train.txt", "val": "val.txt"}, lists)
    reason = f"images/0.png has the same name, but is an image of '{other}' (.../set/{other}.txt:1)"
    row = f"/x/{split}/images/0.png"
    with refused(f"set/{split}.txt:1: '{row}' is not an image; {reason}; {RELATIVE.format('images/0.png')}"):
        split_names(tmp_path / "set", split)


def test_an_image_that_a_list_repeats_for_another_folder_is_missing(tmp_path):
    rows = ["/x/a/images/0.png", "/x/a/images/1.png", "/x/b/images/1.png", "/x/a/images/0.png"]
    images = ["images/0.png", "images/1.png"]
    write_lists(tmp_path / "set", images, {"train": "train.txt"}, {"train.txt": rows})
    listing = list_split(load_dataset_spec(tmp_path / "set/d.yaml"), "train")
    assert [image.name for image in listing.images] == images
    assert [(finding.text, finding.lost_images) for finding in listing.findings if finding.kind != NO_LABEL] == [
        ("images/0.png is listed twice; used once", 0),
        ("/x/b/images/1.png not found; images/1.png is read for /x/a/images/1.png (train.txt:2)", 1),
    ]


@pytest.mark.parametrize(
    ("first", "second"), [("/home/me/set/images/", "D:\\data\\set\\images\\"), ("/x/cam1/images/", "/x/cam2/images/")]
)
def test_lists_of_one_split_with_other_leading_folders_share_an_image_with_a_warning(tmp_path, lines, first, second):
    """The lists may be from two machines, or name images of two folders, of which one is missing."""
    images = [f"images/{number}.png" for number in range(3)]
    lists = {"a.txt": [f"{first}0.png", f"{first}1.png"], "b.txt": [f"{second}1.png", f"{second}2.png"]}
    write_lists(tmp_path / "set", images, {"train": "[a.txt, b.txt]"}, lists)
    listing = list_split(load_dataset_spec(tmp_path / "set/d.yaml"), "train")
    assert [image.name for image in listing.images] == images
    own = lists["b.txt"][0]
    other = lists["a.txt"][1]
    assert [(str(finding), finding.lost_images) for finding in listing.findings if finding.kind != NO_LABEL] == [
        (f"b.txt:1: image listed twice: {own} and {other} (a.txt:2) are both read as images/1.png; used once", 0)
    ]
    assert matches(
        lines.messages[-1],
        "set/b.txt: 1 of 2 rows are read as images that other lists of the split name by other folders (first: "
        f"{own} (b.txt:1) and {other} (a.txt:2) are images/1.png); each is used once; if different images are meant, "
        "give paths of images relative to .../set",
    )


def test_a_list_whose_images_are_not_found_may_mean_those_of_another(tmp_path, lines):
    """In place of a missing image, the image of that name is taken, which may belong to another split."""
    images = ["images/train/0.png", "images/train/1.png", "images/val/1.png"]
    lists = {"train.txt": ["1.png", "0.png"], "val.txt": ["0.png", "1.png"]}
    write_lists(tmp_path / "set", images, {"train": "train.txt", "val": "val.txt"}, lists)
    with refused("2 images fit '1.png': ..."):
        split_names(tmp_path / "set", "train")
    lines.clear()
    assert split_names(tmp_path / "set", "val") == ["images/train/0.png", "images/train/1.png"]
    assert "val.txt: some of its images (first: images/train/0.png) are also in " in lines.messages[1]


def test_a_list_that_two_splits_name_is_no_reason_for_a_warning(tmp_path, lines):
    write_lists(
        tmp_path / "set", ["images/0.png"], {"train": "all.txt", "val": "all.txt"}, {"all.txt": ["old/images/0.png"]}
    )
    assert split_names(tmp_path / "set", "val") == ["images/0.png"]
    assert not [message for message in lines.messages if "are also in" in message]


def test_another_split_may_name_a_list_and_the_folder_of_its_images(tmp_path):
    """The images of its list are still not those of this split."""
    root = tmp_path / "set"
    images = [*(f"images/{number}.png" for number in range(10)), "extra/10.png"]
    rows = [f"old/{image}" for image in images]
    write_lists(root, images, {"train": "train.txt", "val": "val.txt"}, {"train.txt": rows, "val.txt": ["10.png"]})
    (root / "d.yaml").write_text("train: [train.txt, images]\nval: val.txt\nnames: [cat]\n")
    reason = "extra/10.png has the same name, but is an image of 'train' (.../set/train.txt:11)"
    with refused(f"set/val.txt:1: '10.png' is not an image; {reason}; {RELATIVE.format('extra/10.png')}"):
        split_names(root, "val")


def test_a_relocated_list_may_name_images_in_the_folders_of_its_own_split(tmp_path):
    root = tmp_path / "set"
    write_lists(
        root, ["images/val/0.png"], {"train": "images", "val": "val.txt"}, {"val.txt": ["old/images/val/0.png"]}
    )
    (root / "d.yaml").write_text("train: images\nval: [images/val, val.txt]\nnames: [cat]\n")
    assert split_names(root, "val") == ["images/val/0.png"]


def test_each_row_is_read_as_an_exact_path_if_it_is_one(tmp_path, lines):
    root = tmp_path / "set"
    images = ["images/0.png", "images/1.png", "images/2.png", "images/3.png", "images/3.jpg", "lists/images/4.png"]
    rows = ["images/0.png", "images\\1.PNG", "images/2", "images/3", ".\\images\\4.png", "images/5", "images/6.png"]
    write_lists(root, images, {"train": "lists/train.txt", "val": "images"}, {"lists/train.txt": rows})
    listing = list_split(load_dataset_spec(root / "d.yaml"), "train")
    assert [image.name for image in listing.images] == [*images[:3], images[-1]]
    assert [str(finding) for finding in listing.findings] == [
        "lists/train.txt:4: bad row of a list: 'images/3' may be any of images/3.jpg, images/3.png",
        "lists/train.txt:6: bad row of a list: 'images/5' is not the path of an image",
        "lists/train.txt:7: missing image: images/6.png not found",
    ]


def test_a_row_with_null_characters_names_no_image(tmp_path):
    rows = ["images/0.png", "\0\0\0images/1.png", "im\0ages/1.png", "\0\0", "images/1\0.png"]
    lists = {"train.txt": rows, "val.txt": ["gone/images/\0/0.png"]}
    write_lists(tmp_path / "set", ["images/0.png", "images/1.png"], {"train": "train.txt", "val": "val.txt"}, lists)
    (tmp_path / "set/labels").mkdir()
    listing = list_split(load_dataset_spec(tmp_path / "set/d.yaml"), "train")
    assert [image.name for image in listing.images] == ["images/0.png"]
    lost = [finding.where for finding in listing.findings if finding.lost_images]
    assert lost == [f"train.txt:{line}" for line in range(2, 6)]


def test_a_list_of_which_few_rows_are_exact_is_reported(tmp_path, lines):
    """One image also happens to be at the path in its row."""
    root = tmp_path / "set"
    rows = [f"{number}.png" for number in range(3)]
    write_lists(root, ["1.png", *(f"images/{row}" for row in rows)], {"train": "train.txt"}, {"train.txt": rows})
    assert split_names(root, "train") == ["1.png"]
    assert lines.messages == [
        f"{root}/train.txt: only 1 of 3 rows are paths of images as written, first train.txt:2: 1.png; the others are "
        "not looked up in other folders: write all rows as such paths"
    ]


@pytest.mark.parametrize("train", ["JPEGImages", "ImageSets/Main/trainval.txt"])
def test_lists_of_voc_may_share_images_with_other_splits(tmp_path, train):
    images = [f"JPEGImages/{number}.png" for number in range(3)]
    lists = {"ImageSets/Main/val.txt": ["2"]}
    if train.endswith(".txt"):
        lists[train] = ["0", "1", "2"]
    write_lists(tmp_path / "set", images, {"train": train, "val": "ImageSets/Main/val.txt"}, lists)
    assert split_names(tmp_path / "set", "train") == images
    assert split_names(tmp_path / "set", "val") == images[2:]


@pytest.mark.parametrize("other", ["0.jpg", "ImageSets/Main/0.jpg"])
def test_a_stem_in_a_list_of_voc_names_the_image_in_jpegimages(tmp_path, other):
    images = ["JPEGImages/0.png", "JPEGImages/1.png"]
    lists = {"ImageSets/Main/train.txt": ["0", "1"]}
    write_lists(tmp_path / "set", [*images, other], {"train": "ImageSets/Main/train.txt"}, lists)
    assert split_names(tmp_path / "set", "train") == images


@pytest.mark.parametrize("row", ["{}", "/home/me/mine/{}.png"])
def test_a_list_takes_no_images_from_the_jpegimages_of_another_data_set(tmp_path, row):
    images = ["0.png", "1.png"]
    root = tmp_path / "sets/mine"
    write_lists(root, images, {"train": "train.txt"}, {"train.txt": [row.format(number) for number in range(2)]})
    for image in images:
        write_image(tmp_path / "JPEGImages" / image, 9, 9)
    assert split_names(root, "train") == images


@pytest.mark.parametrize("file", ["ImageSets/Main/train.txt", "folds/1/train.txt"])
@pytest.mark.parametrize("root", ["voc", "yamls", "voc/ImageSets/Main"])
def test_stems_in_a_list_of_voc_are_found_wherever_the_yaml_is(tmp_path, file, root):
    write_lists(tmp_path / "voc", ["JPEGImages/0.png", "masks/0.png"], {"train": file}, {file: ["0"]})
    (tmp_path / root).mkdir(parents=True, exist_ok=True)
    write_lists(tmp_path / root, [], {"train": os.path.relpath(tmp_path / "voc" / file, tmp_path / root)}, {})
    assert [Path(name).parts[-2:] for name in split_names(tmp_path / root, "train")] == [("JPEGImages", "0.png")]


def test_a_relocated_list_is_refused_if_only_a_later_row_names_an_image_of_another_split(tmp_path):
    root = tmp_path / "set"
    rows = [f"/home/me/{number}.png" for number in range(12)]
    images = [f"{number}.png" for number in range(12)]
    write_lists(root, images, {"train": "train.txt", "val": "val.txt"}, {"train.txt": ["11.png"], "val.txt": rows})
    assert split_names(root, "train") == ["11.png"]
    reason = "11.png has the same name, but is an image of 'train'"
    with refused(f"set/val.txt:12: '/home/me/11.png' is not an image; {reason}; {RELATIVE.format('11.png')}"):
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


def test_a_relocated_list_whose_only_image_is_a_broken_link_has_no_images(tmp_path):
    root = tmp_path / "set"
    write_lists(root, [], {"train": "train.txt"}, {"train.txt": ["old/images/0.png"]})
    (root / "images").mkdir()
    (root / "images/0.png").symlink_to("nowhere.png")
    lost = "1 image left out, first train.txt:1: old/images/0.png not found"
    with refused(f"set/train.txt: no images found for 'train' (...); {lost}"):
        split_names(root, "train")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder.png", "folder.png: a folder, not a file"),
        ("broken.png", "broken.png: a broken link"),
        ("BROKEN.png", "BROKEN.png: a broken link"),
        (".hidden.png", ".hidden.png not found, because names that begin with a dot are hidden; rename the image"),
    ],
)
def test_a_row_that_names_no_image_says_why(tmp_path, name, message):
    data = write_dataset(tmp_path, train=2, val=1)
    (tmp_path / "images/train/folder.png").mkdir()
    (tmp_path / "images/train/broken.png").symlink_to("nowhere.png")
    (tmp_path / "images/train/.hidden.png").touch()
    (tmp_path / "train.txt").write_text(f"images/train/000.png\nimages/train/{name}\n")
    data.write_text("train: train.txt\nnames: [light, dark]\n")
    (finding,) = list_split(load_dataset_spec(data), "train").findings
    assert finding.where == "train.txt:2"
    assert finding.lost_images == 1
    assert finding.text == f"images/train/{message}"
