"""Checks of boxes that all formats share, compared with a scalar reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from data.labels.clean import MIN_SIDE_PX, CleanBoxes, clean_rows
from data.labels.findings import CLIPPED, DUPLICATE, NO_AREA, OUTSIDE, REVERSED
from data.labels.rows import LabelRow, RowProblem, row_table
from data.labels.yolo import parse_yolo
from tests.helpers.label_files import label_row, problem_kinds


def clean(rows: list[LabelRow]) -> tuple[CleanBoxes, list[RowProblem]]:
    """Cleans the rows, in pixels, of an image of 200x100."""
    boxes, problems = clean_rows(row_table(0, rows), np.array([[100, 200]]), normalized=False)
    return boxes, [problem for _, problem in problems]


def test_boxes_beyond_the_image_are_clipped_and_their_area_is_reduced():
    beyond = label_row(-10, 0, 10, 10, area=100, number=1)
    rounded = label_row(0, 0, 200.005, 50, area=42, number=2)
    boxes, problems = clean([beyond, rounded])
    np.testing.assert_array_equal(boxes.boxes_xywh_px, [[0, 0, 10, 10], [0, 0, 200, 50]])
    np.testing.assert_array_equal(boxes.area_px, [50, 42])  # the object of the second keeps its area
    assert problem_kinds(problems) == [(1, CLIPPED)]


def test_useless_boxes_are_left_out_and_repetitions_marked():
    box = (1, 1, 5, 5)
    boxes, problems = clean(
        [
            label_row(1, 1, 1, 5, number=1),
            label_row(5, 5, 5, 1, number=2),
            label_row(300, 1, 310, 5, number=3),
            label_row(*box, number=4),
            label_row(*box, number=5),
            label_row(*box, number=6, class_id=1),
            label_row(*box, number=7, crowd=1),
        ]
    )
    np.testing.assert_array_equal(boxes.classes, [0, 0, 1, 0])
    np.testing.assert_array_equal(boxes.repeated, [False, True, False, False])
    np.testing.assert_array_equal(boxes.crowd, [False, False, False, True])
    assert sorted(problem_kinds(problems)) == [(1, NO_AREA), (2, NO_AREA), (3, OUTSIDE), (5, DUPLICATE)]


def test_equal_boxes_in_two_images_are_not_duplicates():
    row = label_row(1, 1, 5, 5)
    table = np.concatenate([row_table(0, [row]), row_table(2, [row])])
    boxes, problems = clean_rows(table, np.full((3, 2), 10), normalized=False)
    np.testing.assert_array_equal(boxes.image, [0, 2])
    assert problems == []


def test_a_split_without_rows_has_no_boxes():
    boxes, problems = clean_rows(row_table(0, []), np.zeros((0, 2), int), normalized=True)
    assert (boxes.boxes_xywh_px.shape, problems) == ((0, 4), [])


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
    boxes, findings = clean_rows(row_table(0, raw.rows), np.array([[120, 90]]), normalized=True)
    expected = reference(raw.rows, 120.0, 90.0)
    np.testing.assert_array_equal(boxes.classes, expected[:, 0])
    np.testing.assert_array_equal(boxes.boxes_xywh_px, expected[:, 1:5])
    np.testing.assert_array_equal(boxes.repeated, expected[:, 5])
    lost = [f for _, f in findings if f.kind not in (CLIPPED, DUPLICATE, REVERSED)]
    assert len(boxes.image) + len(lost) == 300  # nothing is dropped silently
    assert np.isfinite(boxes.area_px).all()
    assert (boxes.boxes_xywh_px[:, :2] >= 0).all()
    assert (boxes.boxes_xywh_px[:, :2] + boxes.boxes_xywh_px[:, 2:] <= [90, 120]).all()
