"""Exports of annotation tools, one for each format, that label the same objects in the same images."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from data.dataset.yaml_file import load_dataset_spec
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from tests.helpers.messages import refused
from tools.convert.to_coco import convert

SIZES = {"one.png": (64, 48), "two.png": (80, 60), "three.png": (40, 40)}  # width and height
CREATEML = "_annotations.createml.json"
TRUTH = {
    "one.png": [("cat", 4, 6, 30, 40), ("wild dog", 20, 10, 50, 44)],
    "two.png": [("cat", 0, 0, 80, 60)],
    "three.png": [],
}


def write_cvat(folder: Path) -> None:
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    for number, (name, boxes) in enumerate(TRUTH.items()):
        width, height = SIZES[name]
        image = ElementTree.SubElement(root, "image", id=str(number), name=name, width=str(width), height=str(height))
        for kind, x1, y1, x2, y2 in boxes:
            corners = {"xtl": x1, "ytl": y1, "xbr": x2, "ybr": y2}
            if kind == "cat":
                attributes = {key: f"{value:.2f}" for key, value in corners.items()}
                ElementTree.SubElement(image, "box", {"label": kind} | attributes)
            else:
                points = f"{x1},{y1};{x2},{y1 + 1};{(x1 + x2) / 2},{y2}"
                ElementTree.SubElement(image, "polygon", label=kind, points=points)
    ElementTree.ElementTree(root).write(folder / "annotations.xml")


def write_cvat_video(folder: Path) -> None:
    """Writes a track per object, whose last box says that it has left the image."""
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
        content: dict[str, Any] = {
            "version": "5.4.1",
            "flags": {},
            "shapes": shapes,
            "imagePath": name,
            "imageData": None,
        }
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
    (folder / CREATEML).write_text(json.dumps(entries))


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
    """Writes a JSON per image, in which a space is %20."""
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
    """Writes rows as spreadsheets do in some countries, with a space here and there, and names and lines as on Macs."""
    write_csv(folder)
    text = (folder / "_annotations.csv").read_text().replace(",", ";")
    text = text.replace(";cat;", "; cat ;", 1).replace("one.png", "\u00fcne.png")
    (folder / "_annotations.csv").write_bytes(text.replace("\n", "\r").encode())
    (folder / "one.png").rename(folder / "u\u0308ne.png")


def write_rows(path: Path, rows: list[tuple]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def write_csv(folder: Path) -> None:
    rows: list[tuple] = [(name, *SIZES[name], *box) for name, boxes in TRUTH.items() for box in boxes]
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
    """Writes Open Images as FiftyOne lays it out."""
    write_open_images(folder)
    for name in ("labels", "metadata", "data"):
        (folder / "train" / name).mkdir(parents=True)
    (folder / "train-annotations-bbox.csv").rename(folder / "train" / "labels" / "detections.csv")
    (folder / "class-descriptions-boxable.csv").rename(folder / "train" / "metadata" / "classes.csv")
    for path in folder.glob("*.png"):
        path.rename(folder / "train" / "data" / path.name)


def write_kitti_devkit(folder: Path) -> None:
    """Adds the same numbers in testing, without labels, and files of other kinds that are called like the images."""
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
            shape: dict[str, Any]
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
        rows = [
            f"{kind.replace(' ', '_')} 0.00 0 -1.57 {x1}.00 {y1}.00 {x2}.00 {y2}.00 1.5 1.6 3.7 1.8 1.4 8.4 0.0\n"
            for kind, x1, y1, x2, y2 in boxes
        ]
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
    other = {"names": ["indoors", "outdoors"], "_type": "ClassLabel"}  # a field of the image
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
    """Counts the objects by class and corners in pixels, as training sees them."""
    spec = load_dataset_spec(yaml)
    boxes: Counter[tuple] = Counter()
    for split in spec.splits:
        truth = load_index(spec, split, IndexSettings(progress=False)).ground_truth()
        corners = truth.boxes_xywh_px + np.pad(truth.boxes_xywh_px[:, :2], ((0, 0), (2, 0)))
        for kind, box in zip(truth.classes, corners):
            boxes[spec.names[kind].replace("_", " "), *np.round(box, 2).tolist()] += 1
    return boxes


def check_refusal(folder: Path, message: str, name: str = "auto") -> None:
    """Checks that an export is refused with ``message``, and that nothing is written."""
    with refused(message):
        convert(folder, folder.parent / "out.json", name)
    assert not list(folder.parent.glob("out*"))
