"""Formats of annotation tools, read as ``annotations:`` of a YAML or from a folder: each against boxes written by
hand."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data.findings import BAD_BOX, BAD_LABEL, BAD_ROW, ORPHAN
from data.index import DatasetIndex
from tests.data.data_set import DataSet, boxes, counts, load, open_set, places, refusal, told, voc

SIZES = {"one é": (48, 64), "two": (60, 80), "three": (40, 40)}
CAT = (4, 6, 26, 34)
DOG = (20, 10, 30, 34)  # a polygon where the format has them
ALL = (0, 0, 80, 60)
CVAT_BEGIN = """<annotations>
<image name="one é.png" width="64" height="48">
<box label="cat" xtl="4" ytl="6" xbr="30" ybr="40"/>
<polygon label="wild dog" points="20,10;50,20;30,44"/>
</image>
<image name="three.png" width="40" height="40"/>
<image name="two.png" width="80" height="60">
"""
CSV = """filename,width,height,class,xmin,ymin,xmax,ymax
one é.png,64,48,cat,4,6,30,40
one é.png,64,48,wild dog,20,10,50,44
two.png,80,60,cat,0,0,80,60
three.png,40,40,,,,,
"""
TOOLS = {
    "LabelMe": {
        "one é.json": """{"imageHeight": null, "shapes": [
            {"label": "cat", "points": [[30, 6], [4, 40]], "shape_type": "rectangle"},
            {"label": "wild dog", "points": [[20, 10], [50, 20], [30, 44]], "shape_type": "polygon"}]}""",
        "two.json": """{"shapes": [{"label": "cat", "points": [[40, 30], [40, -10]], "shape_type": "circle"}]}""",
        "three.json": """{"shapes": []}""",
    },
    "CVAT": {
        "annotations.xml": f"""{CVAT_BEGIN}
            <box label="cat" xtl="10" ytl="-10" xbr="70" ybr="70" rotation="90"/></image></annotations>"""
    },
    # Tracks end with a box that is outside: the object has left the image.
    "CVAT, video": {
        "annotations.xml": """<annotations>
            <meta><task><size>10</size><start_frame>0</start_frame><stop_frame>9</stop_frame></task></meta>
            <track label="cat"><box frame="0" xtl="4" ytl="6" xbr="30" ybr="40"/>
                <box frame="1" outside="1" xtl="4" ytl="6" xbr="30" ybr="40"/></track>
            <track label="wild dog"><box frame="0" outside="0" xtl="20" ytl="10" xbr="50" ybr="44"/></track>
            <track label="cat"><box frame="1" outside="0" xtl="0" ytl="0" xbr="80" ybr="60"/></track>
            </annotations>"""
    },
    "CSV": {"_annotations.csv": CSV},
    "VIA": {
        "via_region_data.json": """{
            "one é.png1": {"filename": "one é.png", "size": 1, "file_attributes": {}, "regions": [
                {"shape_attributes": {"name": "rect", "x": 4, "y": 6, "width": 26, "height": 34},
                 "region_attributes": {"kind": "cat"}},
                {"shape_attributes": {"name": "polygon", "all_points_x": [20, 50, 30], "all_points_y": [10, 20, 44]},
                 "region_attributes": {"kind": "wild dog"}}]},
            "two.png1": {"filename": "two.png", "file_attributes": {}, "regions": [
                {"shape_attributes": {"name": "ellipse", "cx": 40, "cy": 30, "rx": 40, "ry": 30},
                 "region_attributes": {"kind": "cat"}}]},
            "three.png1": {"filename": "three.png", "file_attributes": {}, "regions": []}}"""
    },
}


def write(export: DataSet, tool: str, **changed: str) -> None:
    """Writes three images and the files of a tool. ``changed``: the content of its only file."""
    for number, (stem, hw) in enumerate(SIZES.items()):
        export.images(f"frame_{number:06}.png" if "video" in tool else f"{stem}.png", hw=hw)
    for name, content in TOOLS[tool].items():
        export.file(name, changed.get("content", content))


@pytest.mark.parametrize("tool", TOOLS)
def test_a_folder_has_the_boxes_of_the_tool(tool, tmp_path):
    export = DataSet(tmp_path / "my sét")
    write(export, tool)
    spec = open_set(export.root)
    assert spec.names == ("cat", "wild dog")
    found = list(boxes(load(spec)).values())
    assert sorted(map(sorted, found)) == [[], [("cat", *map(float, ALL))], [("cat", *CAT), ("wild dog", *DOG)]]


def test_a_yaml_names_a_folder_of_labelme(data):
    """Its stated size is twice the image's. In a folder around others, the format of most files counts."""
    data.images("images/train/x.png")
    shape = {"label": "b", "points": [[8, 6], [40, 30]], "shape_type": "rectangle"}
    data.file("json/train/x.json", {"shapes": [shape], "imageHeight": 120, "imageWidth": 160})
    data.yaml(train="images/train", annotations={"train": "json"})
    assert boxes(data.index()) == {"x": [("b", 4, 3, 16, 12)]}


def test_the_box_of_a_mask_of_cvat_is_that_of_its_pixels(tmp_path):
    """CVAT keeps the box that was drawn, which may be larger. Runs of pixels are off and on in turn, row by row."""
    export = DataSet(tmp_path)
    masks = """<mask label="cat" top="5" left="10" width="6" height="4" rle="8, 2, 5, 1, 8"/>
        <mask label="cat" top="5" left="30" width="9" height="9" rle="0, 81"/>
        <mask label="cat" top="5" left="50" width="2" height="2" rle="4"/></image></annotations>"""
    write(export, "CVAT", content=CVAT_BEGIN + masks)
    index = load(export.root)
    assert boxes(index)["two"] == [("cat", 12, 6, 2, 2), ("cat", 30, 5, 9, 9)]
    assert len(places(index, BAD_ROW)) == 1


def test_open_images_has_fractions_names_without_suffix_and_groups(tmp_path):
    export = DataSet(tmp_path)
    write(export, "LabelMe")
    for path in export.root.glob("*.json"):
        path.unlink()
    rows = """ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf
two,/m/01yrx,0,0.5,0,1,0
two,/m/01yrx,0,1,0,1,1
three,/m/01yrx,,,,,0
one é,,,,,,"""
    export.file("train-annotations-bbox.csv", rows)
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
    write(export, "CSV", content=CSV + row)
    index = load(export.root)
    assert counts(index)[:2] == (3, 3)
    assert index.report.lost_objects == 1
    assert len(places(index, kind)) == 1


def test_an_image_whose_shapes_are_all_lost_is_no_background(tmp_path):
    export = DataSet(tmp_path)
    write(export, "LabelMe")
    export.file("two.json", {"shapes": [{"label": "cat", "points": [[1, 1], [9, 9]], "shape_type": "line"}]})
    index = load(export.root)
    assert set(boxes(index)) == {"one é", "three"}
    assert places(index, BAD_LABEL) == ["two.json"]


def via_index(data: DataSet, *regions: tuple[dict, dict], names: list[str]) -> DatasetIndex:
    """Returns the index of two images with the same regions: shapes and attributes."""
    data.write("images/train/x.png images/train/y.png")
    listed = [{"shape_attributes": shape, "region_attributes": attributes} for shape, attributes in regions]
    content = {stem: {"filename": f"{stem}.png", "file_attributes": {}, "regions": listed} for stem in "xy"}
    data.file("via.json", content)
    data.yaml(train="images/train", names=names, annotations={"train": "via.json"})
    return data.index()


@pytest.mark.parametrize("degrees", [0, 30, 135])
def test_the_box_of_a_rotated_ellipse_of_via_is_around_its_outline(data, degrees):
    ellipse = {"name": "ellipse", "cx": 40, "cy": 30, "rx": 25, "ry": 5, "theta": np.radians(degrees)}
    outline = cv2.ellipse2Poly((4000, 3000), (2500, 500), degrees, 0, 360, 1) / 100
    index = via_index(data, (ellipse, {}), names=["object"])
    expected = np.r_[outline.min(0), np.ptp(outline, axis=0)]
    np.testing.assert_allclose(index.boxes_xywh_px, [expected, expected], atol=0.1)


RECT = {"name": "rect", "x": 5, "y": 5, "width": 20, "height": 20}


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({}, "object"),
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
    assert index.row_number.tolist() == ([0, 1, 2, 3] if name else [1, 3])  # of the regions of all images


ZEROS = {
    "a.csv": "filename,width,height,class,xmin,ymin,xmax,ymax\nx.png,0,0,a,5,5,25,25",
    "a.xml": """<annotations><image name="x.png" height="0" width="80">
        <box label="a" xtl="5" ytl="5" xbr="25" ybr="25"/></image></annotations>""",
    "voc/x.xml": voc(("a", 5, 5, 25, 25), hw=(0, 0)),
}


@pytest.mark.parametrize("name", ZEROS)
def test_a_size_of_zero_is_not_stated(name, data):
    """As converters of VOC write it, whose tools write zeros."""
    data.images("images/train/x.png")
    data.file(name, ZEROS[name])
    data.yaml(train="images/train", annotations={"train": name.removesuffix("/x.xml")})
    assert boxes(data.index()) == {"x": [("a", 5, 5, 20, 20)]}
    assert told(data.index()) == "images/train/x.png:1"


DAMAGED = {
    "cut.json": '{"images": [',
    "list.json": "[]",
    "no_images.json": '{"annotations": [], "categories": []}',
    "no_text.json": b"\xff\xfe\x00",
    "repeated_ids.json": """{"annotations": [], "categories": [],
        "images": [{"id": 1, "file_name": "x.png"}, {"id": 1, "file_name": "y.png"}]}""",
    "no_file_name.json": '{"images": [{"id": 1, "name": "x.png"}], "annotations": [], "categories": []}',
    "category_id.json": '{"images": [], "annotations": [], "categories": [{"id": NaN, "name": "a"}]}',
    "other_images.json": '{"images": [{"id": 1, "file_name": "z.png"}], "annotations": [], "categories": []}',
    "cvat.xml": "<annotations><image></annotations>",
    "voc.xml": "<annotation></annotation>",
    "no_header.csv": "x.png,10,10,40,40,a\n",
    "via.json": '{"x": {"file_attributes": {}}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_for_all_images_that_is_damaged_or_of_other_images_is_refused_with_its_name(data, name):
    data.images("images/train/x.png")
    data.file(name, DAMAGED[name])
    data.yaml(train="images/train", annotations={"train": name})
    assert name in refusal(data.index)
