"""Label files that belong to no image, or to several, are reported once, and so are labels of images left out."""

from __future__ import annotations

import json
import logging
import os
import re

import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import ORPHAN, SECOND_LABEL, SHARED_LABEL
from data.labels.yolo import label_folders
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.listing.images import find_images_leniently
from data.source.walk import Folders
from tests.data.source.labeled_folder import BOX, NUM_IMAGES, OTHER_TEXT, TEXT, write_one_labeled_of_two, write_voc
from tests.helpers.three_formats import voc_text
from tests.helpers.tiny import write_dataset
from tools.check.checks.scan import scan_issues
from tools.check.scan_splits import scan_dataset
from utils.errors import UserError


def test_no_label_file_fits_and_the_first_is_named(folder):
    folder.write(image="images/train/{}_7436.jpeg", label="labels/train/{}.txt")
    text = "00_7436.txt; 20 label files without an image, first labels/train/00.txt: belongs to no image; if it labels"
    with pytest.raises(UserError, match=re.escape(f"{text} images/train/00_7436.jpeg")):
        folder.index()
    spec = load_dataset_spec(folder.yaml())
    split = scan_dataset(spec, ("train",), workers=1)[0]
    assert len([issue for issue in scan_issues(split) if issue.kind == ORPHAN]) == 20
    assert (split.index.report.ledger.used_images, split.index.report.ledger.lost_images) == (20, 0)


@pytest.mark.parametrize("label", ["labels/train/{}.txt", "images/train/{}.txt", "voc/{}.xml"])
@pytest.mark.parametrize("count", [1, 20])
def test_label_files_of_no_image_are_listed_at_any_share(folder, lines, label, count):
    text = TEXT
    if "voc" in label:
        text = voc_text([BOX], ["a"], 48, 64)
        write_voc(folder, "voc/{}.xml")
    else:
        folder.write()
    names = [label.format(f"no{i:02}") for i in range(count)]
    for name in names:
        folder.label(name, text)
    index = folder.index(max_bad=0.6)
    assert len(index) == NUM_IMAGES
    assert [line.split(f": {ORPHAN}: ")[0] for line in index.report.lines] == names
    assert index.report.ledger.lost_objects == count
    assert f"{names[0]}: belongs to no image; rename it like its image, or remove it" in lines.text
    if count == 20:
        with pytest.raises(UserError, match="20 of 40 images and 20 of 40 labeled objects can't be used"):
            folder.index()


def test_even_one_of_a_thousand_is_listed(folder, lines):
    folder.write()
    (folder.root / "labels/train/x.txt").write_text(TEXT)
    for i in range(20, 300):
        os.link(folder.root / "images/train/00.png", folder.root / f"images/train/{i:03}.png")
        os.link(folder.root / "labels/train/00.txt", folder.root / f"labels/train/{i:03}.txt")
    assert len(folder.index()) == 300
    assert f"train: {ORPHAN}: 1, first labels/train/x.txt: belongs to no image" in lines.text


def test_files_that_are_no_labels_or_those_of_other_images_are_not_reported(folder, lines):
    folder.write()
    for name in ("labels/classes.txt", "labels/train/classes.txt", "images/train/README.txt", "labels/train/notes.txt"):
        folder.label(name, "a\nb\n")
    folder.label("labels/train/empty.txt", "")
    folder.label("labels/val/zz.txt")
    folder.image("images/val/zz.png")
    folder.label("labels/other.txt")
    folder.image("images/other.png")
    folder.label("images/train/04.txt")  # as in labels
    (folder.root / "some.txt").write_text("".join(f"images/train/{i:02}.png\n" for i in range(10)))
    for images in ("images/train", "some.txt", ["images/train", "some.txt"]):
        folder.images = json.dumps(images)
        assert len(folder.index(max_bad=0.0).classes) in (10, 20)
    assert not [record for record in lines.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("places", [("voc", "voc"), ("voc/train", "voc/val")])
def test_splits_may_share_a_folder_of_labels(folder, places, lines):
    write_voc(folder, f"{places[0]}/{{}}.xml")
    folder.image("images/val/x.png")
    folder.label(f"{places[1]}/x.xml", voc_text([BOX], ["a"], 48, 64))
    folder.label(f"{places[1]}/y.xml", voc_text([BOX], ["a"], 48, 64))
    yaml = folder.root / "data.yaml"
    for value in ("voc", f"{{train: {places[0]}, val: {places[1]}}}"):
        yaml.write_text(f"train: images/train\nval: images/val\nnames: [a]\nannotations: {value}\n")
        lines.clear()
        spec = load_dataset_spec(yaml)
        indexes = [load_index(spec, split, IndexSettings(progress=False, max_bad=1.0)) for split in ("train", "val")]
        assert [len(index.classes) for index in indexes] == [NUM_IMAGES, 1]
        orphans = [line for index in indexes for line in index.report.lines if ORPHAN in line]
        assert {line.split(":")[0] for line in orphans} == {f"{places[1]}/y.xml"}


def test_a_held_out_part_changes_no_finding(folder):
    """Both listings are those of the training split. The file in a is called like an image in b."""
    for group, name in (("a", "1"), ("b", "2")):
        folder.image(f"images/train/{group}/{name}.png")
        folder.label(f"voc/{group}/{name}.xml", voc_text([BOX], ["a"], 48, 64))
    folder.label("voc/a/2.xml", voc_text([BOX], ["a"], 48, 64))
    yaml = folder.root / "data.yaml"
    yaml.write_text("train: images/train\nnames: [a]\nannotations: voc\n")
    spec = load_dataset_spec(yaml)
    whole = list_split(spec, "train")
    assert [(finding.where, finding.kind, finding.lost_images) for finding in whole.findings] == [
        ("voc/a/2.xml", ORPHAN, 1)
    ]
    assert list_split(spec.hold_out(["images/train/b/2.png"]), "train") == whole


def test_splits_of_lists_count_an_unused_label_file_once(folder):
    """Counted in each of them, it would be a large share of a small split, such as a validation list of
    cross-validation."""
    folder.write()
    folder.label("labels/train/x.txt")
    folder.image("images/val/0.png")
    folder.label("labels/val/0.txt")
    folder.label("labels/val/y.txt")
    splits = {"train": range(1, NUM_IMAGES), "val": range(1), "test": ()}
    for split, numbers in splits.items():
        rows = [f"images/train/{i:02}.png\n" for i in numbers] or ["images/val/0.png\n"]
        (folder.root / f"{split}.txt").write_text("".join(rows))
    yaml = folder.root / "data.yaml"
    yaml.write_text("train: train.txt\nval: val.txt\ntest: test.txt\nnames: [a]\n")
    spec = load_dataset_spec(yaml)
    indexes = {split: load_index(spec, split, IndexSettings(progress=False, max_bad=0.5)) for split in splits}
    orphans = {split: [line for line in index.report.lines if ORPHAN in line] for split, index in indexes.items()}
    assert {split: len(lines) for split, lines in orphans.items()} == {"train": 1, "val": 0, "test": 1}
    assert orphans["test"][0].startswith("labels/val/y.txt")


def test_a_label_file_above_several_folders_of_a_split_counts_once(folder):
    folder.images = json.dumps(["images/train", "images/more"])
    folder.write()
    folder.image("images/more/m.png")
    folder.label("labels/more/m.txt")
    folder.label("labels/x.txt")
    index = folder.index(max_bad=0.5)
    assert [line.split(":")[0] for line in index.report.lines] == ["labels/x.txt"]
    assert index.report.ledger.lost_objects == 1


def test_one_json_for_all_splits_has_lost_nothing(folder, lines):
    """An image of the same name in another split does not take another's boxes."""
    content = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    for number, name in enumerate(("val/0.png", "train/0.png", "train/1.png", "val/2.png")):
        folder.image(f"images/{name}")
        content["images"].append({"id": number, "file_name": name})
        content["annotations"].append(
            {"id": number, "image_id": number, "category_id": 1, "bbox": [number, 1, 10, 10], "iscrowd": 0}
        )
    folder.label("all.json", json.dumps(content))
    yaml = folder.root / "data.yaml"
    yaml.write_text("train: images/train\nval: images/val\nannotations: all.json\n")
    found = {}
    for split in ("train", "val"):
        index = load_index(load_dataset_spec(yaml), split, IndexSettings(progress=False, max_bad=0.0))
        assert index.report.problems == 0
        found |= {path: int(index.boxes_xywh_px[i, 0]) for i, path in enumerate(index.paths)}
    assert found == {"images/val/0.png": 0, "images/train/0.png": 1, "images/train/1.png": 2, "images/val/2.png": 3}


def test_a_label_that_may_be_of_several_images_leaves_all_of_them_out(folder):
    folder.write()
    for name in ("a/x", "b/x"):
        folder.image(f"images/train/{name}.png")
    folder.label("labels/train/x.txt")
    index = folder.index()
    assert len(index) == NUM_IMAGES
    assert index.report.ledger.lost_images == 2


def test_a_second_label_file_of_an_image_is_reported(folder, lines):
    folder.write()
    folder.label("images/train/03.txt", OTHER_TEXT)
    index = folder.index(max_bad=0.0)
    assert len(index.classes) == NUM_IMAGES
    text = f"images/train/03.txt: {SECOND_LABEL}: images/train/03.png uses labels/train/03.txt instead"
    assert index.report.lines[0].startswith(text)
    assert SECOND_LABEL in lines.text


@pytest.mark.parametrize("label", ["labels/train/03.txt", "labels/train/03.TXT"])
def test_images_that_share_a_label_file_are_reported(folder, lines, label):
    folder.write(but=3)
    folder.label(label)
    folder.image("images/train/03.jpg")
    index = folder.index(max_bad=0.0)
    assert len(index) == len(index.classes) == NUM_IMAGES + 1
    assert index.report.lines[0].startswith(f"{label}: {SHARED_LABEL}: used for images/train/03.jpg and images/train/")
    assert SHARED_LABEL in lines.text


def test_a_kind_in_the_name_of_a_lost_file_hides_no_warning(folder, lines):
    folder.write(but=3)
    folder.label("labels/train/03.txt")
    folder.image("images/train/03.jpg")
    folder.label(f"labels/train/{SHARED_LABEL}.txt")
    folder.index()
    (lost,) = [line for line in lines.messages if "can't be used and are left out" in line]
    assert SHARED_LABEL in lost
    assert f"train: {SHARED_LABEL}: 1, first labels/train/03.txt" in lines.text
    assert f"train: {ORPHAN}: 1" not in lines.text, "a loss is named twice"


@pytest.mark.parametrize(("image", "is_lost"), [("h.heic", True), ("h.gif", True), ("h.png", False)])
def test_labels_of_an_image_that_is_not_read_are_lost(folder, image, is_lost):
    folder.write()
    (folder.root / "images/train" / image).symlink_to("nothing") if image.endswith("png") else (
        (folder.root / "images/train" / image).write_bytes(b"x")
    )
    folder.label("labels/train/h.txt")
    lines = list(folder.index().report.lines)
    assert any(f"labels/train/h.txt: {ORPHAN}: images/train/{image} is of an unsupported kind" in x for x in lines) == (
        is_lost
    )
    assert is_lost or lines == ["images/train/h.png: missing image: a broken link"]


def test_a_label_file_of_one_image_is_not_shared_with_one_that_is_left_out(folder):
    """``a.jpg`` fits both files, which leaves it out; ``A.png`` fits one of them exactly."""
    folder.write()
    folder.image("images/train/A.png")
    folder.image("images/train/a.jpg")
    folder.label("images/train/A.txt")
    folder.label("images/train/a.TXT", OTHER_TEXT)
    index = folder.index(max_bad=0.5)
    assert len(index) == NUM_IMAGES + 1
    assert len(index.report.lines) == 1
    assert index.report.lines[0].startswith("images/train/a.jpg: unusable label file: its labels may be in ")


@pytest.mark.parametrize("copy", ["voc/a/x copy.xml", "voc/x copy.xml"])
def test_a_copy_of_a_label_file_labels_no_image_of_the_same_name_in_another_folder(folder, copy):
    text = write_one_labeled_of_two(folder)
    folder.label(copy, text)
    index = folder.index(max_bad=0.0)
    assert list(index.paths) == ["images/train/a/x.png", "images/train/b/x.png"]
    assert [len(index.labels(i)) for i in range(2)] == [1, 0]


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/train/{}.png", "train/labels/{}.txt"),
        ("train/images/{}.png", "labels/train/{}.txt"),
        ("images/train/{}.png", "labels/val/{}.txt"),
        ("pics/{}.png", "a/b/c/{}.TXT"),
    ],
)
def test_the_folder_of_all_label_files_is_named_wherever_it_is(folder, image, label):
    folder.write(image=image, label=label)
    folder.images = os.path.dirname(image)
    there = folder.root / os.path.dirname(label)
    usual = label_folders(str(folder.root / folder.images))[0]
    with pytest.raises(UserError, match=rf"; {there} has 20 \.\w+ files: move them to {usual}$"):
        folder.index()


def test_the_advice_does_not_lead_out_of_the_set_or_to_the_same_folder(folder):
    folder.root = folder.root / "images" / "mine"
    folder.images = "pics"
    folder.write(image="pics/{}.png", label="annotations/{}.txt")
    with pytest.raises(UserError, match=rf"has 20 .txt files: move them to {folder.root}/pics$"):
        folder.index()
    for path in (folder.root / "annotations").iterdir():
        path.write_text("cat 5 5 20 20\n")
        path.rename(folder.root / "pics" / path.name)
    with pytest.raises(UserError, match=r"has 20 .txt files: they have no row of YOLO txt \(first: 00.txt\)$"):
        folder.index()


def test_a_list_of_another_split_that_cannot_be_read_is_a_warning(tmp_path, caplog):
    """The labels of its images seem to be of no image."""
    path = write_dataset(tmp_path, train=2, val=2)
    path.write_text(path.read_text().replace("images/val", "val.txt"))
    (tmp_path / "val.txt").write_bytes(b"\xff\xfe\x00")
    spec = load_dataset_spec(path)
    assert find_images_leniently(spec, "val", Folders(spec.root)).images == {}
    assert f"{path}: 'val': not all images could be listed: {tmp_path / 'val.txt'}: " in caplog.text


def test_all_rows_of_another_splits_list_are_missing_if_it_names_no_image(tmp_path):
    path = write_dataset(tmp_path, train=2, val=0)
    path.write_text(path.read_text().replace("images/val", "val.txt"))
    (tmp_path / "val.txt").write_text("./images/val/0.jpg\nimages\\val\\1.jpg\n000002\n")
    spec = load_dataset_spec(path)
    split_images = find_images_leniently(spec, "val", Folders(spec.root))
    assert split_images.images == {}
    assert split_images.missing == ["images/val/0.jpg", "images/val/1.jpg", "000002"]
