"""What has no box is left out and counted: shapes without an area, skipped and unlabeled images, damaged files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.dataset.yaml_file import load_dataset_spec
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from tests.helpers.tool_exports import (
    SIZES,
    TRUTH,
    boxes_of,
    check_refusal,
    labelbox_rows,
    write_createml,
    write_csv,
    write_cvat,
    write_image_folder,
    write_kitti,
    write_labelme,
    write_open_images,
    write_parquet,
    write_vott,
)
from tools.convert.to_coco import convert
from utils.errors import UserError


@pytest.mark.parametrize("write", [write_labelme, write_kitti])
def test_a_region_to_ignore_without_an_area_is_left_out(write, images, tmp_path):
    """The name of its class is then not among the names of the data set."""
    write(images)
    if write is write_labelme:
        file = images / "one.json"
        content = json.loads(file.read_text())
        content["shapes"].append({"label": "__ignore__", "points": [[3, 3], [3, 9]], "shape_type": "rectangle"})
        file.write_text(json.dumps(content))
    else:
        file = images / "label_2" / "one.txt"
        file.write_text(f"{file.read_text()}DontCare -1 -1 -10 5.00 5.00 5.00 5.00 -1 -1 -1 -1000 -1000 -1000 -10\n")
    lines = convert(images, tmp_path / "out.json")
    assert f"left out because they have no area: box (1); the first in {file}" in lines
    assert not any("regions to ignore" in line for line in lines)
    assert boxes_of(tmp_path / "out.yaml").total() == sum(map(len, TRUTH.values()))


def test_shapes_without_an_area_are_counted_by_kind_and_left_out(images, tmp_path):
    write_cvat(images)
    file = images / "annotations.xml"
    text = file.read_text()
    points = '<points label="cat" points="3,4;5,6"/>'
    file.write_text(text.replace("<box ", f'<polyline label="cat" points="1,2;3,4"/>{points}<box ', 1))
    lines = convert(images, tmp_path / "a.json")
    assert (
        f"left out because they have no area: polyline (1), points (1); the first in {file}: image 'one.png'" in lines
    )
    assert load_index(load_dataset_spec(tmp_path / "a.yaml"), "train").report.problems == 0
    file.write_text(text.replace("<box ", "<polyline "))  # of two.png all
    lines = convert(images, tmp_path / "b.json")
    assert f"left out because they have no area: polyline (2); the first in {file}: image 'one.png'" in lines
    assert "1 image without usable labels: left out of training" in lines
    file.write_text(text.replace("<box ", "<polyline ").replace("<polygon ", "<points "))
    check_refusal(
        images,
        "set: 1 file of CVAT without objects; left out because they have no area: polyline (2), points (1); the first "
        "in .../annotations.xml: image 'one.png'",
    )
    file.unlink()
    write_labelme(images)
    file = images / "one.json"
    file.write_text(file.read_text().replace('"rectangle"', '"point"'))
    line = f"left out because they have no area: point (2); the first in {file}: shape 0"
    assert line in convert(images, tmp_path / "c.json")


def test_boxes_without_an_area_are_counted_and_left_out(images, tmp_path):
    """Training would leave them out, so they do not count as converted; an image with these alone is no background."""
    write_csv(images)
    text = (images / "_annotations.csv").read_text()
    flat = text.replace("three.png,40,40,,,,,", "three.png,40,40,cat,3,3,3,9")
    assert flat != text
    (images / "_annotations.csv").write_text(flat)
    lines = convert(images, tmp_path / "out.json")
    assert f"left out because they have no area: box (1); the first in {images / '_annotations.csv'}:5" in lines
    assert lines[2].split() == ["cat", "2", "2"]
    assert len(load_index(load_dataset_spec(tmp_path / "out.yaml"), "train", IndexSettings(progress=False)).paths) == 2


def skip_in_parquet(folder: Path) -> None:
    write_parquet(folder)
    from pyarrow import Table, parquet

    path = folder / "train-00000-of-00001.parquet"
    table = parquet.read_table(path)
    rows = table.to_pylist()
    rows[2]["objects"] = {"bbox": [[3, 3, 0, 6]], "category": [0]}
    parquet.write_table(Table.from_pylist(rows, metadata=table.schema.metadata), path)


def skip_in_one_of_two_files(folder: Path) -> None:
    write_cvat(folder)
    empty = '<image id="2" name="three.png" width="40" height="40" />'
    text = (folder / "annotations.xml").read_text()
    assert empty in text
    points = empty.replace(" />", '><points label="cat" points="3,4;5,6" /></image>')
    (folder / "first.xml").write_text(text.replace(empty, points))
    (folder / "annotations.xml").write_text(f"<annotations>{empty}</annotations>")


def skip_in_one_of_two_rows(folder: Path) -> None:
    write_csv(folder)
    with open(folder / "_annotations.csv", "a") as file:
        file.write("three.png,40,40,cat,3,3,3,9\n")


@pytest.mark.parametrize(
    "write", [skip_in_parquet, skip_in_one_of_two_files, skip_in_one_of_two_rows], ids=lambda write: write.__name__
)
def test_an_image_with_only_skipped_shapes_is_left_out_and_counted(write, images, tmp_path):
    """This includes three.png, which has no objects according to another entry: as a background it would show some."""
    write(images)
    lines = convert(images, tmp_path / "out.json")
    assert "1 image without usable labels: left out of training" in lines
    assert not any("background" in line for line in lines)
    assert len(json.loads((tmp_path / "out.json").read_text())["images"]) == 2
    assert len(list(tmp_path.glob("out/train/*"))) == (2 if write is skip_in_parquet else 0)


def test_vott_points_and_lines_are_left_out_and_a_region_without_a_tag_is_an_error(images, tmp_path):
    write_vott(images)
    file = images / "vott-export.json"
    content = json.loads(file.read_text())
    three = list(content["assets"].values())[2]
    box = {"left": 3, "top": 3, "width": 9, "height": 9}
    three["regions"] = [{"tags": ["cat"], "type": kind, "boundingBox": box} for kind in ("POLYLINE", "POINT")]
    file.write_text(json.dumps(content))
    assert "no area: polyline (1), point (1); the first" in " ".join(convert(images, tmp_path / "out.json"))
    assert boxes_of(tmp_path / "out.yaml").total() == 3
    three["regions"] = [{"tags": [], "type": "RECTANGLE", "boundingBox": box}]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"asset 0{31}2: region 0: has no tag"):
        convert(images, tmp_path / "again.json")


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
    """Only three.png, with an empty list of objects, is a background."""
    write(images)
    lines = convert(images, tmp_path / "out.json")
    assert "1 image without objects: background" in lines
    assert "1 image without usable labels: left out of training" in lines
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["images"]) == 2
    assert len(content["annotations"]) == len(TRUTH["one.png"])


@pytest.mark.parametrize("is_damaged", [True, False])
def test_labels_that_training_leaves_out_are_named(is_damaged, images, tmp_path):
    """One of 23 images is damaged, or has a box outside of it."""
    write_csv(images)
    with open(images / "_annotations.csv", "a") as file:
        for number in range(20):
            cv2.imwrite(str(images / f"{number}.png"), np.full((48, 64, 3), number, np.uint8))
            file.write(f"{number}.png,64,48,cat,{'70,9,90,20' if number == 7 and not is_damaged else '1,1,9,9'}\n")
    if is_damaged:
        (images / "7.png").write_bytes(b"")
    lines = convert(images, tmp_path / "out.json")
    assert lines[2].split() == ["cat", "22", "22"]
    (line,) = [line for line in lines if line.startswith("training leaves out")]
    assert line.startswith("training leaves out 1 of 23 images and 1 of 23 labeled objects of 'train': ")
    assert f"7.png (labeled in {images / '_annotations.csv'}:13): " in line
    spec = load_dataset_spec(tmp_path / "out.yaml")
    assert len(load_index(spec, "train", IndexSettings(progress=False)).paths) == 22


@pytest.mark.parametrize("write", [write_kitti, write_createml, write_image_folder])
def test_a_damaged_image_whose_size_is_not_in_the_export_is_left_out(write, images, tmp_path):
    write(images)
    (images / "one.png").write_bytes(b"")
    lines = convert(images, tmp_path / "out.json", max_bad=0.9)
    (line,) = [line for line in lines if line.startswith("training leaves out")]
    assert line.startswith("training leaves out 1 of 3 images and ")
    assert "one.png (labeled in " in line
    entries = json.loads((tmp_path / "out.json").read_text())["images"]
    assert {entry["file_name"]: (entry.get("width"), entry.get("height")) for entry in entries} == {
        **SIZES,
        "one.png": (None, None),
    }
    spec = load_dataset_spec(tmp_path / "out.yaml")
    assert len(load_index(spec, "train", IndexSettings(progress=False, max_bad=0.9)).paths) == 2


@pytest.mark.parametrize("write", [write_open_images, write_parquet])
def test_an_image_that_is_damaged_after_its_header_is_left_out(write, images, tmp_path):
    """It does not stop the conversion."""
    (images / "one.png").write_bytes((images / "one.png").read_bytes()[:60])
    write(images)
    lines = convert(images, tmp_path / "out.json", max_bad=0.9)
    (line,) = [line for line in lines if line.startswith("training leaves out")]
    assert line.startswith("training leaves out 1 of ")
    assert re.search(r"(one|-000000)\.png \(labeled in .*(bbox\.csv:2|row 0)\): ", line), line
    spec = load_dataset_spec(tmp_path / "out.yaml")
    paths = load_index(spec, "train", IndexSettings(progress=False, max_bad=0.9)).paths
    assert len(paths) == len(list((tmp_path / "out").rglob("*.png")) or list(images.glob("*.png"))) - 1


def test_an_image_of_open_images_without_a_size_is_an_error_that_names_the_row(images):
    write_open_images(images)
    (images / "one.png").write_bytes(b"")
    check_refusal(images, "train-annotations-bbox.csv:2: .../one.png: damaged image (the file is empty)")


def test_a_split_of_empty_label_files_is_one_of_backgrounds(images, tmp_path):
    """Its files do not reveal their format, but its images are kept."""
    write_kitti(images)
    for name in ("one", "two"):
        label = images / "val" / "label_2" / f"{name}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("")
        shutil.copy(images / f"{name}.png", images / "val" / f"{name}.png")
    (images / "train").mkdir()
    for path in (images / "label_2", *images.glob("*.png")):
        path.rename(images / "train" / path.name)
    lines = convert(images, tmp_path / "out.json")
    assert lines[0] == "KITTI: train 3 images, val 2 images"
    entries = json.loads((tmp_path / "out-val.json").read_text())
    assert [entry["file_name"] for entry in entries["images"]] == ["one.png", "two.png"]
    assert entries["annotations"] == []


def test_blank_files_next_to_none_of_kitti_are_no_labels_of_labeled_images(images, tmp_path):
    write_kitti(images)
    before = convert(images, tmp_path / "before.json")
    (images / "notes").mkdir()
    for name in ("one", "three"):  # label_2/three.txt is blank, too
        (images / "notes" / f"{name}.txt").write_text("\n")
    assert convert(images, tmp_path / "out.json")[:-1] == before[:-1]
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads((tmp_path / "before.json").read_text())


def test_blank_files_are_no_labels_of_labelme(images, tmp_path):
    write_labelme(images)
    (images / "new").mkdir()
    shutil.copy(images / "one.png", images / "new" / "four.png")
    (images / "new" / "four.json").touch()
    lines = convert(images, tmp_path / "out.json")
    assert "1 image without usable labels: left out of training" in lines
    assert len(json.loads((tmp_path / "out.json").read_text())["images"]) == 3
