"""Existing label files are found if only one reading is possible; otherwise, their images do not count as
backgrounds."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import unicodedata
from collections.abc import Callable

import numpy as np
import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.findings import ORPHAN, UNREAD_LABELS
from data.labels.yolo import label_folders
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.listing.listing import ImageStatus
from data.source.listing.stored import listing_text, read_listing
from data.source.open import open_data
from tests.data.source.labeled_folder import (
    ACCENTED,
    NUM_IMAGES,
    OTHER_TEXT,
    TEXT,
    VOC_TEXT,
    Folder,
    forbid_search,
    write_voc,
)
from tests.helpers.index_fingerprint import index_fingerprint
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset
from tools.check.checks.scan import scan_issues
from tools.check.scan_splits import scan_dataset
from utils.distributed.context import DistributedContext
from utils.errors import UserError


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
    """The file is too far from its usual place to be found."""
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
    """The message says how to rename the label file; once renamed, it is used without a message."""
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


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("gone.txt"), "a broken link"),
        (os.mkdir, "a folder, not a file"),
        (os.mkfifo, "a pipe or device, not a file"),
    ],
)
def test_a_label_file_that_is_no_file_is_no_background(folder, tmp_path, make, problem):
    """Nor does a copy wait for a writer of a pipe."""
    folder.write(but=3)
    make(folder.root / "labels/train/03.txt")
    place = DataSource(str(folder.yaml()), ("train",), stage=str(tmp_path / "stage"))
    for spec in (load_dataset_spec(folder.yaml()), open_data(place, DistributedContext.single())):
        index = load_index(spec, "train", IndexSettings(progress=False))
        assert len(index) == NUM_IMAGES - 1
        message = f"labels/train/03.txt: unusable label file: {problem}; images/train/03.png is left out"
        assert index.report.lines == [message]


@pytest.mark.parametrize("problem", ["a broken link", "permission denied"])
def test_images_whose_label_folder_cannot_be_read_are_no_backgrounds(folder, monkeypatch, problem):
    folder.write()
    folder.image("images/train/b/c/20.png")
    folder.image("images/train/b/c/21.png")
    if problem == "a broken link":
        (folder.root / "labels/train/b").symlink_to("/mnt/gone")
    else:
        folder.label("labels/train/b/c/20.txt")
        forbid_search(monkeypatch, folder.root / "labels/train/b")
    folder.label("images/train/b/c/21.txt")
    index = folder.index()
    assert len(index) == len(index.classes) == NUM_IMAGES + 1
    assert index.report.ledger.lost_images == 1
    message = f"its folder cannot be read ({problem}); images/train/b/c/20.png is left out"
    assert index.report.lines == [f"labels/train/b/c/20.txt: unusable label file: {message}"]


@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        ("images/train", "images found for 'train' (...); 20 images left out, first images/train/00.png: {}"),
        ("labels/train", "label file of 'train' can be read; first, labels/train/00.txt: {}; ... is left out"),
    ],
)
def test_files_to_which_access_is_denied_are_no_broken_links(folder, monkeypatch, forbidden, message):
    folder.write()
    forbid_search(monkeypatch, folder.root / forbidden)
    with refused(message.format("permission denied")):
        folder.index()


def test_captions_beside_images_are_no_labels(folder, lines):
    folder.write(but=3)
    for i in range(NUM_IMAGES):
        folder.label(f"images/train/{i:02}.txt", "a photo of a cat\n")
    index = folder.index(max_bad=0.0)
    assert index.report.totals["backgrounds"] == 1
    assert index.report.problems == 0


def test_losses_of_a_copy_are_those_of_the_original(folder, tmp_path):
    """A later copy no longer has the losses that have been corrected."""
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
    """Each image keeps its status, also in the stored listing of a copy."""
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
    """The reference is the split of one folder that contains both."""
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
