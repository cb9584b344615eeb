"""Rule D6: a row of a label file is a box or a finding, in each format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from data.findings import BAD_BOX, BAD_LABEL, BAD_ROW, DUPLICATE, FITTED, ORPHAN, UNKNOWN_CLASS
from tests.data.data_set import BOX, Counts, DataSet, boxes, coco, counts, num_boxes, places, told, voc

ROWS = {
    "box": ("1 0.5 0.5 0.25 0.5", [("b", 30, 15, 20, 30)]),
    "box with spaces and a sign": ("\t+0.0  5e-1 .5 0.25\t0.5 \r", [("a", 30, 15, 20, 30)]),
    "polygon": ("0 0.25 0.25 0.5 0.25 0.25 0.75", [("a", 20, 15, 20, 30)]),
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


def lossy(data: DataSet, form: str, row: Any) -> None:
    """Writes an image with a box and a row that is none."""
    annotations = {"yolo": None, "voc": "voc", "coco": "a.json"}[form]
    data.pairs("train/x", rows=f"{BOX}\n{row}\n")
    data.file("voc/x.xml", voc(("a", 5, 5, 20, 20)).replace("</annotation>", f"{row}</annotation>"))
    content = coco([("x.png", [(1, 5, 5, 20, 20)])])
    content["annotations"].append(row)
    data.file("a.json", content)
    data.yaml(train="images/train", **({"annotations": {"train": annotations}} if annotations else {}))


OBJECT = "<object><name>a</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>"
ANNOTATION = {"image_id": 100, "category_id": 1, "bbox": [1, 2, 30, 30]}
LOST = [
    ("yolo", "0 0.5 0.5 0.2", BAD_ROW),
    ("yolo", "0 0.5 0.5 0.2 0.2 0.9", BAD_ROW),  # a column of confidences
    ("yolo", "0 0.1 0.1 0.2 0.2 0.3 0.3 2", BAD_ROW),  # keypoints
    ("yolo", "0,0.5,0.5,0.2,0.2", BAD_ROW),
    ("yolo", "0 0.5 nan 0.2 0.2", BAD_ROW),
    ("yolo", "0 0.5 1e999 0.2 0.2", BAD_ROW),
    ("yolo", "0 0.5 1_0 0.2 0.2", BAD_ROW),
    ("yolo", "0.5 0.5 0.5 0.2 0.2", BAD_ROW),
    ("yolo", "2 0.5 0.5 0.2 0.2", UNKNOWN_CLASS),
    ("yolo", "-1 0.5 0.5 0.2 0.2", UNKNOWN_CLASS),
    ("yolo", "0 0.5 0.5 -0.2 0.2", BAD_BOX),
    ("yolo", "0 0.5 0.5 0.001 0.001", BAD_BOX),
    ("yolo", "0 320 240 20 20", BAD_BOX),
    ("yolo", "0 1.5 0.5 0.2 0.2", BAD_BOX),
    ("voc", OBJECT.replace("<name>a</name>", ""), BAD_ROW),
    ("voc", "<object><name>a</name></object>", BAD_ROW),
    ("voc", OBJECT.replace(">9<", ">x<"), BAD_ROW),
    ("voc", OBJECT.replace(">9<", ">1_0<"), BAD_ROW),
    ("voc", OBJECT.replace(">a<", ">c<"), UNKNOWN_CLASS),
    ("voc", OBJECT.replace(">9<", ">0<"), BAD_BOX),
    ("coco", {"image_id": 100, "category_id": 1}, BAD_ROW),
    ("coco", ANNOTATION | {"bbox": [1, 2, 3]}, BAD_ROW),
    ("coco", ANNOTATION | {"bbox": [1, 2, "3_0", 4]}, BAD_ROW),
    ("coco", ANNOTATION | {"bbox": [1, 2, float("nan"), 4]}, BAD_ROW),
    ("coco", ANNOTATION | {"bbox": [30, 30, -20, 10]}, BAD_BOX),
    ("coco", ANNOTATION | {"category_id": 7}, UNKNOWN_CLASS),
    ("coco", ANNOTATION | {"image_id": 7}, ORPHAN),
    ("coco", "box", ORPHAN),  # an annotation of no image is one of a missing image
]


@pytest.mark.parametrize(("form", "row", "kind"), LOST)
def test_a_row_that_is_no_box_is_a_finding_and_a_lost_object(data, form, row, kind):
    lossy(data, form, row)
    index = data.index()
    assert counts(index) == Counts(1, 1, int(kind == ORPHAN), 1)
    assert index.incomplete.tolist() == [kind != ORPHAN]
    (place,) = places(index, kind)
    assert place.startswith({"yolo": "labels/train/x.txt:3", "voc": "voc/x.xml:3", "coco": "a.json"}[form])


def test_an_image_whose_rows_are_all_lost_or_cannot_be_parsed_is_left_out(data):
    """As a background it would teach that its objects are none."""
    data.pairs("train/x", "train/z")
    data.pairs("train/y", rows="0 0.5 0.5 0.2\n" * 3)
    data.file("labels/train/z.txt", b"\xff\xfe0\x00 \x00")
    data.yaml()
    assert told(data.index()) == "images/train/x.png:1 lost 2+3 labels/train/y.txt labels/train/z.txt"
    bomb = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]><annotation>&c;</annotation>'
    for stem, text in {"x": voc(("a", 5, 5, 20, 20)), "y": "<annotation><object>", "z": bomb}.items():
        data.file(f"voc/{stem}.xml", text)
    data.yaml(train="images/train", annotations={"train": "voc"})
    index = data.index()
    assert num_boxes(index) == {"images/train/x.png": 1}
    assert len(places(index, BAD_LABEL)) == 2


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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_voc_is_read_in_the_encoding_it_declares_and_parts_are_no_objects(data, encoding):
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
    text = voc(("ä", 5, 5, 20, 20)).replace("</object>", part)
    data.images("images/train/x.png")
    data.file("voc/x.xml", f'<?xml version="1.0" encoding="{encoding}"?>\n{text}'.encode(encoding))
    data.yaml(train="images/train", names=["ä"], annotations={"train": "voc"})
    assert data.counts() == Counts(1, 1)


def as_text(value: Any) -> Any:
    """Returns JSON content with every number in text but the ids of images, which results repeat."""
    if isinstance(value, dict):
        return {key: item if key in ("images", "image_id") else as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return str(value) if type(value) in (int, float) else value


def test_crowds_areas_and_backgrounds_of_coco_and_numbers_in_text(data):
    """Roboflow writes the width and height of a bbox as text. Images that the JSON does not name are left out."""
    content = coco([("x.png", [(1, 5, 5, 20, 20), (2, 30, 5, 20, 20), (2, 30.25, 5, 20, 2e1)]), ("empty.png", [])])
    content["annotations"][0] |= {"area": 123.5, "iscrowd": 0, "segmentation": [[5, 5, 25, 5, 15, 25]]}
    content["annotations"][1] |= {"area": 400, "iscrowd": 1}
    data.write("images/train/x.png images/train/empty.png images/train/unnamed.png")
    data.file("data.yaml", "train: images/train\nannotations: {train: a.json}\n")
    for text in (content, as_text(content)):
        text["images"][0] |= {"width": "80", "height": "60.0"} if text is not content else {}
        data.file("a.json", text)
        index = data.index()
        assert num_boxes(index) == {"images/train/empty.png": 0, "images/train/x.png": 3}
        assert boxes(index)["x"] == [("a", 5, 5, 20, 20), ("b", 30, 5, 20, 20), ("b", 30.25, 5, 20, 20)]
        assert index.crowd.tolist() == [False, True, False]
        assert index.area_px.tolist() == [123.5, 400, 400]
        assert index.category_ids == (1, 2)
        assert index.report.lost_objects == 0
