"""Exports of annotation tools: every object is a box of the same pixels in the COCO JSON, which trains."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.messages import refused
from tests.helpers.scripts import error_of
from tools.convert.__main__ import main
from tools.convert.formats import FORMATS
from tools.convert.to_coco import convert
from utils.config.tool_settings import ANNOTATION_FORMATS
from utils.errors import UserError

SIZES = {"one.png": (64, 48), "two.png": (80, 60), "three.png": (40, 40)}  # width and height
TRUTH = {
    "one.png": [("cat", 4, 6, 30, 40), ("wild dog", 20, 10, 50, 44)],
    "two.png": [("cat", 0, 0, 80, 60)],
    "three.png": [],
}


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    for name, (width, height) in SIZES.items():
        cv2.imwrite(str(folder / name), np.full((height, width, 3), 90, np.uint8))
    return folder


def write_cvat(folder: Path) -> None:
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    for number, (name, boxes) in enumerate(TRUTH.items()):
        width, height = SIZES[name]
        image = ElementTree.SubElement(root, "image", id=str(number), name=name, width=str(width), height=str(height))
        for kind, x1, y1, x2, y2 in boxes:
            at = {"xtl": x1, "ytl": y1, "xbr": x2, "ybr": y2}
            if kind == "cat":
                ElementTree.SubElement(image, "box", label=kind, **{key: f"{value:.2f}" for key, value in at.items()})
            else:
                points = f"{x1},{y1};{x2},{y1 + 1};{(x1 + x2) / 2},{y2}"
                ElementTree.SubElement(image, "polygon", label=kind, points=points)
    ElementTree.ElementTree(root).write(folder / "annotations.xml")


def write_cvat_video(folder: Path) -> None:
    """A track per object, whose last box says that it has left the image."""
    root = ElementTree.Element("annotations")
    for frame, name in enumerate(TRUTH):
        (folder / name).rename(folder / f"frame_{frame:06}.png")
    (folder / "frame_000002.png").unlink()  # frames without a shape are not in the file
    for number, (frame, box) in enumerate((frame, box) for frame, name in enumerate(TRUTH) for box in TRUTH[name]):
        track = ElementTree.SubElement(root, "track", id=str(number), label=box[0])
        at = {key: str(value) for key, value in zip(("xtl", "ytl", "xbr", "ybr"), box[1:])}
        for number_of_frame, outside in ((frame, "0"), (frame + 1, "1")):
            ElementTree.SubElement(track, "box", at, frame=str(number_of_frame), outside=outside, keyframe="1")
    ElementTree.ElementTree(root).write(folder / "annotations.xml")


def write_labelme(folder: Path) -> None:
    for name, boxes in TRUTH.items():
        shapes = [
            {"label": kind, "points": [[x2, y1], [x1, y2]], "shape_type": "rectangle", "flags": {}}
            for kind, x1, y1, x2, y2 in boxes
        ]
        width, height = SIZES[name]
        content = {"version": "5.4.1", "flags": {}, "shapes": shapes, "imagePath": name, "imageData": None}
        text = json.dumps(content | {"imageHeight": height, "imageWidth": width}, indent=2)
        (folder / name).with_suffix(".json").write_text(text)


def write_createml(folder: Path) -> None:
    entries = []
    for name, boxes in TRUTH.items():
        annotations = [
            {"label": k, "coordinates": {"x": (x1 + x2) / 2, "y": (y1 + y2) / 2, "width": x2 - x1, "height": y2 - y1}}
            for k, x1, y1, x2, y2 in boxes
        ]
        entries.append({"image": name, "annotations": annotations})
    (folder / "_annotations.createml.json").write_text(json.dumps(entries))


def write_vott(folder: Path) -> None:
    assets = {}
    for number, (name, boxes) in enumerate(TRUTH.items()):
        width, height = SIZES[name]
        regions = [
            {"tags": [kind], "boundingBox": {"left": x1, "top": y1, "width": x2 - x1, "height": y2 - y1}}
            for kind, x1, y1, x2, y2 in boxes
        ]
        asset = {"name": name, "path": f"file:/a/{name}", "size": {"width": width, "height": height}}
        assets[f"{number:032x}"] = {"asset": asset, "regions": regions, "version": "2.2.0"}
    (folder / "vott-export.json").write_text(json.dumps({"name": "set", "assets": assets}))


def write_vott_project(folder: Path) -> None:
    """A JSON per image, in which a space is %20."""
    write_vott(folder)
    for key, content in json.loads((folder / "vott-export.json").read_text())["assets"].items():
        name = content["asset"]["name"]
        (folder / name).rename(folder / f"a {name}")
        content["asset"]["name"] = f"a%20{name}"
        (folder / f"{key}-asset.json").write_text(json.dumps(content))
    (folder / "vott-export.json").unlink()


def write_vott_csv(folder: Path) -> None:
    rows = [f'"{name}",{box[1]},{box[2]},{box[3]},{box[4]},"{box[0]}"' for name in TRUTH for box in TRUTH[name]]
    lines = ["\ufeff" + '"image","xmin","ymin","xmax","ymax","label"', *rows, ""]
    (folder / "set-export.csv").write_bytes("\r\n".join(lines).encode())
    (folder / "three.png").unlink()


def write_semicolons(folder: Path) -> None:
    """As spreadsheets write them in some countries, with a space here and there, and names and lines as on Macs."""
    write_csv(folder)
    text = (folder / "_annotations.csv").read_text().replace(",", ";")
    text = text.replace(";cat;", "; cat ;", 1).replace("one.png", "\u00fcne.png")
    (folder / "_annotations.csv").write_bytes(text.replace("\n", "\r").encode())
    (folder / "one.png").rename(folder / "u\u0308ne.png")


def write_rows(path: Path, rows: list[tuple]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def write_csv(folder: Path) -> None:
    rows = [(name, *SIZES[name], *box) for name, boxes in TRUTH.items() for box in boxes]
    rows += [("three.png", *SIZES["three.png"], "", "", "", "", "")]
    write_rows(folder / "_annotations.csv", [("filename", "width", "height", "class", *CORNERS), *rows])


CORNERS = ("xmin", "ymin", "xmax", "ymax")


def write_open_images(folder: Path) -> None:
    ids = {"cat": "/m/01yrx", "wild dog": "/m/0bt9lr"}
    rows = [
        (Path(name).stem, "xclick", ids[kind], 1, x1 / w, x2 / w, y1 / h, y2 / h, 0, 0)
        for name, boxes in TRUTH.items()
        for (w, h) in [SIZES[name]]
        for kind, x1, y1, x2, y2 in boxes
    ]
    header = ("ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax", "IsOccluded", "IsGroupOf")
    write_rows(folder / "train-annotations-bbox.csv", [header, *rows])
    write_rows(folder / "class-descriptions-boxable.csv", [(each, kind) for kind, each in ids.items()])
    (folder / "three.png").unlink()  # Open Images lists only images with objects


def write_fiftyone(folder: Path) -> None:
    """Open Images as FiftyOne lays it out."""
    write_open_images(folder)
    for name in ("labels", "metadata", "data"):
        (folder / "train" / name).mkdir(parents=True)
    (folder / "train-annotations-bbox.csv").rename(folder / "train" / "labels" / "detections.csv")
    (folder / "class-descriptions-boxable.csv").rename(folder / "train" / "metadata" / "classes.csv")
    for path in folder.glob("*.png"):
        path.rename(folder / "train" / "data" / path.name)


def write_kitti_devkit(folder: Path) -> None:
    """The same numbers in testing, without labels, and files of other kinds that are called like the images."""
    write_kitti(folder)
    for name in ("training/image_2", "training/calib", "testing/image_2"):
        (folder / name).mkdir(parents=True)
    (folder / "label_2").rename(folder / "training" / "label_2")
    for path in folder.glob("*.png"):
        (folder / "testing" / "image_2" / path.name).write_bytes(path.read_bytes())
        (folder / "training" / "calib" / path.name).with_suffix(".txt").write_text("P0: 7.07e+02 0 0\n")
        path.rename(folder / "training" / "image_2" / path.name)


def write_image_folder(folder: Path) -> None:
    rows = []
    for name, boxes in TRUTH.items():
        bbox = [[x1, y1, x2 - x1, y2 - y1] for _, x1, y1, x2, y2 in boxes]
        rows.append(json.dumps({"file_name": name, "objects": {"bbox": bbox, "categories": [box[0] for box in boxes]}}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")


def labelbox_rows() -> list[dict]:
    rows = []
    for number, (name, boxes) in enumerate(TRUTH.items()):
        objects = []
        for kind, x1, y1, x2, y2 in boxes:
            if kind == "cat":
                shape = {"bounding_box": {"top": y1, "left": x1, "height": y2 - y1, "width": x2 - x1}}
            else:
                shape = {"polygon": [{"x": x1, "y": y1}, {"x": x2, "y": y1}, {"x": x1, "y": y2}]}
            objects.append({"feature_id": "c", "name": kind, "value": kind, "classifications": [], **shape})
        width, height = SIZES[name]
        label = {"label_kind": "Default", "annotations": {"objects": objects, "classifications": []}}
        rows.append({
            "data_row": {"id": f"r{number}", "external_id": name, "row_data": f"https://storage.example/{number}?s=1"},
            "media_attributes": {"width": width, "height": height, "mime_type": "image/png"},
            "projects": {"p": {"name": "animals", "labels": [label]}},
        })  # fmt: skip
    return rows


def write_labelbox(folder: Path) -> None:
    (folder / "export.ndjson").write_text("".join(json.dumps(row) + "\n" for row in labelbox_rows()))


def write_labelbox_json(folder: Path) -> None:
    """NDJSON that is called JSON; a row that names its image by the address alone, and one that nobody has labeled."""
    rows = labelbox_rows()
    rows[0]["data_row"] = {"id": "r0", "row_data": "https://storage.example/set/one.png?X-Signature=0"}
    rows.append({**rows[1], "projects": {"p": {"labels": []}}})
    (folder / "export.json").write_text("\n".join(map(json.dumps, rows)))


def write_labelbox_list(folder: Path) -> None:
    (folder / "export.json").write_text(json.dumps(labelbox_rows(), indent=1))


def write_kitti(folder: Path) -> None:
    (folder / "label_2").mkdir()
    for name, boxes in TRUTH.items():
        rows = [f"{kind.replace(' ', '_')} 0.00 0 -1.57 {x1}.00 {y1}.00 {x2}.00 {y2}.00 1.5 1.6 3.7 1.8 1.4 8.4 0.0\n"
                for kind, x1, y1, x2, y2 in boxes]  # fmt: skip
        (folder / "label_2" / name).with_suffix(".txt").write_text("".join(rows))


def write_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = ["cat", "wild dog"]
    rows = []
    for name, boxes in TRUTH.items():
        objects = {
            "bbox": [[x1, y1, x2 - x1, y2 - y1] for _, x1, y1, x2, y2 in boxes],
            "category": [names.index(kind) for kind, *_ in boxes],
        }
        rows.append({"image": {"bytes": (folder / name).read_bytes(), "path": name}, "objects": objects})
        (folder / name).unlink()
    other = {"names": ["indoors", "outdoors"], "_type": "ClassLabel"}  # of the image
    features = {"scene": other, "objects": {"feature": {"category": {"names": names, "_type": "ClassLabel"}}}}
    features["weather"] = other
    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")


WRITERS = (
    write_cvat, write_cvat_video, write_labelme, write_createml, write_vott, write_vott_project, write_vott_csv,
    write_csv, write_semicolons, write_open_images, write_fiftyone, write_kitti, write_kitti_devkit,
    write_parquet, write_image_folder, write_labelbox, write_labelbox_json, write_labelbox_list,
)  # fmt: skip


def boxes_of(yaml: Path) -> Counter:
    """Class and corners in pixels of all objects, as training sees them."""
    spec = load_dataset_spec(yaml)
    found = Counter()
    for split in spec.splits:
        truth = load_index(spec, split, IndexSettings(progress=False)).ground_truth()
        corners = truth.boxes_xywh_px + np.pad(truth.boxes_xywh_px[:, :2], ((0, 0), (2, 0)))
        for kind, box in zip(truth.classes, corners):
            found[spec.names[kind].replace("_", " "), *np.round(box, 2).tolist()] += 1
    return found


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_object_is_a_box_of_the_same_pixels(write, images, tmp_path):
    write(images)
    before = {path: path.read_bytes() for path in images.rglob("*") if path.is_file()}
    lines = convert(images, tmp_path / "out" / "coco.json")
    expected = Counter((kind, *map(float, corners)) for boxes in TRUTH.values() for kind, *corners in boxes)
    assert boxes_of(tmp_path / "out" / "coco.yaml") == expected
    assert [line.split()[-2:] for line in lines[2:4]] == [["2", "2"], ["1", "1"]]
    assert {path: path.read_bytes() for path in images.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("inside", [False, True])
def test_paths_may_be_relative(write, inside, images, tmp_path, monkeypatch):
    write(images)
    monkeypatch.chdir(images if inside else tmp_path)
    convert(Path("." if inside else "set"), Path("../coco.json" if inside else "coco.json"))
    assert boxes_of(tmp_path / "coco.yaml").total() == sum(map(len, TRUTH.values()))


def test_splits_are_those_of_the_folders(images, tmp_path):
    """As Roboflow writes them: a file in each of train, valid and test."""
    write_csv(images)
    for split in ("train", "valid"):
        (tmp_path / "all" / split).mkdir(parents=True)
        for path in images.iterdir():
            (tmp_path / "all" / split / path.name).write_bytes(path.read_bytes())
    convert(tmp_path / "all", tmp_path / "coco.json")
    spec = load_dataset_spec(tmp_path / "coco.yaml")
    assert [len(load_index(spec, split, IndexSettings(progress=False)).paths) for split in ("train", "val")] == [3, 3]
    assert (tmp_path / "coco-val.json").is_file()


def test_splits_of_one_folder_become_lists(images, tmp_path):
    write_cvat(images)
    text = (images / "annotations.xml").read_text()
    (images / "annotations.xml").write_text(text.replace('name="two.png"', 'name="two.png" subset="Validation"'))
    convert(images, tmp_path / "coco.json")
    spec = load_dataset_spec(tmp_path / "coco.yaml")
    names = {
        split: [Path(p).name for p in load_index(spec, split, IndexSettings(progress=False)).paths]
        for split in spec.splits
    }
    assert names == {"train": ["one.png", "three.png"], "val": ["two.png"]}


def test_images_of_one_name_are_those_of_the_subset(images, tmp_path):
    """A project of CVAT has a folder per subset, which the names do not have."""
    write_cvat(images)
    for subset in ("Train", "Validation"):
        (images / "images" / subset).mkdir(parents=True)
        (images / "images" / subset / "one.png").write_bytes((images / "one.png").read_bytes())
    (images / "one.png").unlink()
    text = (images / "annotations.xml").read_text().replace('name="two.png"', 'name="one.png" subset="Validation"')
    (images / "annotations.xml").write_text(text.replace('name="one.png" w', 'name="one.png" subset="Train" w', 1))
    convert(images, tmp_path / "coco.json")
    val = json.loads((tmp_path / "coco-val.json").read_text())["annotations"]
    assert [box["bbox"] for box in val] == [[0, 0, 80, 60]]


@pytest.mark.parametrize("name", ["DontCare", "dontcare"])  # the latter in NVIDIA TAO
def test_regions_that_kitti_leaves_out_are_ignored(name, images, tmp_path):
    write_kitti(images)
    with open(images / "label_2" / "one.txt", "a") as file:
        file.write(f"{name} -1 -1 -10 1.00 2.00 9.00 9.00 -1 -1 -1 -1000 -1000 -1000 -10\n")
    assert f"{name}: its boxes are regions to ignore" in convert(images, tmp_path / "coco.json")
    assert load_dataset_spec(tmp_path / "coco.yaml").names == ("cat", "wild_dog")


def test_regions_that_labelme_ignores_are_ignored(images, tmp_path):
    write_labelme(images)
    path = images / "one.json"
    path.write_text(path.read_text().replace("wild dog", "__ignore__"))
    assert "__ignore__: its boxes are regions to ignore" in convert(images, tmp_path / "coco.json")
    assert load_dataset_spec(tmp_path / "coco.yaml").names == ("cat",)


def label_twice_labelme(folder: Path) -> None:
    write_labelme(folder)
    (folder / "old").mkdir()
    (folder / "old" / "one.json").write_text((folder / "one.json").read_text().replace("50", "49"))


def label_twice_kitti(folder: Path) -> None:
    write_kitti(folder)
    (folder / "old").mkdir()
    (folder / "old" / "one.txt").write_text((folder / "label_2" / "one.txt").read_text().replace("50.00", "49.00"))


def label_twice_image_folder(folder: Path) -> None:
    write_image_folder(folder)
    path = folder / "metadata.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[0])


def label_twice_labelbox(folder: Path) -> None:
    rows = labelbox_rows()
    rows[1]["data_row"]["external_id"] = "one.png"
    (folder / "export.ndjson").write_text("\n".join(map(json.dumps, rows)))


def label_twice_createml(folder: Path) -> None:
    write_createml(folder)
    path = folder / CREATEML
    entries = json.loads(path.read_text())
    path.write_text(json.dumps([*entries, entries[0] | {"annotations": []}]))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (label_twice_labelme, "set/one.json: one.png is labeled in .../old/one.json, too"),
        (label_twice_kitti, "set/old/one.txt: one.png is labeled in .../label_2/one.txt, too"),
        (label_twice_image_folder, "metadata.jsonl:4: one.png is labeled in .../metadata.jsonl:1, too"),
        (label_twice_labelbox, "export.ndjson:2: one.png is labeled in .../export.ndjson:1, too"),
        (label_twice_createml, ": entry 3: one.png is labeled in ...: entry 0, too"),
    ],
)
def test_two_entries_that_each_have_all_objects_of_an_image_are_refused(write, message, images):
    write(images)
    check_refusal(images, f"{message}; remove one of them")


def test_shapes_without_an_area_are_counted_by_kind_and_left_out(images, tmp_path):
    write_cvat(images)
    file = images / "annotations.xml"
    text = file.read_text()
    points = '<points label="cat" points="3,4;5,6"/>'
    file.write_text(text.replace("<box ", f'<polyline label="cat" points="1,2;3,4"/>{points}<box ', 1))
    lines = convert(images, tmp_path / "a.json")
    assert f"left out, as they have no area: 1 polyline, 1 points; the first in {file}: image 'one.png'" in lines
    assert load_index(load_dataset_spec(tmp_path / "a.yaml"), "train").report.problems == 0
    file.write_text(text.replace("<box ", "<polyline "))  # of two.png all
    lines = convert(images, tmp_path / "b.json")
    assert f"left out, as they have no area: 2 polyline; the first in {file}: image 'one.png'" in lines
    assert "1 image whose boxes the annotations do not state: left out of training" in lines
    file.write_text(text.replace("<box ", "<polyline ").replace("<polygon ", "<points "))
    check_refusal(
        images,
        "set: 1 file of CVAT without objects; left out, as they have no area: 2 polyline, 1 points; the first in "
        ".../annotations.xml: image 'one.png'",
    )
    file.unlink()
    write_labelme(images)
    file = images / "one.json"
    file.write_text(file.read_text().replace('"rectangle"', '"point"'))
    line = f"left out, as they have no area: 2 point; the first in {file}: shape 0"
    assert line in convert(images, tmp_path / "c.json")


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


CUBOID = {f"{axis}{corner}{face}": 30 * (face - 1) + 10 * (corner[0 if axis == "y" else 1] in "br")
          for axis in "xy" for corner in ("tl", "bl", "tr", "br") for face in (1, 2)}  # fmt: skip


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


def test_boxes_without_an_area_are_counted_and_left_out(images, tmp_path):
    """Training would leave them out, so they do not count as converted; an image with these alone is no background."""
    write_csv(images)
    text = (images / "_annotations.csv").read_text()
    flat = text.replace("three.png,40,40,,,,,", "three.png,40,40,cat,3,3,3,9")
    assert flat != text
    (images / "_annotations.csv").write_text(flat)
    lines = convert(images, tmp_path / "out.json")
    assert f"left out, as they have no area: 1 box; the first in {images / '_annotations.csv'}:5" in lines
    assert lines[2].split() == ["cat", "2", "2"]
    assert len(load_index(load_dataset_spec(tmp_path / "out.yaml"), "train", IndexSettings(progress=False)).paths) == 2


def test_vott_points_and_lines_are_left_out_and_a_region_without_a_tag_is_an_error(images, tmp_path):
    write_vott(images)
    file = images / "vott-export.json"
    content = json.loads(file.read_text())
    three = list(content["assets"].values())[2]
    box = {"left": 3, "top": 3, "width": 9, "height": 9}
    three["regions"] = [{"tags": ["cat"], "type": kind, "boundingBox": box} for kind in ("POLYLINE", "POINT")]
    file.write_text(json.dumps(content))
    assert "no area: 1 polyline, 1 point; the first" in " ".join(convert(images, tmp_path / "out.json"))
    assert boxes_of(tmp_path / "out.yaml").total() == 3
    three["regions"] = [{"tags": [], "type": "RECTANGLE", "boundingBox": box}]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"asset 0{31}2: region 0: has no tag"):
        convert(images, tmp_path / "again.json")


def test_createml_of_apples_documentation(images, tmp_path):
    write_createml(images)
    text = (
        (images / CREATEML).read_text().replace('"annotations"', '"annotation"').replace('"image"', '"imagefilename"')
    )
    (images / CREATEML).write_text(text)
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml").total() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row["projects"].update(q=row["projects"]["p"]), ":1: was labeled 2 times; export one project"),
        (lambda row: of(row)[0].update(polygon=[{"x": 1, "y": 2}]) or of(row)[0].pop("bounding_box"), "with 1 point$"),
        (lambda row: of(row).append({"name": "cat", "annotation_kind": "ImageSegmentationMask", "mask": {"url": "h"}}),
         "ImageSegmentationMask of 'cat' is stored at an address"),
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
    """The objects of a row of Labelbox."""
    return row["projects"]["p"]["labels"][0]["annotations"]["objects"]


def test_points_and_lines_of_labelbox_are_left_out(images, tmp_path):
    rows = labelbox_rows()
    of(rows[0]).append({"name": "cat", "point": {"x": 1, "y": 1}})
    of(rows[0]).append({"name": "cat", "line": [{"x": 1, "y": 1}, {"x": 5, "y": 5}]})
    (images / "export.ndjson").write_text("\n".join(map(json.dumps, rows)))
    assert "no area: 1 point, 1 polyline" in " ".join(convert(images, tmp_path / "out.json"))


UNREAD = {
    "ultralytics.ndjson": ({"type": "dataset", "task": "detect", "class_names": {"0": "a"}}, "Ultralytics' NDJSON"),
    "label-studio.json": ([{"annotations": [{"result": [{"value": {"rectanglelabels": ["a"]}}]}]}], "Label Studio"),
    "via.json": ({"_via_img_metadata": {}}, "VGG Image Annotator"),
    "supervisely.json": ({"objects": [{"classTitle": "a"}]}, "Supervisely"),
    "v7.json": ({"version": "2.0", "schema_ref": "https://x/darwin_json/2.0/schema.json", "annotations": []}, "V7"),
    "datumaro.json": ({"dm_format_version": "1.0", "items": []}, "Datumaro"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_an_export_that_nothing_reads_is_named_by_both_commands(name, images):
    """Neither advises the other: each says what to export instead."""
    content, title = UNREAD[name]
    (images / name).write_text(json.dumps(content))
    for read in (
        lambda: convert(images, images.parent / "out.json"),
        lambda: convert(images / name, images.parent / "out.json"),
        lambda: load_dataset_spec(images / name),
        lambda: load_dataset_spec(images),
    ):
        with pytest.raises(UserError, match=rf"{name}: .*{title}.* instead") as caught:
            read()
        assert "tools.convert" not in str(caught.value)
        assert "--data " not in str(caught.value).replace(f"--data {images}: ", "")


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_an_export_is_not_taken_for_a_yaml(write, images, tmp_path):
    write(images)
    suffixes = (".json", ".ndjson", ".jsonl", ".csv", ".xml", ".parquet")
    file = next((path for path in sorted(images.rglob("*")) if path.suffix in suffixes), None)
    if file is None:
        pytest.skip("KITTI's files are text")
    with pytest.raises(UserError, match=r"not the YAML of a data set; for the export of .*tools.convert"):
        load_dataset_spec(file)
    convert(images, tmp_path / "out" / "coco.json")
    with pytest.raises(UserError, match="a COCO JSON, not the YAML of a data set; name the folder"):
        load_dataset_spec(tmp_path / "out" / "coco.json")


def test_groups_of_open_images_are_regions_to_ignore(images, tmp_path):
    write_open_images(images)
    (file,) = (path for path in images.glob("*.csv") if "ImageID" in path.read_text())
    header, first, *rows = file.read_text().splitlines()
    file.write_text("\n".join([f"{header},IsGroupOf", f"{first},1", *(f"{row},0" for row in rows)]))
    assert "1 box around groups: regions to ignore" in convert(images, tmp_path / "out.json")
    index = load_index(load_dataset_spec(tmp_path / "out.yaml"), "train", IndexSettings(progress=False))
    assert index.crowd.sum() == 1
    assert len(index.crowd) == sum(map(len, TRUTH.values()))


def test_the_yaml_moves_with_its_folder_and_the_command_is_quoted(images, tmp_path, monkeypatch):
    write_createml(images)
    home = tmp_path / "my sets"
    home.mkdir()
    images.rename(home / "set")
    monkeypatch.chdir(home / "set")
    lines = convert(Path("../set"), Path("../set/../out.json"))
    assert lines[-1] == f"train: python train.py --data '{home}/out.yaml'"
    home.rename(tmp_path / "moved")
    content = yaml.safe_load((tmp_path / "moved/out.yaml").read_text())
    assert (content["path"], content["train"]) == (".", "set")
    spec = load_dataset_spec(tmp_path / "moved/out.yaml")
    assert len(load_index(spec, "train", IndexSettings(progress=False))) == len(TRUTH)


def check_refusal(folder: Path, message: str, name: str = "auto") -> None:
    """Checks that an export is refused with ``message``, and that nothing is written."""
    with refused(message):
        convert(folder, folder.parent / "out.json", name)
    assert not list(folder.parent.glob("out*"))


CREATEML = "_annotations.createml.json"
ENTITY = '<!DOCTYPE a [<!ENTITY a "a">]><annotations>'
NO_NAME = "is not the name of a class, which is one line of text"


@pytest.mark.parametrize(
    ("write", "name", "old", "new", "message"),
    [
        (write_cvat, "annotations.xml", "<annotations>", ENTITY, ":1: declares the entity 'a'"),
        (write_cvat, "annotations.xml", "</annotations>", "", ":1: malformed XML (no element found)"),
        (
            write_cvat,
            "annotations.xml",
            "two.png",
            "four.png",
            ": image 'four.png': the image 'four.png': not found below .../set, where images are called like one.png",
        ),
        (write_csv, "_annotations.csv", "64,48,cat,4", "64,48,cat,four", ":2: xmin: expected a number, got 'four'"),
        (write_csv, "_annotations.csv", "64,48,cat,4", "64,48,cat,nan", ":2: xmin: expected a number, got 'nan'"),
        (write_csv, "_annotations.csv", ",30,40", ",30", ":2: 7 fields, expected 8"),
        (
            write_csv,
            "_annotations.csv",
            "cat,4",
            "c" * 140_000 + ",4",
            ":2: malformed CSV (field larger than field limit (131072))",
        ),
        (
            write_csv,
            "_annotations.csv",
            "4,6,30,40",
            "30,6,4,40",
            ":2: 'cat' ends before it begins (x1 y1 x2 y2: 30 6 4 40)",
        ),
        (write_labelme, "one.json", '"label": "cat"', '"label": null', f": '' {NO_NAME}"),
        (write_labelme, "one.json", '"shapes": [', '"shapes": [7, ', ": shape 0: must be 'key: value' lines, got 7"),
        (
            write_vott,
            "vott-export.json",
            '["cat"]',
            '"cat"',
            f": asset {32 * '0'}: region 0: tags: must be a list, got 'cat'",
        ),
        (write_createml, CREATEML, '"x": ', '"u": ', ": entry 0: x: expected a number, got 'None'"),
        (write_createml, CREATEML, '"cat"', '"c\\nat"', f": entry 0: 'c\\nat' {NO_NAME}"),
        (write_labelme, "two.json", '"shapes"', '"forms"', ": shapes: must be a list, got None"),
        (write_createml, CREATEML, '"cat"', '"  "', f": entry 0: '' {NO_NAME}"),
        (
            write_open_images,
            "class-descriptions-boxable.csv",
            "cat",
            "x" * 200_000,
            ": malformed CSV (field larger than field limit (131072))",
        ),
        (write_kitti, "label_2/one.txt", " 8.4 0.0", "", ":1: 13 fields, expected 15 of KITTI, or one more, a score"),
        (
            write_kitti,
            "label_2/one.txt",
            "cat 0",
            "0 2 cat 0",
            ":1: 17 fields, expected 15 of KITTI, or one more, a score",
        ),
        (write_kitti, "label_2/one.txt", "wild_dog", "wild dog", ":2: fields 2 to 4: expected a number, got 'dog'"),
    ],
)
def test_wrong_files_are_named(write, name, old, new, message, images):
    write(images)
    text = (images / name).read_text()
    assert old in text
    (images / name).write_text(text.replace(old, new))
    check_refusal(images, f"set/{name}{message}")


def test_what_it_cannot_tell_is_said(images, tmp_path, capsys):
    check_refusal(
        images,
        "set: no format is recognized; formats are cvat, labelbox, labelme, vott, createml, csv, kitti, huggingface, "
        "imagefolder; if the tool that made it writes YOLO txt, COCO JSON or Pascal VOC, export one of these",
    )
    rows = [("filename", "class", *CORNERS), ("one.png", "cat", 0.1, 0.2, 0.5, 0.9)]
    write_rows(images / "labels.csv", rows)
    check_refusal(
        images, "labels.csv: no corner is above 1; fractions of the image's size are read with a column ImageID"
    )
    (images / "labels.csv").unlink()
    write_csv(images)
    write_labelme(images)
    found = "found: --from csv (_annotations.csv), --from labelme (one.json)"
    check_refusal(images, f"set: has files of several formats; {found}")
    check_refusal(images, f"set: has no file of CVAT; {found}", "cvat")
    convert(images, tmp_path / "out.json", "csv")
    line = error_of(capsys, main, str(images), str(tmp_path / "out.json")).strip()
    assert line == f"error: {tmp_path / 'out.json'}: exists; remove it, or choose another name"


@pytest.mark.parametrize(
    "text", ['image_id,width,height,bbox,source\none,64,48,"[4, 6, 26, 34]",x\n', "one.png,4,6,30,40,cat\n"]
)
def test_a_csv_with_other_columns_is_named_with_what_it_needs(text, images):
    """Kaggle's, and rows without a header."""
    (images / "train.csv").write_text(text)
    expected = f"train.csv: begins with {text.splitlines()[0]!r}; a CSV is read if it has a header with filename, class"
    with pytest.raises(UserError, match=re.escape(expected)):
        convert(images, images.parent / "out.json")


def test_cvat_in_gb2312_is_read(images, tmp_path):
    write_cvat(images)
    text = (images / "annotations.xml").read_text().replace("cat", "猫")
    (images / "annotations.xml").write_bytes(f'<?xml version="1.0" encoding="GB2312"?>\n{text}'.encode("gb2312"))
    convert(images, tmp_path / "out.json")
    assert {name for name, *_ in boxes_of(tmp_path / "out.yaml")} == {"猫", "wild dog"}


@pytest.mark.parametrize("encoding", ["UTF-16", "GBK"])
@pytest.mark.parametrize("write", [write_labelme, write_createml, write_csv, write_labelbox, write_kitti])
def test_files_in_another_encoding_are_named_with_the_encoding(write, encoding, images):
    write(images)
    file = next(path for path in sorted(images.rglob("*")) if path.is_file() and path.suffix != ".png")
    file.write_bytes(file.read_text().replace("cat", "行人车辆").encode(encoding))
    if "行人车辆" not in file.read_bytes().decode(encoding, "replace"):
        file.write_bytes(file.read_bytes() + "行人车辆".encode(encoding.replace("UTF-16", "UTF-16-LE")))
    with pytest.raises(UserError, match=rf"{file.name}: not UTF-8 but, as it seems, {encoding}; save it as UTF-8"):
        convert(images, images.parent / "out.json")


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with refused("a.json: cannot be read (is a pipe or device, not a file)"):
        convert(tmp_path / "a.json", tmp_path / "out.json")


def test_what_a_killed_run_left_is_removed(images, tmp_path, monkeypatch):
    write_csv(images)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr("tools.convert.to_coco._write", lambda *_: os._exit(9))
        convert(images, tmp_path / "out.json")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.glob(".out*"))) == 1
    convert(images, tmp_path / "out.json")
    assert list(tmp_path.glob(".out*")) == []


def test_a_copy_of_the_annotations_does_not_double_the_boxes(images):
    write_cvat(images)
    (images / "annotations (1).xml").write_bytes((images / "annotations.xml").read_bytes())
    check_refusal(
        images,
        "annotations.xml: image 'one.png': one.png has the same box of 'cat' in .../annotations (1).xml too; remove a "
        "file",
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"file_name": "one.png", "objects": {"bbox": [[1, 2, 3, 4]]}}', "1 of 'bbox', but 0 of 'category'"),
        (
            '{"file_name": "one.png", "objects": {"bbox": [1], "label": ["a"]}}',
            "expected a bbox of four numbers, got 1",
        ),
        (
            '{"file_name": "one.png", "objects": {"bbox": [[1, 2, 3, 4]], "label": [-1]}}',
            "label: -1 is not the number of a class",
        ),
        (
            '{"file_name": "one.png", "objects": {"bbox": [[1, 2, 3, 4]], "label": ["a"], "iscrowd": ["x"]}}',
            "iscrowd: expected 0 or 1, got 'x'",
        ),
        ('{"file_name": "one.png", "objects": false}', "objects: must be 'key: value' lines, got False"),
        ('{"file_name": "one.png", "objects": 3}', "objects: must be 'key: value' lines, got 3"),
        ('{"file_name": "one.png"', "malformed JSON"),
        ('{"file_name": "one.jpg"}', "the image 'one.jpg': not found below .../set, but one.png is there"),
    ],
)
def test_wrong_rows_of_an_image_folder_are_named(row, message, images):
    (images / "metadata.jsonl").write_text(row)
    check_refusal(images, f"metadata.jsonl:1: {message}")


def test_a_labelme_file_may_name_its_image_in_another_way(images, tmp_path):
    (images / "one.png").rename(images / "one more.png")
    write_labelme(images)
    path = images / "one.json"
    text = path.read_text().replace("one.png", "..\\\\x\\\\one%20more.png")
    path.rename(images / "One more.json").write_text(text)
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml").total() == sum(map(len, TRUTH.values()))


def unlabel_parquet(folder: Path) -> None:
    write_parquet(folder)
    from pyarrow import Table, parquet

    path = folder / "train-00000-of-00001.parquet"
    table = parquet.read_table(path)
    rows = table.to_pylist()
    rows[1]["objects"] = None
    parquet.write_table(Table.from_pylist(rows, metadata=table.schema.metadata), path)


def unlabel_image_folder(folder: Path, objects: dict | None = None) -> None:
    write_image_folder(folder)
    path = folder / "metadata.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    rows[1] = {"file_name": "two.png"} | (objects or {})
    path.write_text("\n".join(map(json.dumps, rows)))


def unlabel_image_folder_with_nulls(folder: Path) -> None:
    unlabel_image_folder(folder, {"objects": {"bbox": None, "categories": None}})


def unlabel_labelbox(folder: Path) -> None:
    rows = labelbox_rows()
    (label,) = rows[1]["projects"]["p"]["labels"]
    label["annotations"]["objects"] = []
    label["performance_details"] = {"seconds_to_create": 3, "skipped": True}
    (folder / "export.ndjson").write_text("\n".join(map(json.dumps, rows)))


def unlabel_vott(folder: Path) -> None:
    write_vott(folder)
    path = folder / "vott-export.json"
    content = json.loads(path.read_text())
    for asset in content["assets"].values():
        asset["asset"]["state"] = 2 if asset["regions"] else 1
        if asset["asset"]["name"] == "two.png":
            asset["asset"]["state"] = 0
            asset["regions"] = []
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "write",
    [unlabel_parquet, unlabel_image_folder, unlabel_image_folder_with_nulls, unlabel_labelbox, unlabel_vott],
    ids=lambda write: write.__name__,
)
def test_an_image_that_nobody_has_labeled_is_no_background(write, images, tmp_path):
    """In contrast to one with an empty list of objects, three.png."""
    write(images)
    lines = convert(images, tmp_path / "out.json")
    assert "1 image without objects: background" in lines
    assert "1 image whose boxes the annotations do not state: left out of training" in lines
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["images"]) == 2
    assert len(content["annotations"]) == len(TRUTH["one.png"])


@pytest.mark.parametrize(("value", "is_crowd"), [(1, True), (True, True), (0, False), (None, False)])
def test_crowds_of_hugging_face_are_regions_to_ignore(value, is_crowd, images, tmp_path):
    rows = [
        {"file_name": name, "objects": {"bbox": [[1, 2, 30, 20]], "category": ["cat"], "iscrowd": [flag]}}
        for name, flag in (("one.png", value), ("two.png", 0))
    ]
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(images, tmp_path / "out.json")
    annotations = json.loads((tmp_path / "out.json").read_text())["annotations"]
    assert [bool(each["iscrowd"]) for each in annotations] == [is_crowd, False]


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


def test_a_labelme_file_of_another_image_is_refused(images):
    """As after a copy: the boxes would be drawn on the other image, and its own one left out."""
    write_labelme(images)
    (images / "two.json").write_text((images / "one.json").read_text().replace("cat", "dog"))
    check_refusal(images, "two.json: its 'imagePath' is one.png, but an image is called like the file")


def test_two_images_of_one_name_are_told_apart_by_their_folders(images, tmp_path):
    write_cvat(images)
    (images / "b").mkdir()
    (images / "one.png").rename(images / "b" / "one.png")
    cv2.imwrite(str(images / "one.png"), np.zeros((99, 99, 3), np.uint8))
    path = images / "annotations.xml"
    path.write_text(path.read_text().replace("one.png", "b/one.png"))
    convert(images, tmp_path / "out.json")
    entries = json.loads((tmp_path / "out.json").read_text())["images"]
    assert {"b/one.png"} == {entry["file_name"] for entry in entries if entry["file_name"].endswith("one.png")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objects": 7}, "row 0: objects: must be 'key: value' lines, got 7"),
        ({"objects": [1.5]}, "row 0: must be 'key: value' lines, got 1.5"),
        ({"objects": {"bbox": 5, "category": 6}}, "row 0: bbox: must be a list, got 5"),
        ({"objects": {"bbox": [[1, 2, 3, 4]], "category": []}}, "row 0: 1 of 'bbox', but 0 of 'category'"),
        ({"objects": {"bbox": [[1, 2, 3]], "category": [0]}}, "row 0: expected a bbox of four numbers, got [1, 2, 3]"),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [2]}},
            "row 0: category: 2 is not the number of a class; there are 2 classes, numbered from 0",
        ),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [-1]}},
            "row 0: category: -1 is not the number of a class; there are 2 classes, numbered from 0",
        ),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [True]}},
            "row 0: category: expected the name or the number of a class, got True",
        ),
        (
            {"objects": {"bbox": [[1, 2, 3, 4]], "category": [0.5]}},
            "row 0: category: expected the name or the number of a class, got 0.5",
        ),
        ({"objects": None}, "1 file of Hugging Face parquet without objects"),
        ({"image": {"bytes": b"x" * 99}}, "row 0: cannot be decoded (damaged, or not an image)"),
        ({"image": {"bytes": None}}, "row 0: has no bytes of an image"),
        (b"{}{}", "its 'huggingface' metadata is not JSON"),
        (b"[" * 100_000, "its 'huggingface' metadata is not JSON"),
    ],
)
def test_odd_parquet_files_are_named(images, change, message):
    write_parquet(images)
    from pyarrow import Table, parquet

    path = images / "train-00000-of-00001.parquet"
    table = parquet.read_table(path)
    if isinstance(change, bytes):
        table = table.replace_schema_metadata({"huggingface": change})
    else:
        table = Table.from_pylist([row | change for row in table.to_pylist()], metadata=table.schema.metadata)
    parquet.write_table(table, path)
    check_refusal(images, f"...{message}")


@pytest.mark.parametrize("kind", ["zeros", "rows"])
def test_a_parquet_file_that_asks_for_far_more_than_it_has_is_refused(images, kind):
    """50 kB can stand for 1.5 GB in memory, and 18 kB for 200,000 images on the disk. The beginning of the first looks
    like UTF-16."""
    write_parquet(images)
    from pyarrow import Table, parquet

    path = images / "train-00000-of-00001.parquet"
    first = parquet.read_table(path).to_pylist()[0]
    image = {"bytes": bytes(10**7)} if kind == "zeros" else first["image"]
    rows = [first | {"image": image}] * (1 if kind == "zeros" else 5_000)
    parquet.write_table(Table.from_pylist(rows), path, compression="zstd")
    check_refusal(images, "parquet: refused: its images have more than 100 times the bytes of the file")


def test_an_archive_is_to_be_unpacked(tmp_path):
    archive = tmp_path / "export.zip"
    archive.write_bytes(b"PK")
    with pytest.raises(UserError, match=r"export.zip: an archive; unpack it and name the folder"):
        convert(archive, tmp_path / "out.json")


def test_the_flag_names_all_formats():
    assert set(FORMATS) == set(ANNOTATION_FORMATS)
