"""Parsers and common checks, compared with simple scalar references, and signs that labels mean something else."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.categories import Category, id_of_merged_class, ids_of_classes
from data.labels.clean import MIN_SIDE_PX, clean_rows
from data.labels.coco import read_coco
from data.labels.findings import (
    BAD_ROW,
    CLIPPED,
    DUPLICATE,
    MISREAD,
    NO_AREA,
    NOT_FINITE,
    OUTSIDE,
    REVERSED,
    UNKNOWN_CLASS,
)
from data.labels.label_format import CENTERS, CORNERS, TOP_LEFT, LabelRequest
from data.labels.other_formats import format_of_labels
from data.labels.rows import ROW_NUMBER, LabelFileError, row_table, shape_of
from data.labels.voc import VOC, object_names, parse_voc
from data.labels.yolo import YOLO, parse_yolo
from data.source.dataset_yaml import load_dataset_spec
from data.split_files import FileStamp, ImageFile, LabelFile
from engine.report.photos import Album, PhotoFile, Version
from tests.helpers.editable_set import EditableSet
from tests.helpers.html_page import HtmlPage, photos_of
from tests.helpers.messages import refused
from tools.check.checks.scan import scan_dataset, scan_issues
from utils.errors import UserError


def kinds(problems):
    return [(p.row_number, p.kind) for p in problems]


def voc(*objects, size=(100, 200)):
    size = f"<size><width>{size[1]}</width><height>{size[0]}</height><depth>3</depth></size>" if size else ""
    parts = [
        f"<object>\n<name>{name}</name><difficult>1</difficult><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
        f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox>\n<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>\n"
        for name, x1, y1, x2, y2 in objects
    ]
    return f"<annotation>\n<filename>x.jpg</filename>{size}\n{''.join(parts)}</annotation>".encode()


def coco(annotations, categories=((1, "a"), (5, "b")), images=((9, "x.jpg"),)):
    return {
        "images": [{"id": i, "file_name": n, "height": 100, "width": 200} for i, n in images],
        "annotations": annotations,
        "categories": [{"id": i, "name": n} for i, n in categories],
    }


def test_yolo_boxes_and_polygons_are_parsed():
    text = "\ufeff1 0.5 0.5 0.2 0.4\r\n\n0 0.1 0.1 0.5 0.1 0.5 0.5 0.1 0.5\n0.0\t0 0 0.5 0 0 0.5\n"
    raw = parse_yolo(text.encode(), 2)
    assert raw.problems == []
    np.testing.assert_allclose(
        raw.rows,
        [
            (1, 0.4, 0.3, 0.6, 0.7, 0.08, 0, 1, 0),
            (0, 0.1, 0.1, 0.5, 0.5, 0.16, 0, 3, 0),
            (0, 0, 0, 0.5, 0.5, 0.125, 0, 4, shape_of([0, 0, 0.5, 0, 0, 0.5])),
        ],
    )


def labels_on_disk(root, rows):
    """YOLO's source of label files of one row each, after an empty one."""
    texts = ["", *("0 " + " ".join(f"{v:.6g}" for v in row) + "\n" for row in rows)]
    files = []
    for i, text in enumerate(texts):
        (root / f"{i}.txt").write_text(text)
        files.append(LabelFile(f"{i}.txt", FileStamp(len(text), 0)))
    images = [ImageFile(f"{i}.jpg", f"{i}.jpg", FileStamp(1, 0)) for i in range(len(texts))]
    return YOLO.read(LabelRequest(images, files, root, ("a",)))


def boxes_in_image(rng, count, longest):
    size = rng.uniform(0.3, 1, (count, 2)) * longest
    return rng.uniform(size / 2, 1 - size / 2), size


@pytest.mark.parametrize(
    ("keypoints", "numbers", "count", "message"),
    [
        (17, 3, 30, "56 fields, a box and 17 keypoints of 3"),
        (4, 3, 30, "17 fields, a box and 4 keypoints of 3"),
        (4, 3, 1, "17 fields, a box and 4 keypoints of 3"),
        (1, 3, 2, "8 fields, a box and 1 keypoint of 3"),
        (4, 2, 30, "13 fields, a box and 4 keypoints of 2"),
        (1, 2, 30, "7 fields, a box and 1 keypoint of 2"),
        (21, 2, 30, "47 fields, a box and 21 keypoints of 2"),
    ],
)
def test_rows_of_keypoints_are_refused(tmp_path, keypoints, numbers, count, message):
    """With two numbers each, or three and an even number of keypoints, such rows could be polygons."""
    rng = np.random.default_rng(keypoints)
    center, size = boxes_in_image(rng, count, 0.4)
    points = np.full((count, keypoints, numbers), 2.0)
    points[..., :2] = center[:, None] + rng.uniform(-0.5, 0.5, (count, keypoints, 2)) * size[:, None]
    points[1::9] = 0  # objects without labeled keypoints
    rows = np.concatenate([center, size, points.reshape(count, -1)], 1)
    with refused(
        f"1.txt: each row has {message} numbers; only bounding boxes are supported: keep the first 5 fields of each row"
    ):
        labels_on_disk(tmp_path, rows)
    if count > 1:
        labels_on_disk(tmp_path, [*rows[:-1], center[0]])  # of different lengths


@pytest.mark.parametrize("corners", [3, 4, 5, 8, 20])
@pytest.mark.parametrize("longest", [0.03, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("centered", [False, True])
def test_polygons_with_equal_numbers_of_corners_are_no_keypoints(tmp_path, corners, longest, centered):
    rng = np.random.default_rng(corners)
    center, size = boxes_in_image(rng, 60, longest)
    angle = np.sort(rng.uniform(0, 2 * math.pi, (60, corners)), 1)
    circle = np.stack([np.cos(angle), np.sin(angle)], 2) * rng.uniform(0.5, 1, (60, corners, 1))
    points = np.where(centered, 0.5, center)[:, None] + circle * size[:, None] / 2
    points[::7] = points[::7].round()  # whole images, and corners of images
    source = labels_on_disk(tmp_path, points.reshape(60, -1))
    rows = [source.read(i).rows[0] for i in range(1, 61)]
    np.testing.assert_allclose([row[1:5] for row in rows], np.hstack([points.min(1), points.max(1)]), atol=1e-5)


def test_polygon_area_of_a_star_equals_the_sum_of_its_triangles():
    rng = np.random.default_rng(0)
    angle = np.sort(rng.uniform(0, 2 * math.pi, 12))
    radius = rng.uniform(0.1, 1, 12)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    gaps = np.diff(np.append(angle, angle[0] + 2 * math.pi))
    expected = (radius * np.roll(radius, -1) * np.sin(gaps)).sum() / 2
    for each in (points, points[::-1]):
        ((*_, area, _, _, _),) = parse_yolo(" ".join(map(repr, [0, *each.ravel().tolist()])).encode(), 1).rows
        assert area == pytest.approx(expected)


def test_malformed_yolo_rows_are_reported():
    rows = ["0 0.5 0.5 0.1", "0 0.5 0.5 0.1 0.1 0.9", "x 0.5 0.5 0.1 0.1", "0,0.5,0.5,0.1,0.1", "0.5 0.5 0.5 0.1 0.1"]
    rows += ["0 0.5 0.5 0.2 1_0", "0 0.5 0.5 0.2 ٣", "0 0.5 0.5 0.2 ０.５"]  # numbers that only Python accepts
    rows += ["2 0.5 0.5 0.1 0.1", "-1 0.5 0.5 0.1 0.1", "0 nan 0.5 0.1 0.1", "0 0.5 0.5 inf 0.1", "1e999 0 0 1 1"]
    raw = parse_yolo("\n".join(rows).encode(), 2)
    assert raw.rows == []
    expected = [BAD_ROW] * 8 + [UNKNOWN_CLASS] * 2 + [NOT_FINITE] * 3
    assert kinds(raw.problems) == list(enumerate(expected, 1))
    assert [r[0] for r in parse_yolo(b"7 0.5 0.5 0.1 0.1\n99 0.5 0.5 0.2 0.1", None).rows] == [0, 0]
    with refused(
        "not UTF-8 but apparently UTF-16; save it as UTF-8, such as with iconv -f UTF-16 -t UTF-8", LabelFileError
    ):
        parse_yolo(b"\xff\xfe0\0", 2)


@pytest.mark.parametrize(
    ("row", "text"),
    [("0,0.5,0.5,0.1,0.1", "fields are separated by commas"), ("0 0,5 0,5 0,1 0,1", "numbers have commas")],
)
def test_commas_are_explained_by_their_role(row, text):
    (problem,) = parse_yolo(row.encode(), 2).problems
    assert problem.text.startswith(text)


@pytest.mark.parametrize(("number", "shown"), [("99", "99"), ("-1", "-1"), ("1e300", "1e+300"), ("9" * 300, "1e+300")])
def test_a_long_class_number_is_abbreviated(number, shown):
    (problem,) = parse_yolo(f"{number} 0.5 0.5 0.1 0.1".encode(), 2).problems
    assert problem.text == f"class {shown} is not among the classes (0 to 1)"
    (problem,) = parse_yolo(b"0." + b"1" * 300 + b" 0.5 0.5 0.1 0.1", 2).problems
    assert len(problem.text) < 100


def test_voc_objects_are_parsed():
    raw = parse_voc(voc(("b", 10, 20, 30, 60), ("a", "1.5", 2, 3, 4)), {"a": 0, "b": 1})
    assert raw.size_hw == (100, 200)
    assert raw.rows == [(1, 10, 20, 30, 60, 800, 0, 3, 0), (0, 1.5, 2, 3, 4, 3, 0, 6, 0)]
    assert parse_voc(voc(size=("100.0", "200.")), {}).size_hw == (100, 200)
    for size in [(0, 0), (100, 0), (-100, 200), ("100.5", 200), (10**20, 200), ("100,0", 200), ("", "")]:
        assert parse_voc(voc(size=size), {}).size_hw is None
    assert parse_voc(voc(("zebra", 1, 1, 2, 2)), None).rows[0][0] == 0


@pytest.mark.parametrize("tags", [("<objects>", "</objects>"), ("<list><group>", "</group></list>")])
def test_voc_objects_inside_other_elements_are_read(tags):
    data = voc(("b", 10, 20, 30, 60)).decode()
    start, end = data.index("<object>"), data.rindex("</object>") + len("</object>")
    wrapped = (data[:start] + tags[0] + data[start:end] + tags[1] + data[end:]).encode()
    assert parse_voc(wrapped, {"b": 1}) == parse_voc(data.encode(), {"b": 1})
    assert object_names(wrapped) == {"b"}


CORNERS_OF_B = "<xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax>"


@pytest.mark.parametrize(
    "element",
    [
        f"<Item><name>b</name><bndbox>{CORNERS_OF_B}</bndbox></Item>",
        f"<Item><name>b</name><box>{CORNERS_OF_B}</box></Item>",
        f"<objects><Item><name>b</name>{CORNERS_OF_B}</Item></objects>",
        f"<bndbox>{CORNERS_OF_B}</bndbox>",
    ],
)
def test_voc_boxes_of_no_object_are_reported(element):
    """Without them the image would be a background."""
    raw = parse_voc(f"<annotation>\n{element}</annotation>".encode(), {"b": 1})
    assert raw.rows == []
    assert kinds(raw.problems) == [(2, BAD_ROW)]
    assert "with a box where VOC has <object>" in raw.problems[0].text


def test_malformed_voc_objects_are_reported():
    first = [("A", 1), *(("a", value) for value in ("x", "", "1_0", "٣", "nan"))]
    raw = parse_voc(voc(*((name, value, 1, 2, 2) for name, value in first)), {"a": 0})
    assert raw.rows == []
    expected = [UNKNOWN_CLASS, *[BAD_ROW] * 4, NOT_FINITE]
    assert kinds(raw.problems) == list(zip(range(3, 21, 3), expected))
    assert "xmin" in raw.problems[2].text


def test_unknown_classes_are_called_as_in_the_label_file(tmp_path):
    name = "what is not 'known'"
    yolo = parse_yolo(b"7 0.5 0.5 0.2 0.2", 2)
    xml = parse_voc(voc((name, 1, 2, 30, 40)), {"a": 0})
    annotation = {"image_id": 9, "category_id": 1, "bbox": [1, 2, 3, 4]}
    (tmp_path / "a.json").write_text(json.dumps(coco([annotation], [(1, name)])))
    (entry,) = read_coco(tmp_path / "a.json", ("a",)).images
    problems = [labels.problems[0] for labels in (yolo, xml, entry.labels)]
    assert [problem.kind for problem in problems] == [UNKNOWN_CLASS] * 3
    assert [problem.class_name for problem in problems] == ["class 7", name, name]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "1: malformed XML (no element found)"),
        ("<annotation>\n<object>", "2: malformed XML (no element found)"),
        ("<svg></svg>", "1: <svg> where VOC has <annotation>"),
        ("not xml", "1: malformed XML (syntax error)"),
        ('<!DOCTYPE annotation [<!ENTITY e "5">]>VOC', "1: declares the entity 'e'"),
        ('<!DOCTYPE annotation [<!ENTITY e SYSTEM "file:///etc/passwd">]>VOC', "1: declares the entity 'e'"),
        ('<?xml version="1.0" encoding="utf-7"?>VOC', "1: malformed XML (in an encoding that cannot be read)"),
        ('<?xml version="1.0" encoding="nonsense"?>VOC', "1: malformed XML (in an encoding that cannot be read)"),
    ],
)
def test_files_that_are_not_voc_or_have_entities_are_refused(data, message):
    """VOC stands for a valid file."""
    data = data.encode().replace(b"VOC", voc(("a", 1, 2, 30, 40)))
    with refused(message, LabelFileError):
        parse_voc(data, {"a": 0})


@pytest.mark.parametrize("encoding", ["GB2312", "GBK", "Big5", "Shift_JIS", "EUC-KR", "UTF-16", "ISO-8859-1"])
def test_voc_is_read_in_the_encoding_that_it_declares(encoding):
    word = "caf\u00e9" if encoding == "ISO-8859-1" else "車"
    word = "车" if encoding.startswith("GB") else word
    text = f'<?xml version="1.0" encoding="{encoding}"?>' + voc((word, 1, 2, 30, 40)).decode()
    assert object_names(text.encode(encoding)) == {word}
    assert parse_voc(text.encode(encoding), {word: 0}).rows == [(0, 1, 2, 30, 40, 1102, 0, 3, 0)]


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


@pytest.mark.parametrize(("separator", "location"), [("", "a.xml: object 2"), ("\n", "a.xml:3")])
def test_a_row_of_a_file_in_one_line_is_named_by_its_number(tmp_path, separator, location):
    box = "<bndbox><xmin>{}</xmin><ymin>2</ymin><xmax>20</xmax><ymax>30</ymax></bndbox>"
    objects = [f"<object><name>dog</name>{box.format(x1)}</object>" for x1 in (1, "x", 5)]
    (tmp_path / "a.xml").write_text(separator.join(["<annotation>", *objects, "</annotation>"]))
    image = ImageFile("a.png", "a.png", None)
    source = VOC.read(LabelRequest([image], [LabelFile("a.xml", FileStamp(1, 1))], tmp_path, ("dog",)))
    labels = source.read(0)
    assert source.where(0, labels.problems[0].row_number) == location
    assert len({source.where(0, row[ROW_NUMBER - 1]) for row in labels.rows}) == 2


@pytest.mark.parametrize(
    ("ids", "merged"),
    [
        ((18,), 18),  # one class, with its own id
        ((1, 18, 20), 18),  # the smallest with annotations: a root of Roboflow's has none
        ((1, 5), 1),  # none has annotations
        ((101, 99), 99),  # none is in the file
    ],
)
def test_a_merged_class_has_the_id_of_a_class_that_it_merges(ids, merged):
    categories = [Category(i, f"c{i}", is_used=i >= 18) for i in (1, 5, 18, 20)]
    assert id_of_merged_class(categories, ids) == merged
    assert id_of_merged_class([], ids) == min(ids)


def test_coco_keeps_crowd_area_and_ids(tmp_path):
    annotations = [
        {"id": 40, "image_id": 9, "category_id": 5, "bbox": [1, 2, 10, 20], "area": 77.5, "iscrowd": 0},
        {"id": 41, "image_id": 9, "category_id": 1, "bbox": [1, 2, 10, 20], "iscrowd": 1},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(coco(annotations)))
    file = read_coco(path, ("b", "c", "a"))
    assert ids_of_classes(file.categories, ("b", "c", "a")) == (5, 7, 1)  # 'c' gets an id that the file doesn't use
    (image,) = file.images
    assert (image.file_name, image.image_id, image.labels.size_hw) == ("x.jpg", 9, (100, 200))
    assert image.labels.rows == [(0, 1, 2, 11, 22, 77.5, 0, 0, 0), (2, 1, 2, 11, 22, 200, 1, 1, 0)]
    assert [r[0] for r in read_coco(path, None).images[0].labels.rows] == [0, 0]


def test_malformed_coco_annotations_are_reported(tmp_path):
    good = {"image_id": 9, "category_id": 1, "bbox": [1, 2, 3, 4]}
    changes = [{"category_id": 5}, {"category_id": 6}, {"category_id": True}, {"iscrowd": "no"}]
    boxes = ([1, 2], None, [1, 2, True, 4], [1, math.nan, 1, 1], [1, 2, 3, 10**400])
    changes += [{"bbox": box} for box in boxes]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(coco([*(good | c for c in changes), good | {"image_id": 8}, "x"])))
    file = read_coco(path, ("a",))
    expected = [UNKNOWN_CLASS] * 3 + [BAD_ROW] * 4 + [NOT_FINITE] * 2
    assert kinds(file.images[0].labels.problems) == list(enumerate(expected))
    assert file.images[0].labels.rows == []
    assert [p for p, _ in file.strays] == [9, 10]


def clean(*rows, hw=(100, 200), normalized=False):
    boxes, findings = clean_rows(row_table(0, list(rows)), np.array([hw]), normalized)
    return boxes, [problem for _, problem in findings]


def test_coco_boxes_of_huge_integers_are_clipped(tmp_path):
    """The product of their sides is larger than any float."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(coco([{"image_id": 9, "category_id": 1, "bbox": [1, 2, 10**200, 10**200]}])))
    boxes, problems = clean(*read_coco(path, ("a",)).images[0].labels.rows)
    np.testing.assert_array_equal(boxes.boxes_xywh_px, [[1, 2, 199, 98]])
    assert [problem.kind for problem in problems] == [CLIPPED]


def test_boxes_beyond_the_image_are_clipped_and_their_area_is_reduced():
    boxes, findings = clean((0, -10, 0, 10, 10, 100, 0, 1, 0), (0, 0, 0, 200.005, 50, 42, 0, 2, 0))
    np.testing.assert_array_equal(boxes.boxes_xywh_px, [[0, 0, 10, 10], [0, 0, 200, 50]])
    np.testing.assert_array_equal(boxes.area_px, [50, 42])  # the second is only rounded, and its object keeps its area
    assert [(f.row_number, f.kind) for f in findings] == [(1, CLIPPED)]


def test_useless_boxes_are_left_out_and_repetitions_marked():
    rows = [
        (0, 1, 1, 1, 5, 0, 0, 1, 0),
        (0, 5, 5, 5, 1, 0, 0, 2, 0),
        (0, 300, 1, 310, 5, 40, 0, 3, 0),
        (0, 1, 1, 5, 5, 16, 0, 4, 0),
    ]
    boxes, findings = clean(*rows, rows[3], (1, *rows[3][1:]), (*rows[3][:6], 1, 5, 0))
    np.testing.assert_array_equal(boxes.classes, [0, 0, 1, 0])
    np.testing.assert_array_equal(boxes.repeated, [False, True, False, False])
    np.testing.assert_array_equal(boxes.crowd, [False, False, False, True])
    assert sorted((f.row_number, f.kind) for f in findings) == [
        (1, NO_AREA),
        (2, NO_AREA),
        (3, OUTSIDE),
        (4, DUPLICATE),
    ]


def test_equal_boxes_in_two_images_are_not_duplicates():
    row = (0, 1, 1, 5, 5, 16, 0, 1, 0)
    table = np.concatenate([row_table(0, [row]), row_table(2, [row])])
    boxes, findings = clean_rows(table, np.full((3, 2), 10), False)
    np.testing.assert_array_equal(boxes.image, [0, 2])
    assert findings == []
    boxes, findings = clean_rows(row_table(0, []), np.zeros((0, 2), int), True)
    assert (boxes.boxes_xywh_px.shape, findings) == ((0, 4), [])


def reference(rows, height, width):
    """The rules, one row at a time."""
    kept = []
    rows_seen = []
    for c, x1, y1, x2, y2, *_ in rows:
        (x1, x2), (y1, y2) = sorted((x1 * width, x2 * width)), sorted((y1 * height, y2 * height))
        if not (
            x2 - x1 >= MIN_SIDE_PX and y2 - y1 >= MIN_SIDE_PX and math.isfinite(x2 - x1) and math.isfinite(y2 - y1)
        ):
            continue
        a1, a2 = min(max(x1, 0), width), min(max(x2, 0), width)
        b1, b2 = min(max(y1, 0), height), min(max(y2, 0), height)
        if not (a2 - a1 >= MIN_SIDE_PX and b2 - b1 >= MIN_SIDE_PX):
            continue
        kept.append((c, a1, b1, a2 - a1, b2 - b1, (c, x1, y1, x2, y2) in rows_seen))
        rows_seen.append((c, x1, y1, x2, y2))
    return np.array(kept).reshape(-1, 6)


@pytest.mark.parametrize("seed", range(20))
def test_random_rows_equal_the_scalar_reference_and_stay_inside_the_image(seed):
    rng = np.random.default_rng(seed)
    pool = [-1e300, -1.0, -0.1, 0.0, 1e-7, 0.25, 0.5, 0.999999, 1.0, 1.2, 7.0, 1e300]
    rows = [f"{rng.integers(3)} " + " ".join(f"{v:g}" for v in rng.choice(pool, 4)) for _ in range(300)]
    raw = parse_yolo("\n".join(rows).encode(), 3)
    assert len(raw.rows) == 300
    boxes, findings = clean_rows(row_table(0, raw.rows), np.array([[120, 90]]), True)
    expected = reference(raw.rows, 120.0, 90.0)
    np.testing.assert_array_equal(boxes.classes, expected[:, 0])
    np.testing.assert_array_equal(boxes.boxes_xywh_px, expected[:, 1:5])
    np.testing.assert_array_equal(boxes.repeated, expected[:, 5])
    lost = [f for _, f in findings if f.kind not in (CLIPPED, DUPLICATE, REVERSED)]
    assert len(boxes.image) + len(lost) == 300  # nothing is dropped silently
    assert np.isfinite(boxes.area_px).all()
    assert (boxes.boxes_xywh_px[:, :2] >= 0).all()
    assert (boxes.boxes_xywh_px[:, :2] + boxes.boxes_xywh_px[:, 2:] <= [90, 120]).all()


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("<xmin>1</xmin>", "<xmin>1</xmin><xmin>9</xmin>", "two <xmin>"),
        ("<name>a</name>", "<name>a</name><name>b</name>", "two <name>"),
        ("<xmin>1</xmin>", "<xmin>1<b/>2</xmin>", "<b> inside <xmin>"),
        ("<bndbox>", "<bndbox></bndbox><bndbox>", "two <bndbox>"),
    ],
)
def test_ambiguous_voc_objects_are_bad_rows(old, new, what):
    data = voc(("a", 1, 2, 30, 40)).decode().replace(old, new, 1).encode()
    labels = parse_voc(data, {"a": 0, "b": 1})
    assert labels.rows == []
    assert what in labels.problems[0].text


COCO_TEXT = json.dumps(coco([{"id": 1, "image_id": 9, "category_id": 1, "bbox": [1, 2, 30, 40]}]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n\n,}", "a.json:3: malformed JSON (...)"),
        ("[]", "a.json: not a COCO JSON: expected images, annotations and categories"),
        ('{"images": []}', "a.json: has no list 'annotations'; is it a COCO JSON for detection?"),
        (
            '{"images": [{"id": 1}], "annotations": [], "categories": []}',
            'a.json: images[0]: expected an image with id and file_name, got {"id": 1}',
        ),
        (
            json.dumps(coco([], images=((1, "a"), (1, "b")))),
            "a.json: images[1]: has the id 1 of images[0]; ids must be unique",
        ),
        (COCO_TEXT.replace('"bbox":', '"bbox": [5, 6, 7, 8], "bbox":'), "a.json: malformed JSON (...)"),
        (COCO_TEXT.replace("[1, 2, 30, 40]", f"[1, 2, 30, {'5' * 5000}]"), "a.json: malformed JSON (...)"),
        (COCO_TEXT.replace('{"id": 5', '{"id": 1'), "a.json: categories[1]: has the id 1 of 'a'; ids must be unique"),
        (COCO_TEXT.replace('"id": 9', '"id": true'), "a.json: images[0]: id true is neither an integer nor a string"),
        (COCO_TEXT.replace('"name": "b"', '"name": null'), "a.json: categories[1]: name null is not a string"),
        ("\0" * 5000 + COCO_TEXT, "a.json: not a COCO JSON: expected images, annotations and categories"),
        (None, "a.json: no such file"),
    ],
    ids=range(12),
)
def test_ambiguous_files_and_those_that_are_not_coco_are_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with refused(message):
        read_coco(tmp_path / "a.json", ("a", "b"))


@pytest.fixture
def data(tmp_path: Path) -> EditableSet:
    return EditableSet(tmp_path / "set")


def advice_of(data: EditableSet, tmp_path: Path, caplog, **options) -> str:
    """The warning of training, besides that of the gate, which a cached index gives too, and the issue of a check."""
    logger = logging.getLogger("lockstep")
    spec = load_dataset_spec(data.yaml)
    messages = []
    logger.propagate = True
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lockstep"):
            index = load_index(
                spec, "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False, **options)
            )
        messages += [text for text in caplog.messages if "decod" not in text and "can't be used" not in text]
    logger.propagate = False
    (split,) = scan_dataset(spec, ("train",), workers=0)
    found = [issue.text for issue in scan_issues(split) if issue.kind == MISREAD]
    assert messages == [f"train: {text}" for text in found * 2]
    assert sum(MISREAD in line for line in index.report.lines) == len(found)  # which report.html lists
    return "".join(found)


def boxes(seed: int = 0, count: int = 40) -> np.ndarray:
    """Corners of boxes all over an image, as fractions."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 0.6, (count, 2))
    return np.c_[low, low + rng.uniform(0.05, 0.4, (count, 2))]


WRITTEN = {
    CENTERS: lambda c: np.c_[(c[:, :2] + c[:, 2:]) / 2, c[:, 2:] - c[:, :2]],
    TOP_LEFT: lambda c: np.c_[c[:, :2], c[:, 2:] - c[:, :2]],
    CORNERS: lambda c: c,
}


@pytest.mark.parametrize("notation", WRITTEN)
def test_another_notation_of_yolo_txt_is_named(data, tmp_path, caplog, notation):
    rows = WRITTEN[notation](boxes())
    for i in range(4):
        text = "".join(f"0 {' '.join(f'{v:.6f}' for v in row)}\n" for row in rows[i::4])
        data.write(f"train/{i}", text)
    advice = advice_of(data, tmp_path, caplog, max_bad=1.0)
    assert advice.endswith(f"do as {notation}: convert them to {CENTERS}") if notation != CENTERS else advice == ""
    assert ("of 40 boxes do not fit into their images as cx cy w h, but all do" in advice) == (notation != CENTERS)


@pytest.mark.parametrize("notation", [CENTERS, TOP_LEFT])
def test_another_notation_of_voc_is_named(data, tmp_path, caplog, notation):
    (data.root / "voc").mkdir()
    numbers = WRITTEN[notation](boxes()) * [160, 128, 160, 128]
    tags = ("xmin", "ymin", "xmax", "ymax")
    for i in range(4):
        rows = ("".join(f"<{t}>{v:.3f}</{t}>" for t, v in zip(tags, row)) for row in numbers[i::4])
        objects = "".join(f"<object><name>cat</name><bndbox>{row}</bndbox></object>\n" for row in rows)
        (data.root / "voc" / f"{i}.xml").write_text(f"<annotation>\n{objects}</annotation>")
    content = {"train": "images/train", "names": ["cat"], "annotations": {"train": "voc"}}
    data.yaml.write_text(yaml.safe_dump(content))
    assert f"all do as {notation}: convert them to {CORNERS}" in advice_of(data, tmp_path, caplog, max_bad=1.0)


def test_class_ids_that_start_at_1_get_advice(data, tmp_path, caplog):
    for i in range(4):
        data.write(f"train/{i}", "1 0.3 0.3 0.3 0.3\n2 0.7 0.7 0.2 0.2\n")
    advice = advice_of(data, tmp_path, caplog, max_bad=0.5)
    assert advice.startswith(
        "the class ids seem to start at 1 (4 rows of class 2, none of class 0); YOLO's start at 0: "
    )
    data.describe(["unused", "cat", "dog"])
    assert advice_of(data, tmp_path, caplog) == ""
    data.describe(["cat", "dog"])
    with refused(
        "set/data.yaml: 'train': 4 of 8 labeled objects can't be used (--max-bad is 0.1): unknown class: "
        "4 objects, first labels/train/0.txt:2: class 2 is not among the classes (0 to 1); the class ids "
        "seem to start at 1 (4 rows of class 2, none of class 0); YOLO's start at 0: subtract 1 from the "
        "first number of each row, or put an unused name before the others in 'names'; report: ..."
    ):  # half of the objects have no name
        load_index(
            load_dataset_spec(data.yaml), "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False)
        )
    data.write("train/0", "0 0.3 0.3 0.3 0.3\n2 0.7 0.7 0.2 0.2\n")  # a typing error
    assert advice_of(data, tmp_path, caplog, max_bad=0.5) == ""
    data.describe(["cat"])
    for i in range(4):
        data.write(f"train/{i}", "1 0.3 0.3 0.3 0.3\n")
    with refused(
        "set/data.yaml: the names don't match the labels: 4 of 4 objects in 'train' have a class that is "
        "not in 'names' (first: labels/train/0.txt:1: class 1 is not among the classes (0 to 0)); "
        "the class ids seem to start at 1 (4 rows of class 1, none of class 0); YOLO's start at 0: "
        "subtract 1 from the first number of each row, or put an unused name before the others in 'names'"
    ):  # most objects have no name
        load_index(
            load_dataset_spec(data.yaml), "train", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False)
        )


@pytest.mark.parametrize(
    ("bits", "declared", "is_dark"), [(12, 8, True), (12, 12, False), (16, 8, False), (10, 16, True)]
)
def test_16_bit_files_of_fewer_bits_are_told_to_name_them(data, tmp_path, caplog, bits, declared, is_dark):
    rng = np.random.default_rng(0)
    for i in range(4):
        image = rng.integers(0, 1 << bits, (128, 160, 3), dtype=np.uint16)
        data.image(f"train/{i}").write_bytes(cv2.imencode(".png", image)[1].tobytes())
    with open(data.yaml, "a") as file:
        file.write(f"bits: {declared}\n")
    advice = advice_of(data, tmp_path, caplog)
    assert (f"write 'bits: {bits}' in the data set's YAML" in advice) == is_dark
    source = PhotoFile(str(data.image("train/0")), 128, 160)
    (picture,) = Album(max_bytes=100_000).pictures(source, source.whole(), 160, Version("photo", "photo", ()))
    assert photos_of(HtmlPage(picture.picture))["photo"].max() > 200


@pytest.mark.parametrize(
    "text", ["1" + (" " * 800 + "1") * 4 + "x", "1" + ", 1" * 1300 + "x", '{"shapes":' + "[" * 4000]
)
def test_files_are_recognized_in_linear_time(text):
    began = time.process_time()
    assert format_of_labels(text.encode()) == ""
    assert time.process_time() - began < 5
