"""Formats of annotation tools, read as ``annotations:`` of a YAML or from a folder: each against boxes written by
hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

from data.findings import BAD_BOX, BAD_ROW, ORPHAN
from data.index import DatasetIndex
from tests.data.data_set import DataSet, boxes, counts, load, num_boxes, open_set, places, refusal, voc

SIZES = {"one é": (48, 64), "two": (60, 80), "three": (40, 40)}
CAT = (4, 6, 26, 34)
DOG = (20, 10, 30, 34)  # a polygon where the format has them
ALL = (0, 0, 80, 60)


def images(export: DataSet) -> None:
    for stem, hw in SIZES.items():
        export.images(f"{stem}.png", hw=hw)


def labelme(export: DataSet) -> None:
    images(export)
    rectangle = {"label": "cat", "points": [[30, 6], [4, 40]], "shape_type": "rectangle"}
    polygon = {"label": "wild dog", "points": [[20, 10], [50, 20], [30, 44]], "shape_type": "polygon"}
    circle = {"label": "cat", "points": [[40, 30], [40, -10]], "shape_type": "circle"}
    for stem, shapes in (("one é", [rectangle, polygon]), ("two", [circle]), ("three", [])):
        export.file(f"{stem}.json", {"shapes": shapes, "imagePath": f"{stem}.png", "imageHeight": None})


def cvat_root() -> tuple[ElementTree.Element, dict[str, ElementTree.Element]]:
    root = ElementTree.Element("annotations")
    named = {}
    for stem, (height, width) in SIZES.items():
        attributes = {"name": f"{stem}.png", "width": str(width), "height": str(height)}
        named[stem] = ElementTree.SubElement(root, "image", attributes)
    return root, named


def cvat(export: DataSet) -> None:
    images(export)
    root, named = cvat_root()
    ElementTree.SubElement(named["one é"], "box", label="cat", xtl="4", ytl="6", xbr="30", ybr="40")
    ElementTree.SubElement(named["one é"], "polygon", label="wild dog", points="20,10;50,20;30,44")
    turned = {"label": "cat", "xtl": "10", "ytl": "-10", "xbr": "70", "ybr": "70", "rotation": "90"}
    ElementTree.SubElement(named["two"], "box", turned)
    export.file("annotations.xml", ElementTree.tostring(root, "unicode"))


def cvat_video(export: DataSet) -> None:
    """Tracks end with a box that is outside: the object has left the image."""
    root = ElementTree.Element("annotations")
    for frame, hw in enumerate(SIZES.values()):
        export.images(f"frame_{frame:06}.png", hw=hw)
    for name, frame, (x, y, w, h) in (("cat", 0, CAT), ("wild dog", 0, DOG), ("cat", 1, ALL)):
        track = ElementTree.SubElement(root, "track", label=name)
        box = dict(zip(("xtl", "ytl", "xbr", "ybr"), map(str, (x, y, x + w, y + h))))
        ElementTree.SubElement(track, "box", box, frame=str(frame), outside="0")
        ElementTree.SubElement(track, "box", box, frame=str(frame + 1), outside="1")
    task = ElementTree.SubElement(ElementTree.SubElement(root, "meta"), "task")
    for name, value in (("size", "10"), ("start_frame", "0"), ("stop_frame", "9")):
        ElementTree.SubElement(task, name).text = value
    export.file("annotations.xml", ElementTree.tostring(root, "unicode"))


CSV_ROWS = (
    "filename,width,height,class,xmin,ymin,xmax,ymax",
    "one é.png,64,48,cat,4,6,30,40",
    "one é.png,64,48,wild dog,20,10,50,44",
    "two.png,80,60,cat,0,0,80,60",
    "three.png,40,40,,,,,",
)


def csv_of_roboflow(export: DataSet) -> None:
    images(export)
    export.file("_annotations.csv", "\n".join(CSV_ROWS))


def via(export: DataSet) -> None:
    images(export)
    rect = {"name": "rect", "x": 4, "y": 6, "width": 26, "height": 34}
    polygon = {"name": "polygon", "all_points_x": [20, 50, 30], "all_points_y": [10, 20, 44]}
    ellipse = {"name": "ellipse", "cx": 40, "cy": 30, "rx": 40, "ry": 30}
    regions = {"one é": [(rect, "cat"), (polygon, "wild dog")], "two": [(ellipse, "cat")], "three": []}
    export.file(
        "via_region_data.json",
        {
            f"{stem}.png1": {
                "filename": f"{stem}.png",
                "size": 1,
                "file_attributes": {},
                "regions": [{"shape_attributes": s, "region_attributes": {"kind": name}} for s, name in of_image],
            }
            for stem, of_image in regions.items()
        },
    )


@pytest.mark.parametrize("write", [labelme, cvat, cvat_video, csv_of_roboflow, via], ids=lambda write: write.__name__)
def test_a_folder_has_the_boxes_of_the_tool(write: Callable[[DataSet], None], tmp_path):
    export = DataSet(tmp_path / "my sét")
    write(export)
    spec = open_set(export.root)
    assert spec.names == ("cat", "wild dog")
    found = list(boxes(load(spec)).values())
    assert sorted(map(sorted, found)) == [[], [("cat", *map(float, ALL))], [("cat", *CAT), ("wild dog", *DOG)]]


def test_a_yaml_names_a_folder_of_labelme(data):
    data.images("images/train/x.png")
    shape = {"label": "b", "points": [[8, 6], [40, 30]], "shape_type": "rectangle"}
    data.file("json/train/x.json", {"shapes": [shape], "imageHeight": 120, "imageWidth": 160})  # of twice the size
    data.yaml(train="images/train", annotations={"train": "json"})
    assert boxes(data.index()) == {"x": [("b", 4, 3, 16, 12)]}


def test_the_box_of_a_mask_of_cvat_is_that_of_its_pixels(tmp_path):
    """CVAT keeps the box that was drawn, which may be larger. Runs of pixels are off and on in turn, row by row."""
    export = DataSet(tmp_path)
    images(export)
    root, named = cvat_root()
    drawn = {"label": "cat", "top": "5"}
    ElementTree.SubElement(named["two"], "mask", drawn, left="10", width="6", height="4", rle="8, 2, 5, 1, 8")
    ElementTree.SubElement(named["two"], "mask", drawn, left="30", width="9", height="9", rle="0, 81")
    ElementTree.SubElement(named["two"], "mask", drawn, left="50", width="2", height="2", rle="4")
    export.file("annotations.xml", ElementTree.tostring(root, "unicode"))
    index = load(export.root)
    assert boxes(index)["two"] == [("cat", 12, 6, 2, 2), ("cat", 30, 5, 9, 9)]
    assert len(places(index, BAD_ROW)) == 1


def test_open_images_has_fractions_names_without_suffix_and_groups(tmp_path):
    export = DataSet(tmp_path)
    images(export)
    rows = ["ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf", "two,/m/01yrx,0,0.5,0,1,0", "two,/m/01yrx,0,1,0,1,1"]
    export.file("train-annotations-bbox.csv", "\n".join([*rows, "three,/m/01yrx,,,,,0", "one é,,,,,,"]))
    index = load(export.root)
    assert index.crowd.tolist() == [False, True]
    assert boxes(index)["two"] == [("/m/01yrx", 0, 0, 40, 60), ("/m/01yrx", 0, 0, 80, 60)]
    assert (index.report.lost_images, index.report.lost_objects) == (1, 1)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("two.png,80,60,cat,9,9,9,30", BAD_BOX),
        ("two.png,80,60,cat,9,9,x,30", BAD_ROW),
        ("two.png,80,60,,9,9,20,30", BAD_ROW),
        ("four.png,80,60,cat,9,9,20,30", ORPHAN),
    ],
)
def test_a_row_of_a_csv_that_is_no_box_is_lost(row, kind, tmp_path):
    export = DataSet(tmp_path)
    images(export)
    export.file("_annotations.csv", "\n".join([*CSV_ROWS, row]))
    index = load(export.root)
    assert counts(index)[:2] == (3, 3)
    assert index.report.lost_objects == 1
    assert len(places(index, kind)) == 1


def test_an_image_whose_shapes_are_all_lost_is_no_background(tmp_path):
    export = DataSet(tmp_path)
    labelme(export)
    export.file("two.json", {"shapes": [{"label": "cat", "points": [[1, 1], [9, 9]], "shape_type": "line"}]})
    assert set(num_boxes(load(export.root))) == {"one é.png", "three.png"}


def via_index(data: DataSet, *regions: tuple[dict, dict], names: list[str]) -> DatasetIndex:
    """Returns the index of two images with the same regions: shapes and attributes."""
    data.images("images/train/x.png", "images/train/y.png")
    listed = [{"shape_attributes": shape, "region_attributes": attributes} for shape, attributes in regions]
    content = {stem: {"filename": f"{stem}.png", "file_attributes": {}, "regions": listed} for stem in "xy"}
    data.file("via.json", content)
    data.yaml(train="images/train", names=names, annotations={"train": "via.json"})
    return data.index()


@pytest.mark.parametrize("degrees", [0, 30, 90, 135])
def test_the_box_of_a_rotated_ellipse_of_via_is_around_its_outline(data, degrees):
    ellipse = {"name": "ellipse", "cx": 40, "cy": 30, "rx": 25, "ry": 5, "theta": np.radians(degrees)}
    outline = cv2.ellipse2Poly((4000, 3000), (2500, 500), degrees, 0, 360, 1) / 100
    index = via_index(data, (ellipse, {}), names=["object"])
    expected = np.r_[outline.min(0), np.ptp(outline, axis=0)]
    np.testing.assert_allclose(index.boxes_xywh_px, [expected, expected], atol=0.1)


RECT = {"name": "rect", "x": 5, "y": 5, "width": 20, "height": 20}


def test_row_numbers_of_via_count_the_regions_of_all_images(data):
    assert via_index(data, (RECT, {}), (RECT | {"x": 30}, {}), names=["object"]).row_number.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({}, "object"),
        ({"k": "cat"}, "cat"),
        ({"k": "cat", "note": ""}, "cat"),
        ({"color": "red", "class": "cat"}, "cat"),
        ({"k": {"cat": True, "dog": False}}, "cat"),
        ({"color": "red", "k": "cat"}, None),
        ({"k": {"cat": True, "dog": True}}, None),
    ],
)
def test_the_class_of_a_region_of_via_is_no_guess(data, attributes, name):
    index = via_index(data, (RECT, attributes), (RECT | {"x": 40}, {"class": "dog"}), names=["cat", "dog", "object"])
    assert [index.names[c] for c in index.classes] == [*([name] if name else []), "dog"] * 2
    assert len(places(index, BAD_ROW)) == (0 if name else 2)


def test_a_row_of_a_csv_without_a_size_has_that_of_its_image(data):
    data.images("images/train/x.png")
    rows = [CSV_ROWS[0], "x.png,,,a,5,5,25,25", "x.png,160,120,a,60,60,100,100", "x.png,,,b,20,20,60,60"]
    data.file("a.csv", "\n".join(rows))
    data.yaml(train="images/train", annotations={"train": "a.csv"})
    assert boxes(data.index())["x"] == [("a", 2.5, 2.5, 10, 10), ("a", 30, 30, 20, 20), ("b", 10, 10, 20, 20)]
    assert data.counts() == (1, 3, 0, 0)


@pytest.mark.parametrize("tool", ["csv", "cvat", "voc"])
def test_a_size_of_zero_is_not_stated(tool, data):
    """As converters of VOC write it, whose tools write zeros."""
    data.images("images/train/x.png")
    labels = {
        "csv": "filename,width,height,class,xmin,ymin,xmax,ymax\nx.png,0,0,a,5,5,25,25",
        "cvat": '<annotations><image name="x.png" height="0" width="80">'
        '<box label="a" xtl="5" ytl="5" xbr="25" ybr="25"/></image></annotations>',
        "voc": voc(("a", 5, 5, 25, 25), hw=(0, 0)),
    }
    name = {"csv": "a.csv", "cvat": "a.xml", "voc": "voc/x.xml"}[tool]
    data.file(name, labels[tool])
    data.yaml(train="images/train", annotations={"train": name.removesuffix("/x.xml")})
    assert boxes(data.index()) == {"x": [("a", 5, 5, 20, 20)]}


DAMAGED = {
    "a.json": b'{"images": [',
    "cvat.xml": b"<annotations><image></annotations>",
    "voc.xml": b"<annotation></annotation>",
    "no_header.csv": b"x.png,10,10,40,40,a\n",
    "via.json": json.dumps({"x": {"file_attributes": {}}}).encode(),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_for_all_images_that_is_damaged_is_refused_with_its_name(data, name):
    data.images("images/train/x.png")
    data.file(name, DAMAGED[name])
    data.yaml(train="images/train", annotations={"train": name})
    assert f"{data.root}/{name}" in refusal(data.index)
