"""Folders without a YAML that could mean two things, or are incomplete, are refused with the files in question."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.open import check_data, open_data
from tests.data.source.denied_access import deny_access
from tests.data.source.exported_folders import (
    EXPORTS,
    NAMES,
    ONE_SPLIT,
    coco_2017,
    copy_set,
    darknet,
    label_img,
    roboflow_coco,
    supervision,
    voc_devkit,
)
from tests.helpers.messages import refused
from tests.helpers.scripts import error_of
from tests.helpers.tiny import write_dataset
from train import main as train
from utils.distributed.context import DistributedContext
from utils.errors import UserError


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
    """Writes two JSONs with half of the images each: with only one of them, half of the labels would be left out."""
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
    """There is nothing in place of the images, not even folders."""
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


@pytest.mark.parametrize(("export", "place"), [(darknet, "more"), (label_img, "images/extra"), (supervision, "b")])
def test_folders_of_images_that_are_called_like_no_split_are_named(export, place, source, tmp_path):
    folder = tmp_path / "export"
    export(source, folder)
    assert "not used" not in load_dataset_spec(folder).notes[0]
    copy_set(source, folder / place, folder / place, ".txt", {"train": ""})
    assert load_dataset_spec(folder).notes[0].endswith(f"; not used because not named after a split: {place}")


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


def test_a_list_that_is_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "val.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "classes.txt").write_text("a\n")
    with refused("val.txt: a broken link; restore the list of images, or remove the link"):
        load_dataset_spec(tmp_path)
