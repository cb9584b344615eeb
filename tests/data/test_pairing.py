"""Rules D1 to D3: where label files are expected, and what becomes of those without an image and images without one."""

from __future__ import annotations

import logging
import unicodedata

import pytest
import yaml

from data.findings import NO_LABEL, ORPHAN
from tests.data.data_set import BOX, Counts, DataSet, counts, num_boxes, places, refusal, voc

PLACES = {
    "labels for images": ("images/train/x.png", "labels/train/x.txt"),
    "the last folder images": ("images/a/images/x.png", "images/a/labels/x.txt"),
    "deeper folders": ("images/train/p/q/x.png", "labels/train/p/q/x.txt"),
    "beside the image, in images": ("images/train/x.png", "images/train/x.txt"),
    "beside the image, without images": ("photos/x.png", "photos/x.txt"),
    "another case": ("images/train/l3.png", "labels/train/L3.TXT"),
    "another composition": ("images/train/caf\u00e9.png", "labels/train/cafe\u0301.txt"),
    "the stem, not the first dot": ("images/train/img.v1.png", "labels/train/img.v1.txt"),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_label_file_is_found_in_its_place(data, case):
    image, label = PLACES[case]
    data.images(image)
    data.file(label)
    data.yaml(train=image.split("/")[0])
    index = data.index()
    assert num_boxes(index) == {image: 1}
    assert len(index.report.findings) == 0


NO_PLACES = {
    "a full name": ("images/train/x.png", "labels/train/x.png.txt"),
    "another folder": ("images/train/x.png", "labels/x.txt"),
    "an earlier folder images": ("images/a/images/x.png", "labels/a/images/x.txt"),
    "two of other cases": ("images/train/l3.png", "labels/train/L3.txt labels/train/L3.TXT"),
}


@pytest.mark.parametrize("case", NO_PLACES)
def test_no_other_place_is_searched(data, case):
    """The image is a background, and the objects of the file are lost."""
    image, labels = NO_PLACES[case]
    data.pairs("train/other")
    data.images("images/a/images/other.png")
    data.file("images/a/labels/other.txt")
    data.images(image)
    for label in labels.split():
        data.file(label)
    data.yaml(train="images")
    index = data.index()
    assert num_boxes(index)[image] == 0
    assert index.report.lost_objects == len(labels.split())


VOC_PLACES = {
    "the same path": ("images/train/p/x.png", "voc/p/x.xml"),
    "directly in the folder": ("images/train/p/x.png", "voc/x.xml"),
    "another case": ("images/train/P/x.png", "voc/p/X.XML"),
}


@pytest.mark.parametrize("case", VOC_PLACES)
def test_a_voc_file_is_found_below_the_folder_of_annotations(data, case):
    image, label = VOC_PLACES[case]
    data.images(image)
    data.file(label, voc(("a", 5, 5, 20, 20)))
    data.yaml(train="images/train", annotations={"train": "voc"})
    assert num_boxes(data.index()) == {image: 1}


@pytest.mark.parametrize("train", ["images/train", "images", ["images/train/p", "images"], "train.txt"])
@pytest.mark.parametrize("place", ["train/p/{}", "{}"])
def test_a_voc_file_is_found_however_the_split_names_its_images(data, train, place):
    data.images(*(f"images/train/p/{stem}.png" for stem in "xyz"))
    data.file("train.txt", "".join(f"images/train/p/{stem}.png\n" for stem in "xyz"))
    for label in (*map(place.format, "xyz"), "p/gone"):
        data.file(f"voc/{label}.xml", voc(("a", 5, 5, 20, 20)))
    data.yaml(train=train, annotations={"train": "voc"})
    index = data.index()
    assert counts(index) == Counts(3, 3, 0, 1)
    assert places(index, ORPHAN) == ["voc/p/gone.xml"]


def test_a_voc_file_that_may_be_of_images_in_two_folders_is_refused(data):
    data.images("images/train/p/x.png", "images/train/q/x.png", "images/train/y.png")
    for label in ("x", "y"):
        data.file(f"voc/{label}.xml", voc(("a", 5, 5, 20, 20)))
    data.yaml(train="images/train", annotations={"train": "voc"})
    message = refusal(data.index)
    for name in ("voc/x.xml", "images/train/p/x.png", "images/train/q/x.png"):
        assert name in message


TWO_PLACES = {  # of all images, and of some
    "beside": ("images/train/{}.txt", "labels/train/{}.txt", None),
    "labels": ("labels/train/{}.txt", "images/train/{}.txt", None),
    "voc, same path": ("voc/train/{}.xml", "voc/{}.xml", "voc"),
}


@pytest.mark.parametrize("case", TWO_PLACES)
def test_label_files_in_two_places_are_refused_and_a_key_of_the_yaml_decides(data, case):
    whole, part, annotations = TWO_PLACES[case]
    content, other = BOX * 2, BOX
    chosen = {"annotations": {"train": annotations}} if annotations else {}
    if annotations:
        content, other = voc(("a", 5, 5, 20, 20), ("b", 1, 1, 9, 9)), voc(("a", 5, 5, 20, 20))
    stems = [f"x{i}" for i in range(5)]
    data.images(*(f"images/train/{stem}.png" for stem in stems))
    for stem in stems:
        data.file(whole.format(stem), content)
    for stem in stems[:2]:
        data.file(part.format(stem), other)
    data.yaml(train="images/train", **chosen)
    message = refusal(data.index)
    folder = whole.partition("/{")[0]
    line = f"{'annotations' if annotations else 'labels'}: {{train: {folder}}}"
    for text in (f"'{line}' (5 files)", "(2 files)", part.partition("/{")[0]):
        assert text in message
    data.yaml(train="images/train", **yaml.safe_load(line))
    assert data.counts() == Counts(5, 10)


def test_folders_of_yolo_txt_may_be_named(data):
    data.images("images/train/p/x.png", "images/val/y.png", "images/val/z.png")
    for name in ("other/train/p/x", "other/val/y", "other/val/gone"):
        data.file(f"{name}.txt")
    data.yaml(labels="other")
    assert data.counts() == Counts(1, 1, 0, 1)
    assert data.counts("val") == Counts(2, 1, 0, 1)
    data.yaml(labels="other", annotations="voc")
    assert str(data.data) in refusal(data.index)


def test_captions_beside_the_images_are_no_labels(data):
    data.pairs("train/x", "train/y")
    data.images("images/train/background.png")
    for stem in ("x", "y", "background"):
        data.file(f"images/train/{stem}.txt", "a photo of two birds\n")
    data.yaml(train="images/train")
    assert data.counts() == Counts(3, 2)


def test_links_stay_in_paths(data, tmp_path):
    """The place follows from the path as written; that of the link's target is another image's."""
    target = DataSet(tmp_path / "target")
    target.pairs("x")
    data.file("images/.keep", "")
    (data.root / "images/train").symlink_to(target.root / "images")
    data.file("labels/train/x.txt", BOX * 2)
    data.yaml(train="images/train")
    assert num_boxes(data.index()) == {"images/train/x.png": 2}


def test_two_names_of_an_image_are_two_images(data):
    data.pairs("train/p/x")
    (data.root / "images/train/q").symlink_to("p")
    data.yaml(train="images/train")
    assert num_boxes(data.index()) == {"images/train/p/x.png": 1, "images/train/q/x.png": 0}


def test_a_link_to_a_folder_above_is_not_followed(data):
    data.pairs("train/x", "val/y")
    (data.root / "images/train/up").symlink_to("../..")
    data.yaml()
    assert num_boxes(data.index()) == {"images/train/x.png": 1}


def test_a_label_file_without_an_image_is_counted_with_its_objects(data):
    data.pairs("train/x", "train/p/y", "val/z")
    data.file("labels/train/gone.txt", BOX * 3)
    data.file("labels/train/p/deep.txt", BOX)
    data.file("labels/train/q/folder.txt", BOX)  # the folder of its image is gone, too
    data.file("labels/train/classes.txt", "")  # no row
    data.file("labels/val/gone.txt", BOX * 2)
    data.yaml()
    index = data.index()
    assert (index.report.used_images, index.report.used_objects, index.report.lost_objects) == (2, 2, 5)
    expected = ["labels/train/gone.txt", "labels/train/p/deep.txt", "labels/train/q/folder.txt"]
    assert places(index, ORPHAN) == expected
    assert places(data.index("val"), ORPHAN) == ["labels/val/gone.txt"]


def test_label_files_of_images_that_a_list_leaves_out_are_not_lost(data):
    data.pairs("train/x", "train/y")
    data.file("train.txt", "images/train/x.png\n")
    data.yaml(train="train.txt")
    assert data.counts() == Counts(1, 1)


def test_a_folder_of_voc_that_two_splits_share_loses_nothing_of_the_other(data):
    data.images("images/train/x.png", "images/val/y.png")
    for stem in "xyz":
        data.file(f"voc/{stem}.xml", voc(("a", 5, 5, 20, 20)))
    data.yaml(annotations={"train": "voc", "val": "voc"})
    for split in ("train", "val"):
        index = data.index(split)
        assert (index.report.used_objects, index.report.lost_objects) == (1, 1)
        assert places(index, ORPHAN) == ["voc/z.xml"]


def test_images_and_label_files_without_each_other_are_one_warning_with_both_numbers(data, lines):
    data.pairs(*(f"train/{i}" for i in range(20)))
    for i in range(3):
        data.images(f"images/train/photo{i}.png")
    data.file("labels/train/p0.txt")
    data.file("labels/train/p1.txt")
    data.yaml()
    index = data.index()
    assert counts(index)[:2] == (23, 20)
    assert index.report.lost_objects == 2
    assert len(places(index, NO_LABEL)) == 3
    warnings = [r.getMessage() for r in lines.records if r.levelno >= logging.WARNING and "photo0" in r.getMessage()]
    assert [text for text in warnings if "p0.txt" in text and "3" in text and "2" in text] != []
    assert sum("photo0" in text and "p0.txt" in text for text in warnings) == 1


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_label_file_makes_a_background_without_a_finding(data, content):
    data.pairs("train/x")
    data.pairs("train/empty", rows=content)
    data.yaml()
    index = data.index()
    assert num_boxes(index) == {"images/train/empty.png": 0, "images/train/x.png": 1}
    assert len(index.report.findings) == 0


def test_images_without_any_label_file_are_refused(data):
    """A data set whose labels are in another folder would train on backgrounds alone."""
    data.images("images/train/x.png", "images/train/y.png")
    data.yaml(train="images/train")
    assert str(data.data) in refusal(data.index)


def test_decomposed_names_of_images_keep_their_bytes(data):
    name = unicodedata.normalize("NFD", "é")
    data.pairs(f"train/{name}")
    data.yaml()
    assert list(data.index().paths) == [f"images/train/{name}.png"]
