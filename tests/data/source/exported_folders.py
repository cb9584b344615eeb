"""Writes a data set as annotation tools export it, without a YAML."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec

NAMES = ["light", "dark"]


def boxes_of(data: Path) -> dict[str, list[tuple]]:
    """Class and corners of the boxes of each image, by split and stem."""
    spec = load_dataset_spec(data)
    found = {}
    for split in spec.splits:
        index = load_index(spec, split, IndexSettings(progress=False))
        truth = index.ground_truth()
        kinds = [spec.names[kind] for kind in truth.classes]
        for i, path in enumerate(index.paths):
            of_image = range(truth.offsets[i], truth.offsets[i + 1])
            boxes = sorted((kinds[j], *np.round(truth.boxes_xywh_px[j], 3).tolist()) for j in of_image)
            found[f"{split}/{Path(path).stem}"] = boxes
    return found


def rows_of(source: Path, split: str, image: Path) -> list[tuple[int, float, float, float, float]]:
    """Class and x, y, width and height in pixels."""
    height, width = cv2.imread(str(image)).shape[:2]
    rows = []
    for row in (source / "labels" / split / f"{image.stem}.txt").read_text().splitlines():
        kind, cx, cy, w, h = map(float, row.split())
        rows.append((int(kind), (cx - w / 2) * width, (cy - h / 2) * height, w * width, h * height))
    return rows


SAME = {"train": "train", "val": "val"}
ROBOFLOW = {"train": "train", "val": "valid"}


def copy_set(source: Path, images: Path, labels: Path, suffix: str = "", called: dict[str, str] = SAME) -> list[Path]:
    """Copies the images of the splits that ``called`` renames, with a label file for each if there is a ``suffix``.

    {} in a folder is the split. Returns the copies.
    """
    copies = []
    for split, name in called.items():
        places = [Path(str(folder).format(name)) for folder in (images, labels)]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        for image in sorted((source / "images" / split).iterdir()):
            copies.append(Path(shutil.copy(image, places[0])))
            row_file = source / "labels" / split / f"{image.stem}.txt"
            if suffix == ".txt":
                shutil.copy(row_file, places[1])
            elif suffix:
                (places[1] / f"{image.stem}.xml").write_text(voc(rows_of(source, split, image)))
    return copies


def roboflow_coco(source: Path, folder: Path) -> None:
    write_coco(source, folder, lambda split: folder / ROBOFLOW[split], "_annotations.coco.json")


def coco_2017(source: Path, folder: Path) -> None:
    write_coco(source, folder, lambda split: folder / f"{split}2017", "../annotations/instances_{split}2017.json")


def coco_of_two_tasks(source: Path, folder: Path) -> None:
    """COCO has keypoints, too, of some images."""
    coco_2017(source, folder)
    for path in sorted((folder / "annotations").iterdir()):
        content = json.loads(path.read_text())
        content["images"] = [image | {"file_name": f"a/{image['file_name']}"} for image in content["images"][:2]]
        path.with_name(path.name.replace("instances", "person_keypoints")).write_text(json.dumps(content))


def datumaro_coco(source: Path, folder: Path) -> None:
    """Datumaro also writes JSONs for other tasks."""
    coco_2017(source, folder)
    for path in sorted((folder / "annotations").iterdir()):
        content = json.loads(path.read_text())
        empty = json.dumps({"images": content["images"], "annotations": [], "categories": content["categories"]})
        for task in ("image_info", "stuff"):
            path.with_name(path.name.replace("instances", task)).write_text(empty)


def write_coco(source: Path, folder: Path, images_of: Callable[[str], Path], name: str) -> None:
    (folder / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        content = {"images": [], "annotations": [], "categories": [
            {"id": 0, "name": "shapes", "supercategory": "none"},
            {"id": 1, "name": "light", "supercategory": "shapes"}, {"id": 2, "name": "dark", "supercategory": "shapes"},
        ]}  # fmt: skip
        for number, image in enumerate(copy_set(source, images_of(split), folder, called={split: ""})):
            content["images"].append({"id": number, "file_name": image.name})
            for kind, *box in rows_of(source, split, image):
                entry = {"image_id": number, "category_id": kind + 1, "bbox": box, "id": len(content["annotations"])}
                content["annotations"].append(entry)
        (images_of(split) / name.format(split=split)).write_text(json.dumps(content))
    if name.startswith("_"):
        (folder / "annotations").rmdir()


def roboflow_voc(source: Path, folder: Path) -> None:
    copy_set(source, folder / "{}", folder / "{}", ".xml", ROBOFLOW)


def voc_2012(source: Path, folder: Path) -> None:
    """One folder of images, with Annotations beside it."""
    copy_set(source, folder / "images" / "{}", folder / "annotations" / "{}", ".xml")


def fiftyone_voc(source: Path, folder: Path) -> None:
    for split, called in SAME.items():
        copy_set(source, folder / called / "data", folder / called / "labels", ".xml", {split: called})


def voc(rows: list[tuple]) -> str:
    objects = "".join(
        f"<object><pose>x</pose><name>{NAMES[kind]}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin>"
        f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox><part><name>not a class</name></part></object>"
        for kind, x, y, w, h in rows
    )
    return f"<annotation><owner><name>nor this</name></owner>{objects}</annotation>"


def darknet(source: Path, folder: Path) -> None:
    copy_set(source, folder / "{}", folder / "{}", ".txt", ROBOFLOW)
    for name in ROBOFLOW.values():
        (folder / name / "_darknet.labels").write_text("light\ndark\n")


def label_img(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)
    (folder / "data.yaml").unlink()
    (folder / "classes.txt").write_text("light\ndark\n")


def cvat_yolo(source: Path, folder: Path) -> None:
    """YOLO 1.1 of CVAT and Datumaro: the splits are lists."""
    for split, called in {"train": "Train", "val": "Validation"}.items():
        place = folder / f"obj_{called}_data"
        rows = [f"data/{place.name}/{path.name}\n" for path in copy_set(source, place, place, ".txt", {split: called})]
        (folder / f"{called}.txt").write_text("".join(rows))
    (folder / "obj.names").write_text("light\ndark\n")
    (folder / "obj.data").write_text("classes = 2\nTrain = data/Train.txt\n")


def two_names_of_one_folder(source: Path, folder: Path) -> None:
    darknet(source, folder)
    (folder / "validation").symlink_to("valid")


def voc_devkit(source: Path, folder: Path) -> None:
    """All images in one folder, lists of stems, and folders around them; masks are also images."""
    base = folder / "VOCdevkit" / "VOC2012"
    for name in ("ImageSets/Main", "SegmentationClass"):
        (base / name).mkdir(parents=True)
    for split in SAME:
        images = copy_set(source, base / "JPEGImages", base / "Annotations", ".xml", {split: split})
        (base / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{image.stem}\n" for image in images))
    shutil.copy(images[0], base / "SegmentationClass")


def supervision(source: Path, folder: Path) -> None:
    """Its data.yaml has the names alone."""
    ultralytics(source, folder)
    (folder / "data.yaml").write_text("names:\n- light\n- dark\nnc: 2\n")


def ultralytics(source: Path, folder: Path) -> None:
    """Writes what Roboflow exports for YOLOv8."""
    copy_set(source, folder / "{}" / "images", folder / "{}" / "labels", ".txt", ROBOFLOW)
    (folder / "data.yaml").write_text("train: ../train/images\nval: ../valid/images\nnames: [light, dark]\n")


def capital_yolo(source: Path, folder: Path) -> None:
    copy_set(source, folder / "Images" / "{}", folder / "Labels" / "{}", ".txt")
    (folder / "classes.txt").write_text("light\ndark\n")


def capital_coco(source: Path, folder: Path) -> None:
    coco_2017(source, folder)
    (folder / "annotations").rename(folder / "Annotations")


def capital_voc(source: Path, folder: Path) -> None:
    copy_set(source, folder / "Images" / "{}", folder / "Annotations" / "{}", ".xml")
    for path in folder.glob("Annotations/*/*"):
        path.rename(path.with_suffix(".XML"))


def beside_capitalized_folders(source: Path, folder: Path) -> None:
    """The folders with lower-case names count, not the originals and the old annotations in capitalized ones."""
    label_img(source, folder)
    (folder / "Annotations").mkdir()
    for split in SAME:
        copy_set(source, folder / "Images" / "{}", folder, called={split: split})
        image = next((folder / "Images" / split).iterdir())
        image.rename(image.with_stem("original"))
        content = {
            "images": [{"id": 0, "file_name": image.name}],
            "annotations": [{"id": 0, "image_id": 0, "category_id": 1, "bbox": [1, 2, 3, 4]}],
            "categories": [{"id": 1, "name": "old"}],
        }
        (folder / f"Annotations/old_{split}.json").write_text(json.dumps(content))


EXPORTS = [
    roboflow_coco, coco_2017, coco_of_two_tasks, datumaro_coco, roboflow_voc, voc_2012, voc_devkit, fiftyone_voc,
    darknet, cvat_yolo, label_img,
    ultralytics, supervision, two_names_of_one_folder, capital_yolo, capital_coco, capital_voc,
    beside_capitalized_folders,
]  # fmt: skip


def cvat_task(source: Path, folder: Path) -> None:
    """COCO JSON of a task without subsets."""
    coco_2017(source, folder)
    (folder / "images").mkdir()
    (folder / "train2017").rename(folder / "images" / "default")
    (folder / "annotations" / "instances_train2017.json").rename(folder / "annotations" / "instances_default.json")
    (folder / "annotations" / "instances_val2017.json").unlink()
    shutil.rmtree(folder / "val2017")


def label_studio_coco(source: Path, folder: Path) -> None:
    cvat_task(source, folder)
    text = (folder / "annotations" / "instances_default.json").read_text()
    text = text.replace('"file_name": "', r'"file_name": "\/data\/upload\/1\/')
    (folder / "result.json").write_text(text)
    shutil.rmtree(folder / "annotations")


def label_studio_yolo(source: Path, folder: Path) -> None:
    copy_set(source, folder / "images", folder / "labels", ".txt", {"train": ""})
    (folder / "classes.txt").write_text("light\ndark\n")
    notes = {"categories": [{"id": 0, "name": "light"}, {"id": 1, "name": "dark"}], "info": {"year": 2026}}
    (folder / "notes.json").write_text(json.dumps(notes, indent=2))


def label_studio_yolo_with_empty_lists(source: Path, folder: Path) -> None:
    label_studio_yolo(source, folder)
    notes = json.loads((folder / "notes.json").read_text()) | {"images": [], "annotations": []}
    (folder / "notes.json").write_text(json.dumps(notes, indent=2))


def label_studio_yolo_without_classes(source: Path, folder: Path) -> None:
    label_studio_yolo(source, folder)
    (folder / "classes.txt").unlink()


def labels_beside_images(source: Path, folder: Path) -> None:
    copy_set(source, folder / "images", folder / "images", ".txt", {"train": ""})
    (folder / "classes.txt").write_text("light\ndark\n")


def capital_suffixes(source: Path, folder: Path) -> None:
    label_studio_yolo(source, folder)
    for path in (folder / "labels").iterdir():
        path.rename(path.with_suffix(".TXT"))


ONE_SPLIT = [
    cvat_task, label_studio_coco, label_studio_yolo, label_studio_yolo_with_empty_lists,
    label_studio_yolo_without_classes, labels_beside_images, capital_suffixes,
]  # fmt: skip
