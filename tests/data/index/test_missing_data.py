"""A split without images or labels is refused, and the message names what exists instead."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.data.index.small_set import load, write_yaml
from tests.helpers.messages import refused

# As Roboflow writes them: the images come after more bytes than are read to recognize a file.
COCO_JSON = json.dumps(
    {"info": {}, "categories": [{"id": i, "name": "n" * 80} for i in range(99)], "images": [{"id": 1}]}
)


def keep(root: Path) -> None:
    """Does not change the data set."""


def remove_labels(root: Path) -> None:
    shutil.rmtree(root / "labels")


def remove_images(root: Path) -> None:
    remove_labels(root)
    shutil.rmtree(root / "images/train")


def name_absent_annotations(root: Path) -> None:
    remove_labels(root)
    write_yaml(root, "download: https://example.org/set.zip\nannotations: nowhere\n")


def name_the_whole_disk(root: Path) -> None:
    (root / "d.yaml").write_text("train: /\nnames: [cat, dog, cow]\n")


def name_a_yaml_as_annotations(root: Path) -> None:
    write_yaml(root, "annotations: d.yaml\n")


@pytest.mark.parametrize(
    ("change", "split", "message"),
    [
        (keep, "test", "set/d.yaml: has no 'test' split, only train, val; add 'test: <folder>'"),
        (
            remove_labels,
            "train",
            "set/d.yaml: 'train' has 5 images and no label file; the first was expected at .../set/labels/train/a.txt; "
            ".../set/instances.json: if it is COCO's, add 'annotations: {train: instances.json}' to the YAML",
        ),
        (
            remove_images,
            "train",
            "set/images/train: not found (named by .../set/d.yaml); .../set has 5 label files (first: instances.json) "
            "but no images; export the images as well, or copy them there",
        ),
        (
            name_absent_annotations,
            "train",
            "set/nowhere: not found (named by .../set/d.yaml); .../set has images, voc; its 'download' is never run: "
            "download and unpack the data yourself",
        ),
        (name_the_whole_disk, "train", "set/d.yaml: train: / is the whole disk; name the folder of its images"),
        (
            name_a_yaml_as_annotations,
            "train",
            "set/d.yaml: neither a COCO .json nor a folder of VOC .xml (named by .../set/d.yaml)",
        ),
    ],
)
def test_missing_and_empty_data_is_one_line(root, tmp_path, change, split, message):
    change(root)
    with refused(message):
        load(root, tmp_path / "cache", split)


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            "images/train/_annotations.csv",
            ".../set/labels/train/a.txt; .../set/images/train/_annotations.csv: CSV is not supported; export "
            "the data set as YOLO txt, COCO JSON or Pascal VOC",
        ),
        (
            "images/train/_annotations.coco.json",
            ".../set/labels/train/a.txt; .../set/images/train/_annotations.coco.json: if it is COCO's, add "
            "'annotations: {train: images/train/_annotations.coco.json}' to the YAML",
        ),
        (
            "annotations/instances_train.json",
            ".../set/labels/train/a.txt; .../set/annotations/instances_train.json: if it is COCO's, add "
            "'annotations: {train: annotations/instances_train.json}' to the YAML",
        ),
        (
            "images/train/a.json images/train/b.json",
            ".../set/labels/train/a.txt; .../set/images/train has 2 .json files: one JSON per image is not "
            "supported; convert them to YOLO txt or to one COCO JSON",
        ),
        (
            "Annotations/a.xml Annotations/c.xml",
            ".../set/labels/train/a.txt; .../set/Annotations has 2 .xml files: if they are Pascal VOC's, add "
            "'annotations: {train: Annotations}' to the YAML",
        ),
        (
            "labels/train/a.xml labels/train/z.txt",
            ".../set/labels/train/a.txt; .../set/labels/train has 1 .xml file: if they are Pascal VOC's, add "
            "'annotations: {train: labels/train}' to the YAML",
        ),
        (
            "images/train/a.txt images/train/notes.txt",
            ".../set/labels/train/a.txt; .../set/images/train has 1 .txt file: they have no row of YOLO txt "
            "(first: a.txt)",
        ),
        (
            "labels/a.txt",
            ".../set/labels/train/a.txt; .../set/labels has 1 .txt file: move them to .../set/labels/train",
        ),
        (
            "Labels/train/a.txt",
            ".../set/labels/train/a.txt; .../set/Labels/train has 1 .txt file: they have no row of YOLO txt "
            "(first: a.txt)",
        ),
        (
            "labels /train/a.txt",
            ".../set/labels/train/a.txt; .../set/labels /train has 1 .txt file: move them to .../set/labels/train",
        ),
        ("labels/train/1.txt", ".../set/labels/train/a.txt; .../set/labels/train has 1.txt"),
        ("README.txt classes.txt package.json", ".../set/labels/train/a.txt"),
    ],
)
def test_a_split_without_labels_says_what_is_there(root, tmp_path, there, message):
    for name in ("labels", "voc"):
        shutil.rmtree(root / name)
    (root / "instances.json").unlink()
    for name in re.split(r" (?!/)", there):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(COCO_JSON if "_" in name else "")
    with refused(f"set/d.yaml: 'train' has 5 images and no label file; the first was expected at {message}") as caught:
        load(root, tmp_path / "cache")
    assert there.startswith("README") == str(caught.value).endswith("a.txt")


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            "labels/train/a.txt",
            "labels/train has 1 .txt file: if they are YOLO txt, remove 'annotations' from the YAML",
        ),
        (
            "labels/train.json",
            "labels/train.json: if it is COCO's, add 'annotations: {train: labels/train.json}' to the YAML",
        ),
        ("labels/train/a.json", "labels/train has 1 .json file: one JSON per image is not supported; ..."),
        ("labels/x.csv", "labels/x.csv: CSV is not supported; ..."),
    ],
)
def test_annotations_of_another_format_say_what_is_there(root, tmp_path, there, message):
    shutil.rmtree(root / "labels")
    (root / there).parent.mkdir(parents=True)
    (root / there).write_text(COCO_JSON if there.endswith(".json") else "0 0.5 0.5 0.2 0.2\n")
    write_yaml(root, "annotations: labels\n")
    with refused(f"no label file; the first was expected at .../set/labels/...a.xml; .../set/{message}"):
        load(root, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("project-1.json", '[{"rectanglelabels": ["cat"]}]', "Label Studio's JSON"),
        ("ann/a.jpg.json", '{"objects": [{"classTitle": "cat"}]}', "Supervisely's JSON"),
    ],
)
def test_an_export_that_is_not_read_is_not_taken_for_coco(root, tmp_path, name, content, title):
    for folder in ("labels", "voc"):
        shutil.rmtree(root / folder)
    (root / "instances.json").unlink()
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(content)
    with refused(f"; .../set/{name}: {title}: export as YOLO or COCO instead"):
        load(root, tmp_path / "cache")


def test_rows_without_an_image_come_before_advice_on_labels(root, tmp_path):
    """One row names a preview as written, so that the other rows are not read like paths of another folder."""
    shutil.copy(root / "images/train/a.jpg", root)
    (root / "train.txt").write_text("a.jpg\nb.png\nd.png\n")
    (root / "d.yaml").write_text("train: train.txt\nnames: [cat, dog, cow]\n")
    with refused(
        "set/d.yaml: 'train' has 1 image without a label file, and 2 rows without an image, first train.txt:2: b.png "
        "not found; if one row is a path as written, all must be"
    ):
        load(root, tmp_path / "cache")


def test_labels_outside_the_data_set_are_not_advised(root, tmp_path):
    """Images directly in the data set's folder have another folder above it, with other data sets."""
    (tmp_path / "other.json").write_text('{"images": [{"id": 1}]}')
    folder = tmp_path / "plain"
    folder.mkdir()
    shutil.copy(root / "images/train/a.jpg", folder)
    (folder / "d.yaml").write_text("train: .\nnames: [cat]\n")
    with refused("no label file; the first was expected at .../plain/a.txt"):
        load(folder, tmp_path / "cache")


def test_a_split_whose_only_label_files_are_doubtful_names_these(root, tmp_path):
    for name in ("a", "b", "sub/c", "d"):
        (root / f"labels/train/{name}.txt").unlink()
    (root / "labels/train/a.TXT").write_text("0 0.5 0.5 0.2 0.2\n")
    (root / "labels/train/a.Txt").write_text("1 0.5 0.5 0.2 0.2\n")
    with refused(
        "set/d.yaml: 'train' has 4 images without a label file, and 1 image whose labels can't be used, first "
        "images/train/a.jpg: its labels may be in labels/train/a.TXT or labels/train/a.Txt; keep one of them"
    ):
        load(root, tmp_path / "cache")
