"""CVAT's XML: shapes, classes and encodings."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.helpers.tool_exports import boxes_of, write_cvat
from tools.convert.to_coco import convert
from utils.errors import UserError

CUBOID = {
    f"{axis}{corner}{face}": 30 * (face - 1) + 10 * (corner[0 if axis == "y" else 1] in "br")
    for axis in "xy"
    for corner in ("tl", "bl", "tr", "br")
    for face in (1, 2)
}


@pytest.mark.parametrize(
    ("element", "attributes"),
    [("cuboid", CUBOID), ("ruler", {"points": "0,0;40,0;40,40"}), ("cuboid", {"points": "0,0;40,0;40,40"})],
)
def test_cvat_shapes_of_three_points_or_more_are_polygons(element, attributes, images, tmp_path):
    write_cvat(images)
    tree = ElementTree.parse(images / "annotations.xml")
    empty = tree.getroot().findall("image")[2]
    ElementTree.SubElement(empty, element, label="dog", **{key: str(value) for key, value in attributes.items()})
    tree.write(images / "annotations.xml")
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml")["dog", 0, 0, 40, 40] == 1


@pytest.mark.parametrize("element", ["box", "polygon"])
def test_a_cvat_shape_without_a_class_is_an_error(element, images):
    write_cvat(images)
    tree = ElementTree.parse(images / "annotations.xml")
    at = {"xtl": "1", "ytl": "1", "xbr": "9", "ybr": "9", "points": "1,1;9,1;9,9"}
    ElementTree.SubElement(tree.getroot().findall("image")[2], element, at)
    tree.write(images / "annotations.xml")
    with pytest.raises(UserError, match=r"image 'three\.png': '' is not the name of a class"):
        convert(images, images.parent / "out.json")


def test_cvat_in_gb2312_is_read(images, tmp_path):
    write_cvat(images)
    text = (images / "annotations.xml").read_text().replace("cat", "猫")
    (images / "annotations.xml").write_bytes(f'<?xml version="1.0" encoding="GB2312"?>\n{text}'.encode("gb2312"))
    convert(images, tmp_path / "out.json")
    assert {name for name, *_ in boxes_of(tmp_path / "out.yaml")} == {"猫", "wild dog"}
