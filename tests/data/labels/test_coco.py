"""Annotations of COCO JSON, and files that are unusable or contain something else."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from data.labels.categories import ids_of_classes
from data.labels.clean import clean_rows
from data.labels.coco import read_coco
from data.labels.findings import BAD_ROW, CLIPPED, NOT_FINITE, UNKNOWN_CLASS
from data.labels.rows import row_table
from tests.helpers.label_files import coco_file, label_row, problem_kinds
from tests.helpers.messages import refused


def test_coco_keeps_crowd_area_and_ids(tmp_path):
    annotations = [
        {"id": 40, "image_id": 9, "category_id": 5, "bbox": [1, 2, 10, 20], "area": 77.5, "iscrowd": 0},
        {"id": 41, "image_id": 9, "category_id": 1, "bbox": [1, 2, 10, 20], "iscrowd": 1},
        {"id": 42, "image_id": 9, "category_id": 5, "bbox": [1, 2, 10, 20], "area": True},  # no number
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(coco_file(annotations)))
    file = read_coco(path, ("b", "c", "a"))
    assert ids_of_classes(file.categories, ("b", "c", "a")) == (5, 7, 1)  # 'c' gets an id that the file doesn't use
    (image,) = file.images
    assert (image.file_name, image.image_id, image.labels.size_hw) == ("x.jpg", 9, (100, 200))
    assert image.labels.rows == [
        label_row(1, 2, 11, 22, area=77.5, number=0),
        label_row(1, 2, 11, 22, class_id=2, crowd=1, number=1),
        label_row(1, 2, 11, 22, number=2),
    ]
    assert [r[0] for r in read_coco(path, None).images[0].labels.rows] == [0, 0, 0]


def test_malformed_coco_annotations_are_reported(tmp_path):
    good = {"image_id": 9, "category_id": 1, "bbox": [1, 2, 3, 4]}
    changes = [{"category_id": 5}, {"category_id": 6}, {"category_id": True}, {"iscrowd": "no"}]
    boxes = ([1, 2], None, [1, 2, True, 4], [1, math.nan, 1, 1], [1, 2, 3, 10**400])
    changes += [{"bbox": box} for box in boxes]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(coco_file([*(good | c for c in changes), good | {"image_id": 8}, "x"])))
    file = read_coco(path, ("a",))
    expected = [UNKNOWN_CLASS] * 3 + [BAD_ROW] * 4 + [NOT_FINITE] * 2
    assert problem_kinds(file.images[0].labels.problems) == list(enumerate(expected))
    assert file.images[0].labels.rows == []
    assert [p for p, _ in file.strays] == [9, 10]


def test_coco_boxes_of_huge_integers_are_clipped(tmp_path):
    """The product of their sides is larger than any float."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(coco_file([{"image_id": 9, "category_id": 1, "bbox": [1, 2, 10**200, 10**200]}])))
    (entry,) = read_coco(path, ("a",)).images
    boxes, problems = clean_rows(row_table(0, entry.labels.rows), np.array([[100, 200]]), normalized=False)
    np.testing.assert_array_equal(boxes.boxes_xywh_px, [[1, 2, 199, 98]])
    assert [problem.kind for _, problem in problems] == [CLIPPED]


COCO_TEXT = json.dumps(coco_file([{"id": 1, "image_id": 9, "category_id": 1, "bbox": [1, 2, 30, 40]}]))


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
            json.dumps(coco_file([], images=((1, "a"), (1, "b")))),
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
