"""`python -m tools.convert`: each format against boxes written by hand, and what it does with a bad export."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index
from tests.helpers.messages import refused
from tools.convert.to_coco import convert

SIZES = {"one é.png": (64, 48), "two.png": (80, 60), "three.png": (40, 40)}  # width and height
CAT = (4, 6, 30, 40)
DOG = (20, 10, 50, 44)  # a polygon where the format has them
GROUP = (0, 0, 80, 60)
NAMES = ("cat", "wild dog")
UNLABELED = "image without labels: 1 image, first "
OPEN_IMAGES = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax", "IsGroupOf")


def write_labelme(folder: Path) -> None:
    rectangle = {"label": "cat", "points": [[30, 6], [4, 40]], "shape_type": "rectangle"}
    polygon = {"label": "wild dog", "points": [[20, 10], [50, 20], [30, 44]], "shape_type": "polygon"}
    circle = {"label": "cat", "points": [[40, 30], [40, 20]], "shape_type": "circle"}
    for name, shapes in (("one é.png", [rectangle, polygon]), ("two.png", [circle]), ("three.png", [])):
        content = {"version": "5", "shapes": shapes, "imagePath": name, "imageHeight": None, "imageWidth": None}
        (folder / name).with_suffix(".json").write_text(json.dumps(content))


def write_cvat(folder: Path) -> None:
    root = ElementTree.Element("annotations")
    images = {}
    for name, (width, height) in SIZES.items():
        attributes = {"name": name, "width": str(width), "height": str(height)}
        images[name] = ElementTree.SubElement(root, "image", attributes, subset="Validation" if "two" in name else "")
    box = {"label": "cat", "xtl": "4", "ytl": "6", "xbr": "30", "ybr": "40"}
    ElementTree.SubElement(images["one é.png"], "box", box)
    ElementTree.SubElement(images["one é.png"], "polygon", label="wild dog", points="20,10;50,20;30,44")
    turned = {"label": "cat", "xtl": "30", "ytl": "28", "xbr": "50", "ybr": "32", "rotation": "90"}
    ElementTree.SubElement(images["two.png"], "box", turned)
    ElementTree.ElementTree(root).write(folder / "annotations.xml", encoding="utf-8")


def write_cvat_video(folder: Path) -> None:
    """Tracks end with a box that is outside: the object has left the image."""
    for frame, name in enumerate(SIZES):
        (folder / name).rename(folder / f"frame_{frame:06}.png")
    root = ElementTree.Element("annotations")
    for name, frame, corners in (("cat", 0, CAT), ("wild dog", 0, DOG), ("cat", 1, GROUP)):
        track = ElementTree.SubElement(root, "track", label=name)
        box = {key: str(value) for key, value in zip(("xtl", "ytl", "xbr", "ybr"), corners)}
        ElementTree.SubElement(track, "box", box, frame=str(frame), outside="0")
        ElementTree.SubElement(track, "box", box, frame=str(frame + 1), outside="1")
    ElementTree.ElementTree(root).write(folder / "annotations.xml")


def write_csv(folder: Path) -> None:
    """Writes what Roboflow and TensorFlow call ``_annotations.csv``."""
    rows = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
    rows += ["one é.png,64,48,cat,4,6,30,40", "one é.png,64,48,wild dog,20,10,50,44", "two.png,80,60,cat,0,0,80,60"]
    (folder / "_annotations.csv").write_text("\n".join(rows))


def write_open_images(folder: Path) -> None:
    """Names have no suffix, corners are fractions, and classes are ids."""
    rows = [
        ("one é", "/m/01yrx", 4 / 64, 30 / 64, 6 / 48, 40 / 48, 0),
        ("one é", "/m/0bt9lr", 20 / 64, 50 / 64, 10 / 48, 44 / 48, 0),
        ("two", "/m/01yrx", 0, 1, 0, 1, 1),
    ]
    text = "\n".join(",".join(map(str, row)) for row in (OPEN_IMAGES, *rows))
    (folder / "train-annotations-bbox.csv").write_text(text)
    (folder / "class-descriptions-boxable.csv").write_text("/m/01yrx,cat\n/m/0bt9lr,wild dog\n")


def hugging_face_rows() -> dict[str, dict]:
    return {
        "one é.png": {"bbox": [[4, 6, 26, 34], [20, 10, 30, 34]], "category": [0, 1], "iscrowd": [0, 0]},
        "two.png": {"bbox": [[0, 0, 80, 60]], "category": [0], "iscrowd": [1]},
        "three.png": {"bbox": [], "category": [], "iscrowd": []},
    }


def write_image_folder(folder: Path) -> None:
    rows = []
    for name, objects in hugging_face_rows().items():
        named = objects | {"category": [NAMES[number] for number in objects["category"]]}
        rows.append(json.dumps({"file_name": name, "objects": named}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))


def write_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = []
    for name, objects in hugging_face_rows().items():
        rows.append({"image": {"bytes": (folder / name).read_bytes(), "path": name}, "objects": objects})
        (folder / name).unlink()
    rows.append(rows[0] | {"objects": None})  # an image that nobody has labeled
    features = {"objects": {"feature": {"category": {"names": list(NAMES), "_type": "ClassLabel"}}}}
    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")


# For each format the last box, and whether it is around a group.
EXPORTS = [
    (write_labelme, (30, 20, 50, 40), False),
    (write_cvat, (38, 20, 42, 40), False),
    (write_cvat_video, GROUP, False),
    (write_csv, GROUP, False),
    (write_open_images, GROUP, True),
    (write_image_folder, GROUP, True),
    (write_parquet, GROUP, True),
]


@pytest.fixture
def export(tmp_path) -> Path:
    folder = tmp_path / "my sét"
    folder.mkdir()
    for name, (width, height) in SIZES.items():
        (folder / name).write_bytes(cv2.imencode(".png", np.full((height, width, 3), 90, np.uint8))[1].tobytes())
    return folder


def digests(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def boxes_of(yaml_file: Path) -> set[tuple]:
    """Returns the boxes as training sees them: class, corners, and whether they are around a group."""
    spec = load_dataset_spec(yaml_file)
    boxes: set[tuple] = set()
    for split in spec.splits:
        index = load_index(spec, split, IndexSettings(progress=False, use_cache=False))
        for number, (x, y, w, h), crowd in zip(index.classes, index.boxes_xywh_px.round(3).tolist(), index.crowd):
            boxes.add((spec.names[number], (x, y, round(x + w, 3), round(y + h, 3)), bool(crowd)))
    return boxes


def images_of(file: Path) -> list[str]:
    return [image["file_name"] for image in json.loads(file.read_text())["images"]]


@pytest.mark.parametrize("place", ["beside", "elsewhere", "inside"])
@pytest.mark.parametrize(("write", "last", "is_group"), EXPORTS, ids=lambda value: getattr(value, "__name__", ""))
def test_boxes_are_those_of_the_export(write, last, is_group, place, export, tmp_path):
    write(export)
    before = digests(export)
    out = {"beside": tmp_path, "elsewhere": tmp_path / "a" / "b", "inside": export}[place] / "out.json"
    convert(export, out)
    assert boxes_of(out.with_suffix(".yaml")) == {
        ("cat", CAT, False),
        ("wild dog", DOG, False),
        ("cat", last, is_group),
    }
    assert before.items() <= digests(tmp_path).items()
    new = [path for path in digests(tmp_path).keys() - before.keys() if "cache" not in path.parts]
    assert all(path.relative_to(out.parent).parts[0].startswith("out") for path in new)


def test_the_box_of_a_mask_is_that_of_its_pixels(export, tmp_path):
    """CVAT keeps the box that was drawn, which may be larger. Runs of pixels are off and on in turn, row by row."""
    root = ElementTree.Element("annotations")
    image = ElementTree.SubElement(root, "image", name="two.png", width="80", height="60")
    drawn = {"label": "cat", "top": "5"}
    ElementTree.SubElement(image, "mask", drawn, left="10", width="6", height="4", rle="8, 2, 5, 1, 8")
    ElementTree.SubElement(image, "mask", drawn, left="30", width="9", height="9", rle="0, 81")
    ElementTree.SubElement(image, "mask", drawn, left="50", width="2", height="2", rle="4")
    ElementTree.ElementTree(root).write(export / "annotations.xml", encoding="utf-8")
    lines = convert(export, tmp_path / "out.json", max_bad=0.5)
    assert boxes_of(tmp_path / "out.yaml") == {("cat", (12, 6, 14, 8), False), ("cat", (30, 5, 39, 14), False)}
    assert any("bad row: 1 object" in line for line in lines)


def test_splits_are_those_of_the_folders_or_of_a_column(export, tmp_path):
    write_cvat(export)
    convert(export, tmp_path / "column.json")
    assert [*load_dataset_spec(tmp_path / "column.yaml").splits] == ["train", "val"]
    write_csv(export)
    for split in ("train", "valid"):
        folder = tmp_path / "all" / split
        folder.mkdir(parents=True)
        for path in [*export.glob("*.png"), *export.glob("*.csv")]:
            (folder / path.name).write_bytes(path.read_bytes())
    convert(tmp_path / "all", tmp_path / "folders.json")
    spec = load_dataset_spec(tmp_path / "folders.yaml")
    counts = {split: load_index(spec, split, IndexSettings(progress=False)).counts() for split in spec.splits}
    assert [(split, count["images"], count["boxes"]) for split, count in counts.items()] == [
        ("train", 2, 3),
        ("val", 2, 3),
    ]


def test_boxes_are_fractions_of_the_size_that_the_export_states(export, tmp_path):
    """Roboflow and TensorFlow state it in each row; the images were resized later."""
    write_csv(export)
    names, *rows = (export / "_annotations.csv").read_text().splitlines()
    doubled = [[cell if not cell.isdecimal() else str(2 * int(cell)) for cell in row.split(",")] for row in rows]
    (export / "_annotations.csv").write_text("\n".join([names, *map(",".join, doubled)]))
    convert(export, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml") == {("cat", CAT, False), ("wild dog", DOG, False), ("cat", GROUP, False)}


BAD_ROWS = [
    ("two.png,80,60,cat,9,9,9,30", "bad box: 1 object"),
    ("two.png,80,60,cat,9,9,x,30", "bad row: 1 object"),
    ("two.png,80,60,,9,9,20,30", "bad row: 1 object"),
    ("four.png,80,60,cat,9,9,20,30", "labels without an image: 1 object"),
]


@pytest.mark.parametrize(("row", "finding"), BAD_ROWS)
def test_what_cannot_be_used_is_counted_and_too_much_is_refused(row, finding, export, tmp_path):
    write_csv(export)
    with open(export / "_annotations.csv", "a") as file:
        file.write(f"\n{row}")
    with refused(f"...{finding}, first {export}/_annotations.csv:5..."):
        convert(export, tmp_path / "out.json")
    assert list(tmp_path.glob("out*")) == []
    lines = convert(export, tmp_path / "out.json", max_bad=0.5)
    assert any(line.startswith(f"{finding}, first {export}/_annotations.csv:5: ") for line in lines)
    assert len(boxes_of(tmp_path / "out.yaml")) == 3


def test_a_row_of_open_images_without_corners_is_a_lost_object(export, tmp_path):
    write_open_images(export)
    with open(export / "train-annotations-bbox.csv", "a") as file:
        file.write("\nthree,/m/01yrx,,,,,0\ntwo,,,,,,")
    lines = convert(export, tmp_path / "out.json", max_bad=0.5)
    assert any(line.startswith(f"bad row: 1 object, first {export}/train-annotations-bbox.csv:5: ") for line in lines)
    assert images_of(tmp_path / "out.json") == ["my sét/one é.png", "my sét/two.png"]


@pytest.mark.parametrize(("last_frame", "backgrounds"), [("9", ["000002"]), ("", [])])
def test_frames_of_a_video_without_a_visible_shape_are_backgrounds(last_frame, backgrounds, export, tmp_path):
    """CVAT's XML states the frames of the task; without them, frames in no track are counted. A frame without shapes
    whose image was not extracted is no loss."""
    write_cvat_video(export)
    root = ElementTree.parse(export / "annotations.xml").getroot()
    for track in root.iter("track"):
        for box in track.findall("box[@frame='2']"):
            track.remove(box)
    task = ElementTree.SubElement(ElementTree.SubElement(root, "meta"), "task")
    for name, value in (("size", "10" if last_frame else ""), ("start_frame", "0"), ("stop_frame", last_frame)):
        ElementTree.SubElement(task, name).text = value
    ElementTree.ElementTree(root).write(export / "annotations.xml")
    lines = convert(export, tmp_path / "out.json")
    names = images_of(tmp_path / "out.json")
    assert names == [f"my sét/frame_{number}.png" for number in ("000000", "000001", *backgrounds)]
    assert any(line.startswith(f"{UNLABELED}{export}/frame_000002.png") for line in lines) == (not backgrounds)


def test_rows_without_objects_are_backgrounds_and_counted(export, tmp_path):
    write_image_folder(export)
    rows = (export / "metadata.jsonl").read_text().splitlines()
    (export / "metadata.jsonl").write_text("\n".join([*rows[:2], '{"file_name": "three.png", "objects": null}']))
    lines = convert(export, tmp_path / "out.json")
    assert any(line.startswith(f"{UNLABELED}{export}/metadata.jsonl:3") for line in lines)
    assert images_of(tmp_path / "out.json") == ["my sét/one é.png", "my sét/three.png", "my sét/two.png"]
    (export / "metadata.jsonl").write_text("\n".join(rows[:2]))
    lines = convert(export, tmp_path / "again.json")
    assert any(line.startswith(f"{UNLABELED}{export}/three.png") for line in lines)


def test_an_image_whose_boxes_are_lost_is_no_background(export, tmp_path):
    write_labelme(export)
    line = {"label": "cat", "points": [[1, 1], [9, 9]], "shape_type": "line"}
    content = json.loads((export / "two.json").read_text()) | {"shapes": [line]}
    (export / "two.json").write_text(json.dumps(content))
    convert(export, tmp_path / "out.json", max_bad=0.5)
    assert images_of(tmp_path / "out.json") == ["my sét/one é.png", "my sét/three.png"]
