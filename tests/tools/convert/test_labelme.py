"""LabelMe's JSON files: shapes, regions to ignore, and how they name their image."""

from __future__ import annotations

import json

import pytest

from data.dataset.yaml_file import load_dataset_spec
from tests.helpers.tool_exports import TRUTH, boxes_of, check_refusal, write_labelme
from tools.convert.to_coco import convert
from utils.errors import UserError


def test_regions_that_labelme_ignores_are_ignored(images, tmp_path):
    write_labelme(images)
    path = images / "one.json"
    path.write_text(path.read_text().replace("wild dog", "__ignore__"))
    assert "__ignore__: its boxes are regions to ignore" in convert(images, tmp_path / "coco.json")
    assert load_dataset_spec(tmp_path / "coco.yaml").names == ("cat",)


CORNERS_OF_TWO = [[0, 0], [80, 0], [80, 60], [0, 60]]  # the box of two.png


@pytest.mark.parametrize(
    "kind", ["polygon", "rotation", "quadrilateral", "cuboid", "oriented_rectangle", "brush", None]
)
def test_labelme_shapes_of_three_points_or_more_are_polygons(kind, images, tmp_path):
    """X-AnyLabeling has types of its own."""
    write_labelme(images)
    content = json.loads((images / "two.json").read_text())
    content["shapes"][0] |= {"points": CORNERS_OF_TWO, "shape_type": kind}
    (images / "two.json").write_text(json.dumps(content))
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml")["cat", 0, 0, 80, 60] == 1


@pytest.mark.parametrize(
    ("kind", "count"), [("rotation", 2), ("polygon", 2), ("rectangle", 1), ("circle", 1), ("brush", 2)]
)
def test_a_labelme_shape_that_cannot_be_read_is_an_error(kind, count, images):
    write_labelme(images)
    content = json.loads((images / "two.json").read_text())
    content["shapes"][0] |= {"points": CORNERS_OF_TWO[:count], "shape_type": kind}
    (images / "two.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"two.json: shape 0: a {kind} of 'cat' with {count} points?$"):
        convert(images, images.parent / "out.json")


def test_a_labelme_file_may_name_its_image_in_another_way(images, tmp_path):
    (images / "one.png").rename(images / "one more.png")
    write_labelme(images)
    path = images / "one.json"
    text = path.read_text().replace("one.png", "..\\\\x\\\\one%20more.png")
    path.rename(images / "One more.json").write_text(text)
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml").total() == sum(map(len, TRUTH.values()))


def test_a_labelme_file_of_another_image_is_refused(images):
    """After such a copy, the boxes would be drawn on the other image, and their own image left out."""
    write_labelme(images)
    (images / "two.json").write_text((images / "one.json").read_text().replace("cat", "dog"))
    check_refusal(images, "two.json: its 'imagePath' is one.png, but another image has the name of this file")
