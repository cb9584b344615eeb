"""Label files that exist are found where there is one reading, and those that belong to no image are reported."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.index.index import DatasetIndex
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import NAMED_OTHERWISE, ORPHAN, SECOND_LABEL, SHARED_LABEL, UNREAD_LABELS
from data.labels.yolo import label_folders
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.listing.images import find_images_leniently
from data.source.listing.listing import ImageStatus
from data.source.listing.stored import listing_text, read_listing
from data.source.open import open_data
from data.source.walk import Folders
from tests.helpers.index_fingerprint import index_fingerprint
from tests.helpers.three_formats import voc_text, write_image, yolo_text
from tests.helpers.tiny import write_dataset
from tools.check.checks.scan import scan_dataset, scan_issues
from utils.distributed.context import DistributedContext
from utils.errors import UserError

NUM_IMAGES = 20
BOX = (0, 10, 8, 30, 32)
TEXT = yolo_text([BOX], 48, 64)
OTHER_TEXT = yolo_text([(0, 1, 1, 9, 9)], 48, 64)
ACCENTED = unicodedata.normalize("NFC", "é")


class Folder:
    """A data set of images 00 to 19 in images/train, whose labels a test places."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = "images/train"
        self.more = ""

    def image(self, name: str) -> None:
        write_image(self.root / name, 48, 64)

    def label(self, name: str, text: str = TEXT) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def write(self, image: str = "images/train/{}.png", label: str = "labels/train/{}.txt", but: int = -1) -> None:
        for i in range(NUM_IMAGES):
            self.image(image.format(f"{i:02}"))
            if i != but:
                self.label(label.format(f"{i:02}"))

    def index(self, **options: object) -> DatasetIndex:
        return load_index(load_dataset_spec(self.yaml()), "train", IndexSettings(progress=False, **options))

    def yaml(self) -> Path:
        path = self.root / "data.yaml"
        path.write_text(f"train: {self.images}\nval: {self.images}\nnames: [a]\n{self.more}", encoding="utf-8")
        return path


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "set")


def beside(folder: Folder) -> None:
    folder.write(label="images/train/{}.txt")


def one_beside(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("images/train/03.txt")


def below_images(folder: Folder) -> None:
    folder.root = folder.root / "images" / "mine"
    folder.images = "train"
    folder.write(image="train/{}.png", label="train/{}.txt")


def below_images_in_labels(folder: Folder) -> None:
    folder.root = folder.root / "images" / "mine"
    folder.write()


def in_another_images(folder: Folder) -> None:
    folder.images = "images/train/images"
    folder.write(image="images/train/images/{}.png", label="labels/train/images/{}.txt")


def in_all_images(folder: Folder) -> None:
    folder.images = "images/train/images"
    folder.write(image="images/train/images/{}.png", label="labels/train/labels/{}.txt")


def capital_folders(folder: Folder) -> None:
    folder.images = "Images/train"
    folder.write(image="Images/train/{}.png", label="Labels/train/{}.txt")


def capital_suffix(folder: Folder) -> None:
    folder.write(label="labels/train/{}.TXT")


def one_capital_suffix(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("labels/train/03.Txt")


def whole_image_name(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("labels/train/03.png.txt")


def capital_name(folder: Folder) -> None:
    folder.write(image="images/train/l{}.png", label="labels/train/L{}.txt")


def capital_image(folder: Folder) -> None:
    folder.write(image="images/train/L{}.PNG", label="labels/train/l{}.txt")


def decomposed(folder: Folder) -> None:
    name = unicodedata.normalize("NFD", ACCENTED)
    folder.write(image=f"images/train/{ACCENTED}{{}}.png", label=f"labels/train/{name}{{}}.txt")


def decomposed_image(folder: Folder) -> None:
    name = unicodedata.normalize("NFD", ACCENTED)
    folder.write(image=f"images/train/{name}{{}}.png", label=f"labels/train/{ACCENTED}{{}}.txt")


def capital_name_in_a_list(folder: Folder) -> None:
    capital_name(folder)
    folder.images = "list.txt"
    (folder.root / "list.txt").write_text("".join(f"images/train/l{i:02}.png\n" for i in range(NUM_IMAGES)))


def the_same_twice(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("labels/train/03.TXT")
    folder.label("images/train/03.txt")


def besides_captions_of_others(folder: Folder) -> None:
    """The readings of one image do not depend on other folders."""
    folder.write(but=3)
    folder.label("labels/train/03.TXT")
    folder.label("images/train/03.txt", "a photo of a cat\n")


def write_voc(folder: Folder, name: str, filename: str = "{}.png") -> None:
    folder.more = "annotations: voc\n"
    for i in range(NUM_IMAGES):
        folder.image(f"images/train/{i:02}.png")
        text = voc_text([BOX], ["a"], 48, 64)
        text = text.replace("<annotation>", f"<annotation><filename>{filename.format(f'{i:02}')}</filename>")
        folder.label(name.format(f"{i:02}"), text)


def voc_called_otherwise(folder: Folder) -> None:
    write_voc(folder, "voc/annotation{}.xml")


def voc_with_paths(folder: Folder) -> None:
    write_voc(folder, "voc/annotation{}.xml", "C:\\me\\{}.PNG")


def voc_without_suffix(folder: Folder) -> None:
    write_voc(folder, "voc/annotation{}.xml", "{}")


def voc_of_capitals(folder: Folder) -> None:
    write_voc(folder, "voc/{}.XML")


def voc_in_a_folder_of_the_split(folder: Folder) -> None:
    write_voc(folder, "voc/train/{}.xml")


FOUND = [
    beside, one_beside, below_images, below_images_in_labels, in_another_images, in_all_images, capital_folders,
    capital_suffix, one_capital_suffix, whole_image_name, capital_name, capital_image, decomposed, decomposed_image,
    capital_name_in_a_list, the_same_twice, besides_captions_of_others, voc_called_otherwise, voc_with_paths,
    voc_without_suffix, voc_of_capitals, voc_in_a_folder_of_the_split,
]  # fmt: skip
ALL_FOUND = pytest.mark.parametrize("make", FOUND, ids=lambda make: make.__name__)


@ALL_FOUND
def test_the_only_reading_is_taken(folder, make, lines):
    make(folder)
    for _ in range(2):  # scanned, and from the cache
        index = folder.index(max_bad=0.0)
        assert len(index) == len(index.classes) == NUM_IMAGES
        np.testing.assert_allclose(index.boxes_xywh_px, [[10, 8, 20, 24]] * NUM_IMAGES, atol=1e-9)
        assert index.report.problems == 0
    assert not [record for record in lines.records if record.levelno >= logging.WARNING]
    is_usual = make in (below_images_in_labels, voc_in_a_folder_of_the_split)
    assert ("with an unexpected name or folder" in lines.text) != is_usual
    (split,) = scan_dataset(load_dataset_spec(folder.yaml()), ("train",), workers=1)
    assert not scan_issues(split)


def test_names_that_look_alike_are_told_apart(folder, lines):
    decomposed(folder)
    folder.index()
    assert r"first 'labels/train/e\u030100.txt' of 'images/train/\xe900.png'" in lines.text


@ALL_FOUND
def test_a_staged_copy_has_the_same_labels(folder, tmp_path, make):
    make(folder)
    original = folder.index()
    fingerprint = index_fingerprint(load_dataset_spec(folder.yaml()))
    place = DataSource(str(folder.yaml()), ("train",), stage=str(tmp_path / "images" / "stage"))
    spec = open_data(place, DistributedContext.single())
    shutil.rmtree(folder.root)
    assert index_fingerprint(spec) == fingerprint
    index = load_index(spec, "train", IndexSettings(progress=False, cache_dir=str(tmp_path / "other")))
    np.testing.assert_array_equal(index.boxes_xywh_px, original.boxes_xywh_px)


def higher(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("labels/03.txt")


def deeper(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("labels/train/more/03.txt")


def shortened(folder: Folder) -> None:
    folder.write(but=3)
    (folder.root / "images/train/03.png").rename(folder.root / "images/train/03_7436.png")
    folder.label("labels/train/03.txt")


def lengthened(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("labels/train/frame-03.txt")


def padded(folder: Folder) -> None:
    folder.write(but=3)
    folder.label("labels/train/0003.txt")


def with_another_sign(folder: Folder) -> None:
    folder.write(image="images/train/img {}.png", label="labels/train/img {}.txt", but=3)
    folder.label("labels/train/img_03.txt")


def flat_labels_of_folders(folder: Folder) -> None:
    """One image is in a folder, its label is not."""
    folder.write(but=3)
    (folder.root / "images/train/sub").mkdir()
    (folder.root / "images/train/03.png").rename(folder.root / "images/train/sub/03.png")
    folder.label("labels/train/03.txt")


def labels_above_all_images(folder: Folder) -> None:
    folder.write(image="images/train/sub/{}.png", label="labels/train/sub/{}.txt", but=3)
    folder.label("labels/train/03.txt")


def beside_among_notes(folder: Folder) -> None:
    """It is too far from its place to be looked for there."""
    folder.write(but=3)
    for i in range(300):
        folder.label(f"images/train/more/note{i}.txt", "a note\n")
    folder.label("labels/train/more/03.txt")


def voc_deeper(folder: Folder) -> None:
    write_voc(folder, "voc/{}.xml", "unknown.png")
    (folder.root / "voc" / "more").mkdir()
    (folder.root / "voc" / "03.xml").rename(folder.root / "voc" / "more" / "03.xml")


@pytest.mark.parametrize(
    "make",
    [
        higher, deeper, shortened, lengthened, padded, with_another_sign, flat_labels_of_folders,
        labels_above_all_images, beside_among_notes, voc_deeper,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_an_image_whose_label_may_be_elsewhere_is_not_a_background(folder, make, lines):
    """The line says how to rename the label file; after that nothing is wrong."""
    make(folder)
    index = folder.index()
    assert len(index) == len(index.classes) == NUM_IMAGES - 1
    assert (index.report.ledger.lost_images, index.report.ledger.lost_objects) == (1, 1)
    (line,) = [line for line in index.report.lines if ORPHAN in line]
    label, advice = line.split(f": {ORPHAN}: belongs to no image; if it labels ")
    image, new_name = advice.split(", which is left out, rename it to ")
    assert f"{label}: belongs to no image" in lines.text
    (issue,) = scan_issues(scan_dataset(load_dataset_spec(folder.yaml()), ("train",), workers=1)[0])
    assert (issue.kind, issue.where) == (ORPHAN, label)
    with pytest.raises(UserError, match=rf"can't be used \(--max-bad is 0\).*{label}: belongs to no image"):
        folder.index(max_bad=0.0)
    assert image not in index.paths
    (folder.root / new_name).parent.mkdir(exist_ok=True)
    (folder.root / label).rename(folder.root / new_name)
    assert len(folder.index(max_bad=0.0)) == NUM_IMAGES


SHAPES = json.dumps({"version": "5", "flags": {}, "shapes": [{"label": "a", "points": [[1, 1], [9, 9]]}]})
VOC_TEXT = voc_text([BOX], ["a"], 48, 64)
UNREAD = {
    "labels/train/03.xml": VOC_TEXT,
    "images/train/03.xml": VOC_TEXT,
    "images/train/03.json": SHAPES,
    "images/train/03.png.json": SHAPES,
    "labels/train/03.csv": TEXT.replace(" ", ","),
    "images/train/03.txt": TEXT.replace(" ", ", "),
    "labels/train/03.txt.bak": TEXT,
    "labels/train/03.txt~": TEXT,
    "labels/train/03": TEXT,
}


@pytest.mark.parametrize("label", UNREAD)
def test_an_image_with_labels_of_another_format_or_suffix_is_not_a_background(folder, tmp_path, lines, label):
    folder.write(but=3)
    folder.label(label, UNREAD[label])
    index = folder.index()
    assert len(index) == NUM_IMAGES - 1
    assert (index.report.ledger.lost_images, index.report.totals["backgrounds"]) == (1, 0)
    advice = "seems to contain the labels of images/train/03.png, which is left out"
    assert f"{UNREAD_LABELS}: {label}: {advice}" in lines.text
    (issue,) = scan_issues(scan_dataset(load_dataset_spec(folder.yaml()), ("train",), workers=1)[0])
    assert (issue.kind, issue.where) == (UNREAD_LABELS, label)
    source = DataSource(str(folder.yaml()), ("train",), stage=str(tmp_path / "stage"))
    staged = open_data(source, DistributedContext.single())
    assert len(load_index(staged, "train", IndexSettings(progress=False))) == NUM_IMAGES - 1
    folder.label("labels/train/03.txt", "")  # as the message says
    assert len(folder.index(max_bad=0.0)) == NUM_IMAGES


def test_two_images_of_one_stem_whose_labels_are_not_read_are_left_out(folder):
    folder.write(but=3)
    folder.image("images/train/03.jpg")
    folder.label("labels/train/03.xml", VOC_TEXT)
    index = folder.index()
    assert len(index) == len(index.classes) == NUM_IMAGES - 1
    assert index.report.ledger.lost_images == 2
    (line,) = index.report.lines
    assert "images/train/03.jpg or images/train/03.png, which are left out" in line


def test_half_of_the_labels_in_another_format_are_too_many(folder):
    folder.write()
    for i in range(10):
        (folder.root / f"labels/train/{i:02}.txt").unlink()
        folder.label(f"labels/train/{i:02}.xml", VOC_TEXT)
    with pytest.raises(UserError, match=f"10 of 20 images can't be used .*: {UNREAD_LABELS}: 10 images, first "):
        folder.index()


def test_all_labels_without_a_suffix_are_named(folder):
    folder.write(label="labels/train/{}")
    with pytest.raises(UserError, match=r"no label file; .*; labels/train/00 seems to contain the labels of "):
        folder.index()
    listing = list_split(load_dataset_spec(folder.yaml()), "train")  # as a check uses it
    assert len(listing.images) == len(listing.findings) == NUM_IMAGES
    assert sum(finding.lost_images for finding in listing.findings) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("images/train/03.txt", "a photo of 2 cats, 3 dogs"),
        ("images/train/03.json", '{"title": "x", "tags": ["a"]}'),
        ("images/train/03.json", '{"shapes": []}'),
        ("labels/train/03.xml", "<annotation><filename>03.png</filename></annotation>"),
        ("labels/train/03.npy", "0.5"),
        ("labels/train/04.xml", VOC_TEXT),
    ],
)
def test_files_beside_a_background_that_are_no_labels_change_nothing(folder, lines, name, text):
    folder.write(but=3)
    folder.label(name, text)
    index = folder.index(max_bad=0.0)
    assert (len(index), index.report.totals["backgrounds"], index.report.problems) == (NUM_IMAGES, 1, 0)
    assert not [record for record in lines.records if record.levelno >= logging.WARNING]


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
    """In a small split it would be a large share, as in the validation lists of cross-validation."""
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


def test_one_label_beside_many_captions_is_found(folder):
    folder.write(but=3)
    for i in range(NUM_IMAGES):
        folder.label(f"images/train/{i:02}.txt", "a photo of a cat\n")
    folder.label("images/train/03.txt")
    assert len(folder.index(max_bad=0.0).classes) == NUM_IMAGES


def test_several_readings_leave_the_image_out(folder, lines):
    folder.write(but=3)
    folder.label("labels/train/03.TXT")
    folder.label("images/train/03.txt", OTHER_TEXT)
    index = folder.index()
    assert len(index) == NUM_IMAGES - 1
    text = "images/train/03.png: unusable label file: its labels may be in labels/train/03.TXT or images/train/03.txt"
    assert index.report.lines[0].startswith(text)
    assert index.report.ledger.lost_images == 1


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


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("gone.txt"), "a broken link"),
        (os.mkdir, "a folder, not a file"),
        (os.mkfifo, "a pipe or device, not a file"),
    ],
)
def test_a_label_file_that_is_no_file_is_no_background(folder, tmp_path, make, problem):
    """A copy does not wait for what somebody writes into a pipe."""
    folder.write(but=3)
    make(folder.root / "labels/train/03.txt")
    place = DataSource(str(folder.yaml()), ("train",), stage=str(tmp_path / "stage"))
    for spec in (load_dataset_spec(folder.yaml()), open_data(place, DistributedContext.single())):
        index = load_index(spec, "train", IndexSettings(progress=False))
        assert len(index) == NUM_IMAGES - 1
        message = f"labels/train/03.txt: unusable label file: {problem}; images/train/03.png is left out"
        assert index.report.lines == [message]


def test_the_own_name_of_an_unused_voc_file_decides_before_the_image_that_it_names(folder):
    write_voc(folder, "voc/{}.xml")
    images = [f"images/train/unread{i}.heic" for i in range(NUM_IMAGES)]
    for i, image in enumerate(images):
        (folder.root / image).write_bytes(b"x")
        named = voc_text([BOX], ["a"], 48, 64).replace("<annotation>", "<annotation><filename>00.png</filename>")
        folder.label(f"voc/unread{i}.xml", named)
    lines = [line for line in folder.index(max_bad=1.0).report.lines if "unread" in line and ORPHAN in line]
    assert len(lines) == NUM_IMAGES
    assert all(f"{image} is of an unsupported kind" in "".join(lines) for image in images)


def write_one_labeled_of_two(folder: Folder) -> str:
    """Writes images a/x and b/x, of which only the first has a label file; returns the file's text."""
    folder.more = "annotations: voc\n"
    text = voc_text([BOX], ["a"], 48, 64).replace("<annotation>", "<annotation><filename>x.png</filename>")
    for group in "ab":
        folder.image(f"images/train/{group}/x.png")
    folder.label("voc/a/x.xml", text)
    return text


@pytest.mark.parametrize("copy", ["voc/a/x copy.xml", "voc/x copy.xml"])
def test_a_copy_of_a_label_file_labels_no_image_of_the_same_name_in_another_folder(folder, copy):
    text = write_one_labeled_of_two(folder)
    folder.label(copy, text)
    index = folder.index(max_bad=0.0)
    assert list(index.paths) == ["images/train/a/x.png", "images/train/b/x.png"]
    assert [len(index.labels(i)) for i in range(2)] == [1, 0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_copies_of_a_voc_file_that_write_the_name_of_the_image_in_two_ways_label_it(folder, encoding):
    folder.more = "annotations: voc\n"
    folder.image("images/train/a/x.png")
    for copy, name in (("one.xml", "x.png"), ("two.xml", "a/x.png")):
        text = voc_text([BOX], ["a"], 48, 64).replace("<annotation>", f"<annotation><filename>{name}</filename>")
        folder.label(f"voc/{copy}", text).write_bytes(text.encode(encoding))
    index = folder.index(max_bad=0.0)
    assert len(index.labels(0)) == 1
    assert index.report.problems == 0


def test_a_voc_file_names_the_image_of_its_own_folder(folder):
    text = write_one_labeled_of_two(folder)
    folder.label("voc/b/other.xml", text.replace(">30<", ">31<"))
    index = folder.index(max_bad=0.0)
    assert [index.labels(i)[0, 3] * 64 for i in range(2)] == pytest.approx([20, 21])
    assert index.report.problems == 0


def test_a_voc_file_names_an_image_of_which_other_folders_have_the_same_name(folder):
    """The file is where the label files of the first image are expected."""
    write_one_labeled_of_two(folder)
    folder.image("images/train/x.png")
    text = voc_text([(0, 1, 1, 9, 9)], ["a"], 48, 64)
    folder.label("voc/1.xml", text.replace("<annotation>", "<annotation><filename>x.png</filename>"))
    index = folder.index(max_bad=0.0)
    assert {path: len(index.labels(i)) for i, path in enumerate(index.paths)} == {
        "images/train/a/x.png": 1,
        "images/train/b/x.png": 0,
        "images/train/x.png": 1,
    }


def test_an_image_that_two_unused_files_may_label_is_lost_once_and_the_objects_of_both(folder):
    folder.write()
    folder.image("images/train/x.png")
    folder.label("labels/train/x-0.txt")
    folder.label("labels/train/x-1.txt")
    index = folder.index()
    assert len(index) == NUM_IMAGES
    assert index.report.ledger.loss_summary() == "1 of 21 images and 2 of 22 labeled objects"
    assert index.report.totals[ORPHAN] == 2


def test_an_image_that_an_unused_voc_file_may_name_is_no_background(folder):
    """The file has other labels than the image of this name in the other folder."""
    text = write_one_labeled_of_two(folder)
    folder.label("voc/other.xml", text.replace(">30<", ">31<"))
    index = folder.index(max_bad=0.5)
    assert list(index.paths) == ["images/train/a/x.png"]
    assert index.report.ledger.lost_images == 1
    assert index.report.lines[0].startswith("voc/other.xml: label file without an image: ")


@pytest.mark.parametrize("count", [2, NUM_IMAGES])
def test_voc_files_that_name_each_others_images_are_reported(folder, lines, count):
    """Their own names decide; a <filename> of no image is only old."""
    write_voc(folder, "voc/{}.xml", "old{}.png")
    for i in range(count):
        path = folder.root / "voc" / f"{i:02}.xml"
        path.write_text(path.read_text().replace(f"old{i:02}.png", f"C:\\x\\{(i + 1) % count:02}.JPG"))
    index = folder.index(max_bad=0.0)
    assert len(index.classes) == NUM_IMAGES
    assert index.report.totals[NAMED_OTHERWISE] == count
    text = r"voc/00.xml: it names C:\x\01.JPG, but is named like images/train/00.png"
    warning = f"{count} of 20 label files declare a <filename> other than their own name, which is used; first {text}"
    assert (warning in lines.text) == (count > 2)


@pytest.mark.parametrize("is_same", [True, False])
def test_two_voc_files_that_name_one_image(folder, is_same):
    write_voc(folder, "voc/annotation{}.xml")
    text = (folder.root / "voc/annotation03.xml").read_text()
    folder.label("voc/second.xml", text if is_same else text.replace(">30<", ">31<"))
    index = folder.index()
    assert len(index) == len(index.classes) == (NUM_IMAGES if is_same else NUM_IMAGES - 1)
    assert index.report.ledger.lost_images == (0 if is_same else 1)


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


def test_captions_beside_images_are_no_labels(folder, lines):
    folder.write(but=3)
    for i in range(NUM_IMAGES):
        folder.label(f"images/train/{i:02}.txt", "a photo of a cat\n")
    index = folder.index(max_bad=0.0)
    assert index.report.totals["backgrounds"] == 1
    assert index.report.problems == 0


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


def test_losses_of_a_copy_are_those_of_the_original(folder, tmp_path):
    """A later copy forgets what has been mended."""
    folder.write(but=3)
    spare = [folder.label("labels/train/no.txt"), folder.label("labels/03.txt"), folder.label("labels/train/05.TXT")]
    spare[2].write_text(OTHER_TEXT)
    (folder.root / "images/train/h.heic").write_bytes(b"x")
    original = folder.index(max_bad=1.0)
    place = DataSource(str(folder.yaml()), ("train",), stage=str(tmp_path / "stage"))
    spec = open_data(place, DistributedContext.single())
    assert index_fingerprint(spec) == index_fingerprint(load_dataset_spec(folder.yaml()))
    copy = load_index(spec, "train", IndexSettings(progress=False, max_bad=1.0))
    assert copy.report.ledger == original.report.ledger
    assert list(copy.report.lines) == list(original.report.lines)
    spare[1].rename(folder.root / "labels/train/03.TXT")
    again = load_index(
        open_data(place, DistributedContext.single()), "train", IndexSettings(progress=False, max_bad=1.0)
    )
    assert len(again) == len(again.classes) == NUM_IMAGES
    (folder.root / "labels/train/03.TXT").unlink()
    again = load_index(
        open_data(place, DistributedContext.single()), "train", IndexSettings(progress=False, max_bad=1.0)
    )
    assert (len(again), len(again.classes)) == (NUM_IMAGES, NUM_IMAGES - 1)


@pytest.mark.parametrize(
    ("images", "folders"),
    [
        ("/s/images/train", ["/s/labels/train", "/s/images/train"]),
        ("/s/train/images", ["/s/train/labels", "/s/train/images"]),
        ("/s/train", ["/s/train"]),
        ("/s/images/a/images", ["/s/images/a/labels", "/s/images/a/images"]),
        ("/s/Images", ["/s/Images", "/s/labels"]),
    ],
)
def test_the_usual_folder_of_labels_comes_first(images, folders):
    assert label_folders(images)[: len(folders)] == folders


def test_a_listing_names_labels_with_unusual_suffixes(folder):
    one_capital_suffix(folder)
    listing = list_split(load_dataset_spec(folder.yaml()), "train")
    assert listing.unusual_labels == {"images/train/03.png": "labels/train/03.Txt"}
    assert listing.labels[3].name == "labels/train/03.Txt"


def test_a_listing_keeps_the_images_that_it_leaves_out(folder):
    """Each with its status, also in the file that a copy has."""
    folder.write(but=3)
    folder.label("labels/train/3.txt")
    (folder.root / "labels/train/05.txt").unlink()
    (folder.root / "labels/train/05.txt").symlink_to("gone")
    (folder.root / "labels/train/07.txt").unlink()
    folder.image("more/a.png")
    for name in ("again", "twice"):
        (folder.root / "images/train" / name).symlink_to("../../more")
    listing = list_split(load_dataset_spec(folder.yaml()), "train")
    images = {image.name.removeprefix("images/train/"): image for image in listing.all_images}
    reasons = {name: image.reason.where for name, image in images.items() if image.status is ImageStatus.LEFT_OUT}
    assert reasons == {"03.png": "labels/train/3.txt", "05.png": "labels/train/05.txt"}
    backgrounds = [name for name, image in images.items() if image.status is ImageStatus.BACKGROUND]
    assert backgrounds == ["07.png", "again/a.png"]
    assert [alias.name for alias in images["again/a.png"].aliases] == ["images/train/twice/a.png"]
    assert listing.num_aliases == 1
    assert len(listing.images) == len(listing.labels) == len(images) - 2 == NUM_IMAGES - 1
    assert sum(finding.lost_images for finding in listing.findings) == 2

    stored = folder.root / "stored.json"
    stored.write_text(listing_text(listing))
    assert read_listing(stored).all_images == listing.all_images
    assert listing_text(read_listing(stored)) == listing_text(listing)


def test_a_place_is_not_searched_twice_for_many_unlabeled_images(folder, monkeypatch):
    """Half of the images without labels: the number of folders that are read does not depend on it."""
    folder.write()
    for path in sorted((folder.root / "labels/train").iterdir())[::2]:
        path.unlink()
    calls: list[str] = []
    scandir: Callable = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: calls.append(str(path)) or scandir(path))
    assert len(list_split(load_dataset_spec(folder.yaml()), "train").images) == NUM_IMAGES
    assert len(calls) < 10


def test_labels_of_a_name_in_two_folders_are_ambiguous_whatever_lists_them(tmp_path):
    """The split of one folder that has both is the reference."""
    for name in "ab":
        write_dataset(tmp_path / name, train=2, val=1)
    image = {"id": 1, "file_name": "000.png", "width": 64, "height": 64}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [8, 8, 20, 20]}
    content = {"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "light"}]}
    (tmp_path / "all.json").write_text(json.dumps(content))
    yaml = tmp_path / "data.yaml"
    yaml.write_text("train: [a/images/train, b/images/train]\nval: a/images/val\nannotations: all.json\n")
    with pytest.raises(UserError, match=r"matches \d images"):
        load_index(load_dataset_spec(yaml), "train", IndexSettings(progress=False))


def test_label_files_that_cannot_be_read_are_not_taken_for_copies_of_one(folder):
    """Each of the two may have the labels."""
    folder.write(but=3)
    for name in ("03.TXT", "03.Txt"):
        os.mkfifo(folder.root / "labels/train" / name)
    index = folder.index()
    (loss,) = index.report.ledger.losses
    assert loss.images == 1
    assert "labels may be in labels/train/03.TXT or labels/train/03.Txt; keep one of them" in loss.example


def test_a_failing_disk_does_not_turn_labels_into_backgrounds(folder, monkeypatch):
    """The file is in another folder than usual, so it is opened to see whether it contains labels."""
    folder.write(but=3)
    label = folder.label("images/train/03.txt")
    spec = load_dataset_spec(folder.yaml())
    open_file: Callable = os.open

    def fail(path: object, *args: object, **options: object) -> int:
        if str(path) == str(label):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="Input/output error"):
        list_split(spec, "train")


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
