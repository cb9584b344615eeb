"""What label formats share: how the format of files is recognized, and how all of them report problems."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from data.labels import formats
from data.labels.coco import COCO, read_coco
from data.labels.findings import UNKNOWN_CLASS
from data.labels.formats import format_of
from data.labels.recognize_labels import format_of_labels
from data.labels.rows import LabelFileError
from data.labels.voc import VOC, parse_voc
from data.labels.yolo import YOLO, parse_yolo
from tests.helpers.label_files import coco_file, voc_file
from utils.errors import UserError

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


def test_unknown_classes_are_called_as_in_the_label_file(tmp_path):
    name = "what is not 'known'"
    yolo = parse_yolo(b"7 0.5 0.5 0.2 0.2", 2)
    xml = parse_voc(voc_file((name, 1, 2, 30, 40)), {"a": 0})
    annotation = {"image_id": 9, "category_id": 1, "bbox": [1, 2, 3, 4]}
    (tmp_path / "a.json").write_text(json.dumps(coco_file([annotation], [(1, name)])))
    (entry,) = read_coco(tmp_path / "a.json", ("a",)).images
    problems = [labels.problems[0] for labels in (yolo, xml, entry.labels)]
    assert [problem.kind for problem in problems] == [UNKNOWN_CLASS] * 3
    assert [problem.class_name for problem in problems] == ["class 7", name, name]


@pytest.mark.parametrize(
    ("data", "encoding"), [("行人 车辆".encode("gbk"), "GBK"), ("0 0.5".encode("utf-16"), "UTF-16")]
)
def test_label_files_in_another_encoding_say_which_it_is(data, encoding, tmp_path):
    reason = f"not UTF-8 but apparently {encoding}; save it as UTF-8"
    with pytest.raises(LabelFileError, match=f"^{reason}"):
        parse_yolo(data, 2)
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError, match=f"a.json: {reason}"):
        read_coco(tmp_path / "a.json", None)
    if encoding == "GBK":
        with pytest.raises(LabelFileError, match=rf"^3: malformed XML \({reason}"):
            parse_voc(b"<annotation>\n\n<object>" + data + b"</object></annotation>", {})


@pytest.mark.parametrize(
    "text", ["1" + (" " * 800 + "1") * 4 + "x", "1" + ", 1" * 1300 + "x", '{"shapes":' + "[" * 4000]
)
def test_files_are_recognized_in_linear_time(text):
    began = time.process_time()
    assert format_of_labels(text.encode()) == ""
    assert time.process_time() - began < 5
