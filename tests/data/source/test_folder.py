"""Folders without a YAML, as annotation tools write them, have the boxes of the set that they were made from."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.folder_splits import split_of
from data.source.open import check_data, open_data
from tests.helpers.messages import refused
from tests.helpers.scripts import error_of
from tests.helpers.tiny import write_dataset
from train import main as train
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files import safe_io

NAMES = ["light", "dark"]


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_dataset(tmp_path / "set", train=4, val=3)
    for path in [*(tmp_path / "set").glob("*/val/*")]:  # some exports have all images in one folder
        path.rename(path.with_name(f"v{path.name}"))
    return tmp_path / "set"


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


EXPORTS = [
    roboflow_coco, coco_2017, coco_of_two_tasks, datumaro_coco, roboflow_voc, voc_2012, voc_devkit, fiftyone_voc,
    darknet, cvat_yolo, label_img,
    ultralytics, supervision, two_names_of_one_folder,
]  # fmt: skip


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.__name__)
def test_it_has_the_boxes_of_its_source(export, source, tmp_path):
    export(source, tmp_path / "export")
    before = {path: path.read_bytes() for path in (tmp_path / "export").rglob("*") if path.is_file()}
    assert boxes_of(tmp_path / "export") == boxes_of(source / "data.yaml")
    assert {path: path.read_bytes() for path in (tmp_path / "export").rglob("*") if path.is_file()} == before
    assert set(load_dataset_spec(tmp_path / "export").names) == set(NAMES)


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


@pytest.mark.parametrize("export", ONE_SPLIT, ids=lambda e: e.__name__)
def test_without_splits_all_images_are_for_training(export, source, tmp_path):
    export(source, tmp_path / "export")
    expected = {name: boxes for name, boxes in boxes_of(source / "data.yaml").items() if name.startswith("train")}
    assert boxes_of(tmp_path / "export") == expected


@pytest.mark.parametrize(
    ("where", "name"), [(".", "export"), (".", "export/"), ("export", "."), ("export/train", "..")]
)
def test_it_may_be_named_relative_to_the_working_folder(source, tmp_path, monkeypatch, where, name):
    roboflow_coco(source, tmp_path / "export")
    monkeypatch.chdir(tmp_path / where)
    assert boxes_of(name) == boxes_of(source / "data.yaml")
    assert load_dataset_spec(name).notes[0].startswith(f"{tmp_path / 'export'}: COCO JSON")


def test_an_archive_is_to_be_unpacked(source, tmp_path, capsys):
    archive = shutil.make_archive(str(tmp_path / "export"), "zip", source)
    assert f"data set {archive}: an archive; unpack it" in error_of(capsys, train, "--data", archive)


def two_folders_of_a_split(source: Path, folder: Path) -> None:
    darknet(source, folder)
    (folder / "Val").mkdir()


def two_lists_of_names(source: Path, folder: Path) -> None:
    darknet(source, folder)
    (folder / "valid" / "_darknet.labels").write_text("dark\nlight\n")


def two_lists_in_one_folder(source: Path, folder: Path) -> None:
    darknet(source, folder)
    (folder / "train" / "obj.names").write_text("dark\nlight\n")


def notes_against_classes(source: Path, folder: Path) -> None:
    darknet(source, folder)
    (folder / "train" / "_darknet.labels").unlink()
    (folder / "classes.txt").write_text("light\ndark\n")
    categories = [{"id": 0, "name": "dark"}, {"id": 1, "name": "light"}]
    (folder / "notes.json").write_text(json.dumps({"categories": categories}))


def two_formats(source: Path, folder: Path) -> None:
    """The names of the other format may be in another order."""
    roboflow_coco(source, folder)
    (folder / "valid" / "_annotations.coco.json").unlink()
    shutil.copytree(source / "labels" / "val", folder / "valid", dirs_exist_ok=True)


def half_a_json(source: Path, folder: Path) -> None:
    roboflow_coco(source, folder)
    path = folder / "valid" / "_annotations.coco.json"
    path.write_text(path.read_text()[:100])


def two_jsons_of_a_split(source: Path, folder: Path) -> None:
    """Each has half of the images: with one of them, half of the labels would be left out."""
    coco_2017(source, folder)
    path = folder / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    path.unlink()
    for part in (0, 1):
        images = [image for image in content["images"] if image["id"] % 2 == part]
        annotations = [each for each in content["annotations"] if each["image_id"] % 2 == part]
        half = content | {"images": images, "annotations": annotations}
        (folder / "annotations" / f"instances_val2017_{part}.json").write_text(json.dumps(half))


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (
            two_jsons_of_a_split,
            "annotations/instances_val2017_1.json: names images that .../instances_val2017_0.json does not, and both "
            "seem to belong to 'val'; merge them, or write a YAML",
        ),
        (
            two_folders_of_a_split,
            "data set .../export: .../export/Val and .../export/valid are both 'val'; rename one, or write a YAML with "
            "'train:' and 'val:'",
        ),
        (
            two_lists_of_names,
            "valid/_darknet.labels: its classes differ from those of .../train/_darknet.labels; make them agree",
        ),
        (
            two_lists_in_one_folder,
            "train/obj.names: its classes differ from those of .../train/_darknet.labels; make them agree",
        ),
        (notes_against_classes, "notes.json: its classes differ from those of .../classes.txt; make them agree"),
        (
            two_formats,
            "data set .../export: .../export/valid has YOLO txt, other splits have COCO JSON; write a YAML with the "
            "names by number",
        ),
        (
            half_a_json,
            "export: 'val' has 3 images and no label file; the first was expected at .../export/valid/v000.txt; "
            ".../export/valid/_annotations.coco.json: if it is COCO's, add 'annotations: {val: "
            "valid/_annotations.coco.json}' to the YAML",
        ),
    ],
)
def test_what_could_mean_two_things_or_is_cut_is_refused(export, message, source, tmp_path):
    export(source, tmp_path / "export")
    with refused(message):
        load_index(load_dataset_spec(tmp_path / "export"), "val", IndexSettings(progress=False))


@pytest.mark.parametrize("export", [*EXPORTS, *ONE_SPLIT], ids=lambda export: export.__name__)
@pytest.mark.parametrize("by_yaml", [False, True])
def test_an_export_without_its_images_is_refused(export, source, tmp_path, by_yaml):
    """Nothing stands in their place, not even folders."""
    folder = tmp_path / "export"
    export(source, folder)
    if by_yaml:
        (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [light, dark]\n")
    for image in [path for path in folder.rglob("*") if path.suffix == ".png"]:
        image.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
    with pytest.raises(UserError, match=r"label files? \(first: .*\) but no images; export the images as well"):
        load_index(
            open_data(DataSource(str(folder), ("train",)), DistributedContext.single()),
            "train",
            IndexSettings(progress=False),
        )


def test_voc_without_an_object_is_an_error_and_utf_16_is_not(source, tmp_path):
    roboflow_voc(source, tmp_path / "export")
    for path in (tmp_path / "export").rglob("*.xml"):
        path.write_text(path.read_text(), encoding="utf-16")
    assert boxes_of(tmp_path / "export") == boxes_of(source / "data.yaml")
    for path in (tmp_path / "export").rglob("*.xml"):
        path.write_text("<annotation></annotation>")
    with refused("data set .../export: .../export/train, .../export/valid: no object in any XML"):
        load_dataset_spec(tmp_path / "export")


def test_the_xml_of_cvat_and_the_txt_of_kitti_are_not_taken_for_other_formats(source, tmp_path):
    copy_set(source, tmp_path / "export", tmp_path / "export", called={"train": ""})
    (tmp_path / "export" / "annotations.xml").write_text("<?xml version='1.0'?>\n<annotations><image/></annotations>")
    with refused(
        "data set .../export: 4 images, files of .xml; neither a YAML, COCO JSON, Pascal VOC nor YOLO txt; "
        "for the export of another tool: python -m tools.convert .../export export.json"
    ):
        load_dataset_spec(tmp_path / "export")
    (tmp_path / "export" / "000.txt").write_text("Car 0.00 0 -1.58 7.0 3.0 14.0 20.0 1.65 1.67 3.64 0 1 2 3\n")
    with refused(
        "data set .../export: 4 images, files of .txt, .xml; neither a YAML, COCO JSON, Pascal VOC nor YOLO "
        "txt; for the export of another tool: python -m tools.convert .../export export.json"
    ):
        load_dataset_spec(tmp_path / "export")


def test_one_line_describes_the_data_set_that_was_found(source, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)
    roboflow_coco(source, tmp_path / "export")
    with caplog.at_level(logging.INFO, "lockstep"):
        spec = open_data(DataSource(str(tmp_path / "export"), ("train", "val")), DistributedContext.single())
    assert f"{tmp_path / 'export'}: COCO JSON; train train, val valid" in caplog.text
    assert list(spec.splits) == ["train", "val"]


@pytest.mark.parametrize(("export", "place"), [(darknet, "more"), (label_img, "images/extra"), (supervision, "b")])
def test_folders_of_images_that_are_called_like_no_split_are_named(export, place, source, tmp_path):
    folder = tmp_path / "export"
    export(source, folder)
    assert "not used" not in load_dataset_spec(folder).notes[0]
    copy_set(source, folder / place, folder / place, ".txt", {"train": ""})
    assert load_dataset_spec(folder).notes[0].endswith(f"; not used because not named after a split: {place}")


def test_a_yaml_decides_which_of_the_folders_are_splits(source, tmp_path):
    folder = tmp_path / "export"
    copy_set(source, folder / "{}", folder / "{}", ".txt", {"train": "train", "val": "test1"})
    copy_set(source, folder / "{}", folder / "{}", ".txt", {"val": "test2"})
    with refused("test1 and ...test2 are both 'test'; rename one, or write a YAML with 'train:' and 'val:'"):
        load_dataset_spec(folder)
    (folder / "data.yaml").write_text("train: train\nval: test1\ntest: test2\nnames: [light, dark]\n")
    assert list(load_dataset_spec(folder).splits) == ["train", "val", "test"]


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        (".pre-commit-config.yaml", "train: gone\n", NAMES),
        ("dvc.yaml", "stages:\n  train:\n    cmd: train.py\n", NAMES),
        ("my.yaml", "names: [a, b]\npath: .\n", ["a", "b"]),
        ("my.yaml", "names: [a, b]\nnc: 2\n", ["a", "b"]),
    ],
)
def test_only_a_yaml_that_describes_data_is_that_of_a_folder(name, text, names, source, tmp_path):
    folder = tmp_path / "export"
    copy_set(source, folder / "{}", folder / "{}", ".txt")
    (folder / "classes.txt").write_text("\n".join(NAMES))
    (folder / name).write_text(text)
    assert load_dataset_spec(folder).names == tuple(names)
    (folder / "docker-compose.yml").write_text("services: {}\n")
    assert load_dataset_spec(folder).names == tuple(names)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"mkdocs.yml": "nav: !!python/name:x.y\n"}, NAMES),
        ({"helm.yaml": "a: {{ .Values.b }}\n", "my.yaml": "names: [a, b]\n"}, ["a", "b"]),
        ({"my.YAML": "names: [a, b]\n", "bad.yaml": "train: [\n"}, ["a", "b"]),
        ({"helmets.yaml": "train: [\n"}, "export/helmets.yaml:2: ..."),
        (
            {"a.yaml": "names: [a, b]\n", "b.yml": "train: train\n"},
            "data set .../export: several YAMLs describe a data set: .../a.yaml, .../b.yml; name one of them",
        ),
        ({"my.yaml": "names: [a, a]\n"}, "export/my.yaml: names: several classes are called 'a'; class names must ..."),
    ],
)
def test_malformed_and_several_yamls_of_a_folder(files, names, source, tmp_path):
    folder = tmp_path / "export"
    copy_set(source, folder / "{}", folder / "{}", ".txt")
    (folder / "classes.txt").write_text("\n".join(NAMES))
    for name, text in files.items():
        (folder / name).write_text(text)
    if isinstance(names, list):
        assert load_dataset_spec(folder).names == tuple(names)
        return
    with refused(names):
        load_dataset_spec(folder)


@pytest.mark.parametrize(
    ("second", "is_refused"), [("trainval", False), ("train_2", True), ("train2017", True), ("Training", True)]
)
def test_two_lists_of_a_split_are_refused_except_those_of_voc(second, is_refused, source, tmp_path):
    voc_devkit(source, tmp_path)
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    lists = folder / "ImageSets" / "Main"
    shutil.copy(lists / "train.txt", lists / f"{second}.txt")
    if not is_refused:
        assert load_dataset_spec(folder).split("train").images == (lists / "train.txt",)
        return
    with refused("both list images of 'train'; join them, or write a YAML with 'train:' and 'val:', which may ..."):
        load_dataset_spec(folder)


def test_a_message_about_other_files_is_always_the_same(tmp_path):
    """The folder's own files come before those of splits, whatever the order of a set of paths is."""
    for name in ("", "train", "valid"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "a.json").write_text('{"rectanglelabels": []}')
        (tmp_path / name / "a.jpg").touch()
    with refused(f"data set {tmp_path}: {tmp_path}/a.json: Label Studio's JSON: export as YOLO or COCO instead"):
        load_dataset_spec(tmp_path)


def test_the_names_of_a_yaml_number_the_classes_of_voc(source, tmp_path):
    roboflow_voc(source, tmp_path / "export")
    names = ["zebra", *NAMES]
    (tmp_path / "export" / "data.yaml").write_text(f"names: {names}\nnc: 3\n")
    assert load_dataset_spec(tmp_path / "export").names == tuple(names)
    index = load_index(load_dataset_spec(tmp_path / "export"), "train", IndexSettings(progress=False))
    assert set(index.classes.tolist()) <= {1, 2}


def test_a_folder_beside_the_splits_that_cannot_be_listed_is_no_mistake(source, tmp_path, monkeypatch):
    folder = tmp_path / "export"
    copy_set(source, folder / "{}", folder / "{}", ".txt")
    (folder / "classes.txt").write_text("\n".join(NAMES))
    (folder / "lost+found").mkdir()
    deny_access(monkeypatch, folder / "lost+found")
    assert list(load_dataset_spec(folder).splits) == ["train", "val"]


@pytest.mark.parametrize(
    ("data", "denied", "message"),
    [
        (
            "private/set",
            "private",
            "data set .../private/set: .../private/set: permission denied; let this user read it",
        ),
        ("y.yaml", "private", ".../private/set/images/train: permission denied (named by 'train' of .../y.yaml); ..."),
        ("private/set", "private/set/images", ".../images: permission denied; let this user read it"),
    ],
)
def test_unreadable_paths_are_named(data, denied, message, tmp_path, monkeypatch):
    write_dataset(tmp_path / "private" / "set", train=2, val=2)
    (tmp_path / "private" / "set" / "data.yaml").unlink()
    lines = ["path: private/set", "train: images/train", "val: images/val", "names: [a, b]"]
    (tmp_path / "y.yaml").write_text("\n".join(lines))
    deny_access(monkeypatch, tmp_path / denied)
    source = DataSource(str(tmp_path / data), ("train", "val"))
    with refused(message):
        check_data(source.data, source.splits)
    with refused(message):
        open_data(source, DistributedContext.single())


def test_files_that_a_copy_cannot_read_are_named(tmp_path, monkeypatch):
    data = write_dataset(tmp_path / "set", train=2, val=2)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "val.json").write_text("{}")
    data.write_text(f"{data.read_text()}annotations: {{val: {tmp_path}/private/val.json}}\n")
    deny_access(monkeypatch, tmp_path / "private")
    source = DataSource(str(data), ("train",), optional=("val",), stage=str(tmp_path / "stage"))
    with refused("data set .../data.yaml: .../private/val.json: permission denied; let this user read it"):
        open_data(source, DistributedContext.single())


def deny_access(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes the content of a folder inaccessible, also for root."""
    for name in ("stat", "listdir", "scandir"):
        plain = getattr(os, name)

        def checked(path=".", *args, plain=plain, **kwargs):
            if not isinstance(path, int):
                inside = Path(path).is_relative_to(folder) if plain.__name__ != "stat" else folder in Path(path).parents
                if inside:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return plain(path, *args, **kwargs)

        patch.setattr(os, name, checked)


def test_a_folder_that_does_not_train_says_what_is_there(source, tmp_path, capsys):
    label_img(source, tmp_path / "export")
    (tmp_path / "export" / "classes.txt").unlink()
    message = "YOLO txt needs the names of the classes: add classes.txt"
    assert message in error_of(capsys, train, "--data", str(tmp_path / "export"))
    (tmp_path / "export" / "_annotations.csv").touch()
    shutil.rmtree(tmp_path / "export" / "labels")
    line = error_of(capsys, train, "--data", str(tmp_path / "export"))
    assert "7 images, files of .csv, folders images; neither a YAML, COCO JSON, Pascal VOC nor YOLO txt" in line
    assert f"python -m tools.convert {tmp_path / 'export'} export.json" in line
    (tmp_path / "empty").mkdir()
    with refused(
        "data set .../empty: 0 images, no other files; neither a YAML, COCO JSON, Pascal VOC nor YOLO txt; "
        "for the export of another tool: python -m tools.convert .../empty empty.json"
    ):
        load_dataset_spec(tmp_path / "empty")


def test_a_voc_file_that_cannot_be_read_is_left_to_the_scan(source, tmp_path):
    roboflow_voc(source, tmp_path / "export")
    os.mkfifo(tmp_path / "export" / "train" / "pipe.xml")
    (tmp_path / "export" / "train" / "cut.xml").write_text("<annotation><object><name>glow</name>")
    assert {*NAMES} <= set(load_dataset_spec(tmp_path / "export").names) <= {*NAMES, "glow"}


def test_the_json_files_of_a_folder_are_not_all_in_memory(source, tmp_path):
    """The annotations of COCO 2017 are 2 GB."""
    coco_2017(source, tmp_path / "export")
    expected = load_dataset_spec(tmp_path / "export")
    size = 4_000_000
    for i in range(12):
        (tmp_path / f"export/annotations/captions_val2017_{i}.json").write_text(f'{{"info": "{"x" * size}"}}')
    tracemalloc.start()
    try:
        assert load_dataset_spec(tmp_path / "export").splits == expected.splits
        assert tracemalloc.get_traced_memory()[1] < 5 * size
    finally:
        tracemalloc.stop()


def test_a_json_is_read_twice_however_often_the_data_set_is_opened(source, tmp_path, monkeypatch):
    coco_2017(source, tmp_path / "export")
    for path in (tmp_path / "export" / "annotations").iterdir():
        path.write_text(path.read_text().replace('"supercategory"', '"group"'))
    reads = []
    plain = safe_io.read_regular

    def read_and_count(path, *args):
        reads.append(Path(path).name)
        return plain(path, *args)

    monkeypatch.setattr(safe_io, "read_regular", read_and_count)
    check_data(str(tmp_path / "export"), ("train", "val"))
    for _ in range(2):
        names = load_dataset_spec(tmp_path / "export").names
    assert sorted(reads) == ["instances_train2017.json"] * 2 + ["instances_val2017.json"]
    path = tmp_path / "export" / "annotations" / "instances_train2017.json"
    path.write_text(path.read_text().replace('"light"', '"brighter"'))
    assert load_dataset_spec(tmp_path / "export").names == tuple(name.replace("light", "brighter") for name in names)


def test_names_of_splits():
    names = {"Train": "train", "trainval": "train", "val2017": "val", "validation": "val", "test_2": "test"}
    assert {name: split_of(name) for name in (*names, "trainer")} == names | {"trainer": ""}


def test_a_list_that_is_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "val.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "classes.txt").write_text("a\n")
    with refused("val.txt: a broken link; restore the list of images, or remove the link"):
        load_dataset_spec(tmp_path)


def test_hundreds_of_thousands_of_names_take_a_moment(tmp_path):
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    (tmp_path / "classes.txt").write_text("".join(f"a{i}\n" for i in range(300_000)))
    start = time.process_time()
    assert len(load_dataset_spec(tmp_path).names) == 300_000
    with open(tmp_path / "classes.txt", "a") as file:
        file.write("a7\n")
    with refused("...: names: several classes are called 'a7'; class names must be unique"):
        load_dataset_spec(tmp_path)
    assert time.process_time() - start < 30
