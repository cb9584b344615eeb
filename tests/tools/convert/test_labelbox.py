"""Labelbox's NDJSON: wrong rows, points and lines."""

from __future__ import annotations

import json

import pytest

from tests.helpers.tool_exports import labelbox_rows
from tools.convert.to_coco import convert
from utils.errors import UserError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row["projects"].update(q=row["projects"]["p"]), ":1: has 2 labels; export one project"),
        (lambda row: of(row)[0].update(polygon=[{"x": 1, "y": 2}]) or of(row)[0].pop("bounding_box"), "with 1 point$"),
        (lambda row: of(row).append({"name": "cat", "annotation_kind": "ImageSegmentationMask", "mask": {"url": "h"}}),
         "ImageSegmentationMask of 'cat' is stored at a URL"),
        (lambda row: row.update(data_row={"row_data": "https://[h/one.png"}), "row_data: malformed URL 'https://.h/one.png'"),
        (lambda row: row.update(data_row={"external_id": ""}), ":1: has no image name"),
        (lambda row: row["projects"]["p"]["labels"][0].update(annotations={"frames": {}}), "objects: must be a list"),
    ],
)  # fmt: skip
def test_wrong_rows_of_labelbox_are_named(change, message, images):
    rows = labelbox_rows()
    change(rows[0])
    (images / "export.ndjson").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=f"export.ndjson:1: .*{message.removeprefix(':1: ')}"):
        convert(images, images.parent / "out.json")


def of(row: dict) -> list[dict]:
    """Returns the objects of a row of Labelbox."""
    return row["projects"]["p"]["labels"][0]["annotations"]["objects"]


def test_points_and_lines_of_labelbox_are_left_out(images, tmp_path):
    rows = labelbox_rows()
    of(rows[0]).append({"name": "cat", "point": {"x": 1, "y": 1}})
    of(rows[0]).append({"name": "cat", "line": [{"x": 1, "y": 1}, {"x": 5, "y": 5}]})
    (images / "export.ndjson").write_text("\n".join(map(json.dumps, rows)))
    assert "no area: point (1), polyline (1)" in " ".join(convert(images, tmp_path / "out.json"))
