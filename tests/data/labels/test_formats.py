"""The label format of a split: several formats may share the place or the suffix of their files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from data.labels import formats
from data.labels.coco import COCO
from data.labels.formats import format_of
from data.labels.voc import VOC
from data.labels.yolo import YOLO

FOLDER = replace(VOC, name="cuboids", files=replace(VOC.files, suffix=".cub", is_labels=lambda head: b"cuboid" in head))
ONE_FILE = replace(COCO, name="vectors", files=replace(COCO.files, is_labels=lambda head: b"vectors" in head))


@pytest.fixture
def more_formats(monkeypatch):
    monkeypatch.setattr(formats, "LABEL_FORMATS", (*formats.LABEL_FORMATS, FOLDER, ONE_FILE))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.cub": "cuboid"}, FOLDER),
        ({"sub/a.CUB": "cuboid"}, FOLDER),
        ({"a.cub": "other", "a.xml": "<annotation></annotation>"}, VOC),
        ({"readme.txt": ""}, VOC),  # which says what it misses
    ],
)
def test_a_folder_has_the_format_of_its_files(tmp_path, more_formats, files, expected):
    for name, text in files.items():
        path = tmp_path / "labels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert format_of(tmp_path / "labels") is expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '{"vectors": []}', ONE_FILE),
        ("a.json", '{"images": [{"id": 1}]}', COCO),
        ("a.json", "{}", COCO),
        ("gone.json", None, COCO),
        ("a.vec", "vectors", None),
    ],
)
def test_formats_that_share_a_suffix_are_told_apart_by_content(tmp_path, more_formats, name, text, expected):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert format_of(tmp_path / name) is expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', True),
        ('{"categories": [{"id": 0, "name": "a"}], "licenses": [{"id', True),  # images may follow
        ('{"licenses": [{"id": 1}], "categories": [{"id": 0, "name": "\u00e9', True),
        ('{"categories": [{"id": 0, "name": "a"}], "info": {"contributor": "Label Studio"}}\n', False),
        ('{"categories": [{"id": 0, "name": "a"}], "images": []}', False),
        ('{"names": ["a"]}', False),
    ],
)
def test_a_coco_json_has_images_or_may_have_them_further_down(head, expected):
    text = head.encode()
    assert COCO.files.is_labels(text[:-1] if text.endswith(b"\xa9") else text) is expected  # cut within a character


def test_without_annotations_labels_are_yolo_txt():
    assert format_of(None) is YOLO
