"""Rules D1 to D4: which files are the images of a split and their labels, and what becomes of the others."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import yaml

from data.findings import DUPLICATE, NO_LABEL, UNSUPPORTED
from tests.data.data_set import DataSet, num_boxes, places, refusal, told

# Files (see `DataSet.write`), the YAML, and what is told of the split train.
TRAIN = {"train": "images/train"}
VOC = {"train": "images/train", "annotations": {"train": "voc"}}
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "labels for images": ("images/train/p/x.png labels/train/p/x.txt", TRAIN, "images/train/p/x.png:1"),
    "the last folder images": (
        "images/a/images/x.png images/a/labels/x.txt",
        {"train": "images"},
        "images/a/images/x.png:1",
    ),
    "beside, in images": ("images/train/x.png images/train/x.txt", TRAIN, "images/train/x.png:1"),
    "beside": ("photos/x.png photos/x.txt", {"train": "photos"}, "photos/x.png:1"),
    "another case": ("images/train/l3.png labels/train/L3.TXT", TRAIN, "images/train/l3.png:1"),
    "another composition": (
        "images/train/cafe\u0301.png labels/train/caf\u00e9.txt",
        TRAIN,
        "images/train/cafe\u0301.png:1",
    ),
    "not at the first dot": ("images/train/i.v1.png labels/train/i.v1.txt", TRAIN, "images/train/i.v1.png:1"),
    "not a full name": (
        "images/train/x.png labels/train/x.png.txt images/train/o.png labels/train/o.txt",
        TRAIN,
        "images/train/o.png:1 images/train/x.png:0 lost 0+1 labels/train/x.png.txt",
    ),
    "not an earlier images": (
        "images/a/images/x.png labels/a/images/x.txt images/a/images/o.png images/a/labels/o.txt",
        {"train": "images"},
        "images/a/images/o.png:1 images/a/images/x.png:0 lost 0+1 labels/a/images/x.txt",
    ),
    "not one of two cases": (
        "images/train/l.png labels/train/L.txt labels/train/l.TXT images/train/o.png labels/train/o.txt",
        TRAIN,
        "images/train/l.png:0 images/train/o.png:1 lost 0+2 labels/train/L.txt labels/train/l.TXT",
    ),
    "VOC, path below the split": ("images/train/P/x.png voc/p/X.XML", VOC, "images/train/P/x.png:1"),
    "VOC, of two splits": (
        "images/train/x.png images/val/y.png voc/x.xml voc/y.xml voc/z.xml:2",
        {"train": "images/train", "val": "images/val", "annotations": "voc"},
        "images/train/x.png:1 lost 0+2 voc/z.xml",
    ),
    "a named folder of YOLO": (
        "images/train/p/x.png other/train/p/x.txt other/train/gone.txt images/train/y.png",
        {"train": "images/train", "labels": "other"},
        "images/train/p/x.png:1 images/train/y.png:0 lost 0+1 other/train/gone.txt",
    ),
    "label files without an image": (
        "images/train/x.png labels/train/x.txt labels/train/gone.txt:3 labels/train/q/gone.txt labels/train/no.txt:0 "
        "images/val/y.png labels/val/gone.txt:2",
        {"train": "images/train", "val": "images/val"},
        "images/train/x.png:1 lost 0+4 labels/train/gone.txt labels/train/q/gone.txt",
    ),
    "an empty label file": (
        "images/train/x.png labels/train/x.txt images/train/y.png labels/train/y.txt:0",
        TRAIN,
        "images/train/x.png:1 images/train/y.png:0",
    ),
    "several folders, sorted": (
        "images/b/x.png labels/b/x.txt images/a.b/y.png images/a/UPPER.PNG images/a/.hidden.png images/a/.cache/c.png",
        {"train": ["images/b", "images/a.b", "images/a"]},
        "images/a.b/y.png:0 images/a/UPPER.PNG:0 images/b/x.png:1",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_the_images_of_a_split_and_their_label_files(data, case):
    files, content, expected = FILES[case]
    data.write(files)
    data.yaml(**content)
    index = data.index()
    assert told(index) == expected
    unlabeled = expected.count(":0") - ("labels/train/y.txt:0" in files)
    assert len(places(index, NO_LABEL)) == unlabeled


@pytest.mark.parametrize("train", ["images/train", "images", ["images/train/p", "images"], "train.txt"])
@pytest.mark.parametrize("place", ["train/p", "."])
def test_a_voc_file_is_found_however_the_split_names_its_images(data, train, place):
    data.write(" ".join(f"images/train/p/{stem}.png voc/{place}/{stem}.xml" for stem in "xyz") + " voc/p/gone.xml")
    data.file("train.txt", "".join(f"images/train/p/{stem}.png\n" for stem in "xyz"))
    data.yaml(train=train, annotations={"train": "voc"})
    expected = " ".join(f"images/train/p/{stem}.png:1" for stem in "xyz")
    assert told(data.index()) == f"{expected} lost 0+1 voc/p/gone.xml"


# Rows of train.txt, or of another list, with the images a.png, b.png, xc.png and p/d.png in images/train.
A, B, C, D = (f"images/train/{name}.png:1" for name in ("a", "b", "xc", "p/d"))
LISTS = {
    "from the root": (["images/train/b.png", "images/train/a.png"], f"{A} {B}"),
    "absolute": (["{root}/images/train/a.png"], A),
    "from the list": (["./images/train/a.png", "./lists/../images/train/b.png"], f"{A} {B}"),
    "of Windows": (["images\\train\\a.png"], A),
    "in another case": (["images/train/XC.PNG"], C),
    "a name or a stem": (["a.png", "d"], f"{A} {D}"),
    "with folders of another machine": (
        ["C:\\mine\\images\\train\\a.png", "C:\\mine\\images\\train\\b.png"],
        f"{A} {B}",
    ),
    "with a slash": (["/images/train/a.png"], A),
    "as many folders as the first": (
        ["x/y/images/train/gone.png", "x/y/images/train/a.png", "x/images/train/b.png"],
        f"{A} lost 2+0 train.txt:1 train.txt:3",
    ),
    "folders only if no row is a path": (["images/train/a.png", "old/images/train/b.png"], f"{A} lost 1+0 train.txt:2"),
    "missing and repeated": (
        ["images/train/a.png", "gone.png", "", "images/train/b.png", "images/train/a.png"],
        f"{A} {B} lost 1+0 train.txt:2",
    ),
}


@pytest.mark.parametrize("case", LISTS)
def test_the_rows_of_a_list(data, case):
    """Label files of images that the list leaves out are not lost."""
    rows, expected = LISTS[case]
    data.pairs("train/a", "train/b", "train/xc", "train/p/d")
    data.file("train.txt", "\n".join(rows).format(root=data.root))
    data.yaml(train="train.txt")
    index = data.index()
    assert told(index) == expected
    assert places(index, DUPLICATE) == (["train.txt:5"] if case == "missing and repeated" else [])


def test_a_stem_is_that_of_an_image_in_jpegimages_or_of_the_only_image_and_others_are_lost(data):
    """VOC2012 has masks of the same stems. RSOD's images are in two folders."""
    data.write("JPEGImages/x.jpg JPEGImages/x.txt Masks/x.png a/y.png b/y.png b/z.png b/z.txt")
    data.file("ImageSets/Main/train.txt", "x\ny\nz\ngone\n")
    data.yaml(train="ImageSets/Main/train.txt")
    list_name = "ImageSets/Main/train.txt"
    assert told(data.index()) == f"JPEGImages/x.jpg:1 b/z.png:1 lost 2+0 {list_name}:2 {list_name}:4"


def test_what_is_no_image_is_counted(data):
    data.pairs("train/x")
    data.file("labels/train/gone.txt")
    for name in ("gone.png", "itself.png"):
        (data.root / "images/train" / name).symlink_to("nowhere.png" if name == "gone.png" else name)
    for name in ("p.heic", "q.heic", "Thumbs.db", "._x.png"):
        data.file(f"images/train/{name}", b"")
    data.yaml()
    index = data.index()
    lost = "images/train/gone.png images/train/itself.png labels/train/gone.txt"
    assert told(index) == f"images/train/x.png:1 lost 2+1 {lost}"
    assert places(index, UNSUPPORTED) == ["images/train/p.heic"]


def test_an_array_beside_an_image_of_its_name_is_its_copy(data):
    data.pairs("train/x")
    for stem in "xy":
        np.save(data.root / f"images/train/{stem}.npy", np.zeros((60, 80, 1), np.uint8))
    data.yaml(train="images/train", channels=1)
    assert list(data.index().paths) == ["images/train/x.png", "images/train/y.npy"]
    data.yaml()
    assert list(data.index().paths) == ["images/train/x.png"]  # of 8-bit RGB, other programs cache arrays


TWO_PLACES = {  # of all images, and of some
    "beside": ("images/train/{}.txt", "labels/train/{}.txt", {}),
    "labels": ("labels/train/{}.txt", "images/train/{}.txt", {}),
    "voc": ("voc/train/{}.xml", "voc/{}.xml", {"annotations": {"train": "voc"}}),
}


@pytest.mark.parametrize("case", TWO_PLACES)
def test_label_files_in_two_places_are_refused_and_a_key_of_the_yaml_decides(data, case):
    whole, part, chosen = TWO_PLACES[case]
    for i in range(5):
        data.write(f"images/train/{i}.png {whole.format(i)}:2" + (f" {part.format(i)}" if i < 2 else ""))
    data.yaml(train="images/train", **chosen)
    message = refusal(data.index)
    folder = whole.partition("/{")[0]
    line = f"{'annotations' if chosen else 'labels'}: {{train: {folder}}}"
    for text in (f"'{line}'", "5 files", "2 files", part.partition("/{")[0]):
        assert text in message
    data.yaml(train="images/train", **yaml.safe_load(line))
    assert num_boxes(data.index()) == {f"images/train/{i}.png": 2 for i in range(5)}


def test_captions_and_lists_of_classes_are_no_label_files(data):
    data.write("images/train/x.png labels/train/x.txt images/train/background.png")
    for name in ("images/train/x", "images/train/background", "labels/train/classes"):
        data.file(f"{name}.txt", "a photo of two birds\n")
    data.yaml(train="images/train")
    assert told(data.index()) == "images/train/background.png:0 images/train/x.png:1"


def test_a_voc_file_that_may_be_of_images_in_two_folders_is_refused(data):
    data.write("images/train/p/x.png images/train/q/x.png images/train/y.png voc/x.xml voc/y.xml")
    data.yaml(**VOC)
    message = refusal(data.index)
    for name in ("voc/x.xml", "images/train/p/x.png", "images/train/q/x.png"):
        assert name in message


def test_images_without_any_label_file_are_refused(data):
    """A data set whose labels are in another folder would train on backgrounds alone."""
    data.write("images/train/x.png images/train/y.png")
    data.yaml(train="images/train")
    assert str(data.data) in refusal(data.index)


def test_links_stay_in_paths_and_one_to_a_folder_above_is_not_followed(data, tmp_path):
    """The place follows from the path as written; that of a link's target is another image's."""
    target = DataSet(tmp_path / "target")
    target.pairs("x")
    data.write("labels/train/x.txt:2")
    (data.root / "images").mkdir()
    (data.root / "images/train").symlink_to(target.root / "images")
    (target.root / "images/p").mkdir()
    (target.root / "images/p/up").symlink_to("..")
    (target.root / "images/q").symlink_to("p")
    target.images("images/p/z.png")
    data.yaml(train="images/train")
    expected = {"images/train/p/z.png": 0, "images/train/q/z.png": 0, "images/train/x.png": 2}
    assert num_boxes(data.index()) == expected


def test_images_and_label_files_without_each_other_are_one_warning_with_both_numbers(data, lines):
    data.pairs(*(f"train/{i}" for i in range(20)))
    data.write("images/train/photo0.png images/train/photo1.png images/train/photo2.png labels/train/p0.txt:2")
    data.yaml()
    data.index()
    (line,) = [r.getMessage() for r in lines.records if r.levelno >= logging.WARNING and "photo0" in r.getMessage()]
    for text in ("p0.txt", "2 objects", "3 images"):
        assert text in line
