"""Rule D6: a row of a label file is a box or a finding, in each format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from data.findings import BAD_BOX, BAD_LABEL, BAD_ROW, DUPLICATE, FITTED, UNKNOWN_CLASS
from tests.data.data_set import BOX, Counts, DataSet, boxes, coco, counts, num_boxes, places, refusal, voc

ROWS = {
    "box": ("1 0.5 0.5 0.25 0.5", [("b", 30, 15, 20, 30)]),
    "box with spaces and a sign": ("\t+0.0  5e-1 .5 0.25\t0.5 \r", [("a", 30, 15, 20, 30)]),
    "polygon": ("0 0.25 0.25 0.5 0.25 0.25 0.75", [("a", 20, 15, 20, 30)]),
    "polygon of four corners": ("0 0 0 0.5 0 0.5 0.5 0 0.5", [("a", 0, 0, 40, 30)]),
    "byte order mark": ("\ufeff0 0.5 0.5 0.25 0.5", [("a", 30, 15, 20, 30)]),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_of_yolo_txt_is_a_box_or_a_polygon(data, case):
    row, expected = ROWS[case]
    data.pairs("train/x", rows=row)
    data.yaml()
    index = data.index()
    assert boxes(index) == {"x": expected}
    assert len(index.report.findings) == 0


LOST_ROWS = {
    "0 0.5 0.5 0.2": BAD_ROW,
    "0 0.5 0.5 0.2 0.2 0.9": BAD_ROW,  # a column of confidences
    "0 0.1 0.1 0.2 0.2 0.3 0.3 2": BAD_ROW,  # keypoints
    "0,0.5,0.5,0.2,0.2": BAD_ROW,
    "cat 0.5 0.5 0.2 0.2": BAD_ROW,
    "0 0.5 nan 0.2 0.2": BAD_ROW,
    "0 0.5 1e999 0.2 0.2": BAD_ROW,
    "0 0.5 1_0 0.2 0.2": BAD_ROW,
    "0.5 0.5 0.5 0.2 0.2": BAD_ROW,
    "2 0.5 0.5 0.2 0.2": UNKNOWN_CLASS,
    "-1 0.5 0.5 0.2 0.2": UNKNOWN_CLASS,
    "0 0.5 0.5 -0.2 0.2": BAD_BOX,
    "0 0.5 0.5 0 0.2": BAD_BOX,
    "0 0.5 0.5 0.001 0.001": BAD_BOX,
    "0 320 240 20 20": BAD_BOX,
    "0 1.5 0.5 0.2 0.2": BAD_BOX,
}


@pytest.mark.parametrize("row", LOST_ROWS)
def test_a_row_that_is_no_box_is_a_finding_and_a_lost_object(data, row):
    data.pairs("train/x", rows=f"{BOX}\n{row}\n")
    data.yaml()
    index = data.index()
    assert places(index, LOST_ROWS[row]) == ["labels/train/x.txt:3"]
    assert counts(index) == Counts(1, 1, 0, 1)
    assert index.incomplete.tolist() == [True]


def test_an_image_whose_rows_are_all_lost_is_left_out(data):
    """As a background it would teach that its objects are none."""
    data.pairs("train/x")
    data.pairs("train/y", rows="0 0.5 0.5 0.2\n" * 3)
    data.file("labels/train/y2.txt", b"\xff\xfe0\x00 \x00")
    data.images("images/train/y2.png")
    data.yaml()
    index = data.index()
    assert num_boxes(index) == {"images/train/x.png": 1}
    assert (index.report.used_images, index.report.lost_images) == (1, 2)
    assert index.report.used_objects + index.report.lost_objects >= 4
    assert any(place.startswith("labels/train/y2.txt") for place in places(index, BAD_LABEL))


def test_a_box_that_exceeds_its_image_is_clipped(data):
    """The area of an object, here a triangle, shrinks as its box does."""
    triangle = "0 0.75 0.25 1.25 0.25 0.75 0.75"
    data.pairs("train/x", rows=f"0 0.9 0.5 0.4 0.5\n0 0.5 0.5 1.000001 1\n{triangle}\n")
    data.yaml()
    index = data.index()
    assert boxes(index) == {"x": [("a", 56, 15, 24, 30), ("a", 0, 0, 80, 60), ("a", 60, 15, 20, 30)]}
    assert index.area_px.tolist() == pytest.approx([24 * 30, 80 * 60, 20 * 30 / 2], rel=1e-5)
    assert places(index, FITTED) == ["labels/train/x.txt:1", "labels/train/x.txt:3"]
    assert counts(index) == Counts(1, 3)


def test_a_repeated_row_is_scored_each_time_and_trained_on_once(data):
    rows = f"{BOX}{BOX}0 0.4 0.4 0.6 0.4 0.5 0.6\n0 0.4 0.4 0.6 0.6 0.5 0.5\n"  # two polygons in one box
    data.pairs("train/x", rows=rows)
    data.yaml()
    scored = data.index()
    assert scored.repeated.tolist() == [False, True, False, False]
    assert places(scored, DUPLICATE) == ["labels/train/x.txt:2"]
    assert counts(scored) == Counts(1, 4)
    assert len(data.index(repeats=False).classes) == 3


def test_three_formats_say_the_same(data):
    data.three_formats({"p/x": [(0, 8, 6, 32, 24), (1, 0, 0, 80, 60)], "y": [(1, 10, 10, 20, 30)], "empty": []})
    contents = []
    for labels in (None, "voc", "all.json"):
        data.yaml(train="images/train", **({"annotations": {"train": labels}} if labels else {}))
        index = data.index()
        assert len(index.report.findings) == 0
        arrays = [index.image_hw, index.offsets, np.round(index.boxes_xywh_px, 6), index.classes, index.crowd]
        contents.append((list(index.paths), [array.tolist() for array in arrays]))
    assert contents[0] == contents[1] == contents[2]
    truth = index.ground_truth()
    assert truth.image_ids == (100, 102, 101)  # in the order of the names: empty, p/x, y
    assert truth.category_ids == (1, 2)


@pytest.mark.parametrize("labels", [None, "voc"])
def test_the_box_of_an_unknown_class_is_in_pixels_of_the_image(data, labels):
    data.pairs("train/x", rows=f"{BOX}2 0.75 0.75 0.5 0.5\n")
    data.file("voc/x.xml", voc(("a", 5, 5, 20, 20), ("c", 80, 60, 160, 120), hw=(120, 160)))  # of twice the size
    data.yaml(train="images/train", **({"annotations": {"train": labels}} if labels else {}))
    (finding,) = [finding for finding in data.index().report.findings if finding.kind == UNKNOWN_CLASS]
    assert finding.xyxy_px == (40, 30, 80, 60)


LOST_OBJECTS = {  # of VOC
    "without a name": ("<object><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>", 1),
    "without a box": ("<object><name>a</name></object>", 1),
    "not a number": (voc(("a", 1, 1, 9, 9)).split("\n", 1)[1].replace(">9<", ">x<").removesuffix("</annotation>"), 1),
    "underscore": (voc(("a", f"1.{'0' * 60}", 1, 9, "1_0")).split("\n", 1)[1].removesuffix("</annotation>"), 1),
    "unknown": (voc(("c", 1, 1, 9, 9)).split("\n", 1)[1].removesuffix("</annotation>"), 1),
    "reversed": (voc(("a", 9, 9, 1, 1)).split("\n", 1)[1].removesuffix("</annotation>"), 1),
}


@pytest.mark.parametrize("case", LOST_OBJECTS)
def test_an_object_of_voc_that_is_no_box_is_lost(data, case):
    text, lost = LOST_OBJECTS[case]
    data.images("images/train/x.png")
    data.file("voc/x.xml", voc(("a", 5, 5, 20, 20)).replace("</annotation>", f"{text}</annotation>"))
    data.yaml(train="images/train", annotations={"train": "voc"})
    assert data.counts() == Counts(1, 1, 0, lost)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_voc_is_read_in_the_encoding_it_declares_and_parts_are_no_objects(data, encoding):
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
    text = voc(("ä", 5, 5, 20, 20)).replace("</object>", part)
    data.images("images/train/x.png")
    data.file("voc/x.xml", f'<?xml version="1.0" encoding="{encoding}"?>\n{text}'.encode(encoding))
    data.yaml(train="images/train", names=["ä"], annotations={"train": "voc"})
    assert data.counts() == Counts(1, 1)


def test_an_xml_that_cannot_be_parsed_or_would_expand_leaves_its_image_out(data):
    bomb = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'
    for stem, text in {"x": voc(("a", 5, 5, 20, 20)), "cut": "<annotation><object>", "bomb": bomb}.items():
        data.images(f"images/train/{stem}.png")
        data.file(f"voc/{stem}.xml", text)
    data.yaml(train="images/train", annotations={"train": "voc"})
    index = data.index()
    assert num_boxes(index) == {"images/train/x.png": 1}
    assert index.report.lost_images == 2


LOST_ANNOTATIONS = {
    "no bbox": {"image_id": 100, "category_id": 1},
    "three numbers": {"image_id": 100, "category_id": 1, "bbox": [1, 2, 3]},
    "text": {"image_id": 100, "category_id": 1, "bbox": [1, 2, "3_0", 4]},
    "not finite": {"image_id": 100, "category_id": 1, "bbox": [1, 2, float("nan"), 4]},
    "negative": {"image_id": 100, "category_id": 1, "bbox": [30, 30, -20, 10]},
    "unknown category": {"image_id": 100, "category_id": 7, "bbox": [1, 2, 30, 30]},
    "unknown image": {"image_id": 7, "category_id": 1, "bbox": [1, 2, 30, 30]},
    "not a dict": "box",
}


@pytest.mark.parametrize("case", LOST_ANNOTATIONS)
def test_an_annotation_of_coco_that_is_no_box_is_lost(data, case):
    content = coco([("x.png", [(1, 5, 5, 20, 20)])])
    content["annotations"].append(LOST_ANNOTATIONS[case])
    data.images("images/train/x.png")
    data.file("a.json", content)
    data.yaml(train="images/train", annotations={"train": "a.json"})
    # An annotation of no image is one of a missing image.
    assert data.counts() == Counts(1, 1, int(case in ("unknown image", "not a dict")), 1)


def test_crowds_and_areas_of_coco_are_kept(data):
    content = coco([("x.png", [(1, 5, 5, 20, 20), (2, 30, 5, 20, 20)])])
    content["annotations"][0] |= {"iscrowd": 1, "area": 123.5}
    data.images("images/train/x.png")
    data.file("a.json", content)
    data.yaml(train="images/train", annotations={"train": "a.json"})
    index = data.index()
    assert index.crowd.tolist() == [True, False]
    assert index.area_px.tolist() == [123.5, 400]


DAMAGED_JSONS = {
    "cut": b'{"images": [',
    "a list": b"[]",
    "without images": b'{"annotations": [], "categories": []}',
    "not text": b"\xff\xfe\x00",
    "repeated ids": json.dumps(coco([("x.png", []), ("y.png", [])])).replace("101", "100").encode(),
    "no file_name": json.dumps(coco([("x.png", [])])).replace("file_name", "name").encode(),
    "a category id that is no number": json.dumps(
        coco([("x.png", [])], categories=[{"id": float("nan"), "name": "a"}])
    ).encode(),
    "of other images": json.dumps(coco([("z.png", [(1, 5, 5, 20, 20)])])).encode(),
}


@pytest.mark.parametrize("case", DAMAGED_JSONS)
def test_a_json_that_is_not_coco_or_names_no_image_of_the_split_is_refused(data, case):
    data.images("images/train/x.png")
    data.file("a.json", DAMAGED_JSONS[case])
    data.yaml(train="images/train", annotations={"train": "a.json"})
    assert "a.json" in refusal(data.index)


def test_images_that_a_json_does_not_name_are_left_out_and_an_empty_entry_is_a_background(data: DataSet):
    data.images("images/train/x.png", "images/train/empty.png", "images/train/unnamed.png")
    data.file("a.json", coco([("x.png", [(1, 5, 5, 20, 20)]), ("empty.png", [])]))
    data.yaml(train="images/train", annotations={"train": "a.json"})
    assert num_boxes(data.index()) == {"images/train/empty.png": 0, "images/train/x.png": 1}


def as_text(value: Any) -> Any:
    """Returns JSON content with every number in text but the ids of images, which results repeat."""
    if isinstance(value, dict):
        return {key: item if key in ("images", "image_id") else as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return str(value) if type(value) in (int, float) else value


def test_numbers_in_text_are_numbers_everywhere_in_a_coco_json(data):
    """Roboflow writes the width and height of a bbox as text."""
    content = coco([("x.png", [(1, 5, 5, 20, 20), (2, 30, 5, 20, 20), (2, 30.25, 5, 20, 2e1)])])
    content["annotations"][0] |= {"area": 123.5, "iscrowd": 0, "segmentation": [[5, 5, 25, 5, 15, 25]]}
    content["annotations"][1] |= {"area": 400, "iscrowd": 1}
    data.images("images/train/x.png")
    data.yaml(train="images/train", annotations={"train": "a.json"})
    data.file("a.json", content)
    expected = data.index()
    text = as_text(content)
    text["images"][0] |= {"width": "80", "height": "60.0"}
    data.file("a.json", text)
    index = data.index()
    assert len(index.report.findings) == 0
    assert index.label_digest() == expected.label_digest()
    assert index.area_px.tolist() == expected.area_px.tolist()
    assert (index.names, index.category_ids) == (expected.names, expected.category_ids)
    (data.root / "data.yaml").write_text("train: images/train\nannotations: {train: a.json}\n")
    assert data.index().names == ("a", "b")
