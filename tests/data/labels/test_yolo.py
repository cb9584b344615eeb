"""Rows of YOLO txt, compared with simple references: boxes, polygons, and rows that are neither."""

from __future__ import annotations

import math

import numpy as np
import pytest

from data.labels.findings import BAD_ROW, NOT_FINITE, UNKNOWN_CLASS
from data.labels.label_format import LabelRequest
from data.labels.rows import LabelFileError, shape_of
from data.labels.yolo import YOLO, parse_yolo
from data.split_files import FileStamp, ImageFile, LabelFile
from tests.helpers.label_files import label_row, problem_kinds
from tests.helpers.messages import refused


def test_yolo_boxes_and_polygons_are_parsed():
    text = "\ufeff1 0.5 0.5 0.2 0.4\r\n\n0 0.1 0.1 0.5 0.1 0.5 0.5 0.1 0.5\n0.0\t0 0 0.5 0 0 0.5\n"
    raw = parse_yolo(text.encode(), 2)
    assert raw.problems == []
    np.testing.assert_allclose(
        raw.rows,
        [
            label_row(0.4, 0.3, 0.6, 0.7, class_id=1),
            label_row(0.1, 0.1, 0.5, 0.5, number=3),
            label_row(0, 0, 0.5, 0.5, area=0.125, number=4, shape=shape_of([0, 0, 0.5, 0, 0, 0.5])),
        ],
    )


def labels_on_disk(root, rows):
    """YOLO's source of label files of one row each, after an empty one."""
    texts = ["", *("0 " + " ".join(f"{v:.6g}" for v in row) + "\n" for row in rows)]
    files = []
    for i, text in enumerate(texts):
        (root / f"{i}.txt").write_text(text)
        files.append(LabelFile(f"{i}.txt", FileStamp(size=len(text), mtime_ns=0)))
    images = [ImageFile(f"{i}.jpg", name_in_split=f"{i}.jpg", stamp=None) for i in range(len(texts))]
    return YOLO.read(LabelRequest(images=images, files=files, root=root, names=("a",)))


def boxes_in_image(rng, count, longest):
    size = rng.uniform(0.3, 1, (count, 2)) * longest
    return rng.uniform(size / 2, 1 - size / 2), size


def keypoint_rows(keypoints, numbers, count):
    """Rows of a box and keypoints of two or three numbers, without the class."""
    rng = np.random.default_rng(keypoints)
    center, size = boxes_in_image(rng, count, 0.4)
    points = np.full((count, keypoints, numbers), 2.0)
    points[..., :2] = center[:, None] + rng.uniform(-0.5, 0.5, (count, keypoints, 2)) * size[:, None]
    points[1::9] = 0  # objects without labeled keypoints
    return np.concatenate([center, size, points.reshape(count, -1)], 1)


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
    rows = keypoint_rows(keypoints, numbers, count)
    with refused(
        f"1.txt: each row has {message} numbers; only bounding boxes are supported: keep the first 5 fields of each row"
    ):
        labels_on_disk(tmp_path, rows)
    if count > 1:
        labels_on_disk(tmp_path, [*rows[:-1], rows[0, :2]])  # of different lengths


def test_a_few_rows_that_could_be_keypoints_are_polygons(tmp_path):
    """A few polygons can look like keypoints by chance."""
    rows = keypoint_rows(keypoints=4, numbers=2, count=10)
    source = labels_on_disk(tmp_path, rows)
    points = rows.reshape(10, -1, 2)
    corners = [source.read(i).rows[0][1:5] for i in range(1, 11)]
    np.testing.assert_allclose(corners, np.hstack([points.min(1), points.max(1)]), atol=1e-5)


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
    assert problem_kinds(raw.problems) == list(enumerate(expected, 1))
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
