"""CSV files: of Open Images, and with other columns."""

from __future__ import annotations

import json
import re

import pytest

from data.dataset.yaml_file import load_dataset_spec
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from tests.helpers.tool_exports import TRUTH, check_refusal, write_open_images, write_rows
from tools.convert.to_coco import convert
from utils.errors import UserError


def test_groups_of_open_images_are_regions_to_ignore(images, tmp_path):
    write_open_images(images)
    (file,) = (path for path in images.glob("*.csv") if "ImageID" in path.read_text())
    header, first, *rows = file.read_text().splitlines()
    file.write_text("\n".join([f"{header},IsGroupOf", f"{first},1", *(f"{row},0" for row in rows)]))
    assert "1 box around groups: regions to ignore" in convert(images, tmp_path / "out.json")
    index = load_index(load_dataset_spec(tmp_path / "out.yaml"), "train", IndexSettings(progress=False))
    assert index.crowd.sum() == 1
    assert len(index.crowd) == sum(map(len, TRUTH.values()))


@pytest.mark.parametrize(
    "text", ['image_id,width,height,bbox,source\none,64,48,"[4, 6, 26, 34]",x\n', "one.png,4,6,30,40,cat\n"]
)
def test_a_csv_with_other_columns_is_named_with_what_it_needs(text, images):
    """Kaggle's, and rows without a header."""
    (images / "train.csv").write_text(text)
    expected = f"train.csv: begins with {text.splitlines()[0]!r}; a CSV is read if it has a header with filename, class"
    with pytest.raises(UserError, match=re.escape(expected)):
        convert(images, images.parent / "out.json")


@pytest.mark.parametrize(
    ("value", "is_crowd"), [("1", True), ("True", True), ("1.0", True), ("-1", False), ("", False)]
)
def test_flags_of_open_images_are_read_as_tables_write_them(value, is_crowd, images, tmp_path):
    write_rows(
        images / "boxes.csv",
        [("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax", "IsGroupOf"), ("one", "cat", 0, 0.5, 0, 0.5, value)],
    )
    convert(images, tmp_path / "out.json")
    (annotation,) = json.loads((tmp_path / "out.json").read_text())["annotations"]
    assert bool(annotation["iscrowd"]) == is_crowd


@pytest.mark.parametrize(
    ("group", "corner", "message"),
    [
        ("maybe", "0.5", ":2: IsGroupOf: expected 0 or 1, got 'maybe'"),
        ("0", "31", ": has a corner at 31; with a column ImageID, corners are fractions of the image's size; ..."),
    ],
)
def test_rows_of_open_images_that_mean_something_else_are_refused(group, corner, message, images):
    write_rows(
        images / "boxes.csv",
        [("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax", "IsGroupOf"), ("one", "cat", 0, corner, 0, 1, group)],
    )
    check_refusal(images, f"boxes.csv{message}")
