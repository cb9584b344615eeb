"""Exports of annotation tools: every object is a box of the same pixels in the COCO JSON, which trains."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.source.dataset_yaml import load_dataset_spec
from tests.helpers.messages import refused
from tests.helpers.scripts import call, error_of
from tests.helpers.tool_exports import (
    CORNERS,
    SIZES,
    TRUTH,
    WRITERS,
    boxes_of,
    check_refusal,
    labelbox_rows,
    write_createml,
    write_csv,
    write_cvat,
    write_image_folder,
    write_kitti,
    write_labelbox,
    write_labelme,
    write_open_images,
    write_parquet,
    write_rows,
    write_vott,
)
from tools.convert.__main__ import main
from tools.convert.formats import FORMATS
from tools.convert.to_coco import convert
from utils.config.tool_settings import ANNOTATION_FORMATS
from utils.errors import UserError


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
    """Roboflow writes a file into each of train, valid and test."""
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


def test_an_image_is_in_one_split(images, tmp_path):
    """Else it would be in both, with a part of its labels in each."""
    header = "filename,width,height,class,xmin,ymin,xmax,ymax\n"
    (images / "train.csv").write_text(f"{header}one.png,64,48,cat,1,1,9,9\n")
    (images / "val.csv").write_text(f"{header}two.png,64,48,cat,1,1,9,9\none.png,64,48,cat,2,2,9,9\n")
    with refused(".../val.csv:3: one.png is in 'val' here, and in 'train' in .../train.csv:2; remove one of them"):
        convert(images, tmp_path / "coco.json")
    assert not list(tmp_path.glob("coco*"))


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
        (label_twice_labelme, "set/one.json: one.png is also labeled in .../old/one.json"),
        (label_twice_kitti, "set/old/one.txt: one.png is also labeled in .../label_2/one.txt"),
        (label_twice_image_folder, "metadata.jsonl:4: one.png is also labeled in .../metadata.jsonl:1"),
        (label_twice_labelbox, "export.ndjson:2: one.png is also labeled in .../export.ndjson:1"),
        (label_twice_createml, ": entry 3: one.png is also labeled in ...: entry 0"),
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
    """Also if another entry says that three.png has no objects: as a background it would show some."""
    write(images)
    lines = convert(images, tmp_path / "out.json")
    assert "1 image without usable labels: left out of training" in lines
    assert not any("background" in line for line in lines)
    assert len(json.loads((tmp_path / "out.json").read_text())["images"]) == 2
    assert len(list(tmp_path.glob("out/train/*"))) == (2 if write is skip_in_parquet else 0)


def test_a_whole_number_may_be_the_name_of_a_class(images, tmp_path):
    write_createml(images)
    path = images / CREATEML
    path.write_text(path.read_text().replace('"label": "cat"', '"label": 0'))
    convert(images, tmp_path / "out.json")
    assert yaml.safe_load((tmp_path / "out.yaml").read_text())["names"] == ["0", "wild dog"]


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


def test_createml_of_apples_documentation(images, tmp_path):
    write_createml(images)
    text = (
        (images / CREATEML).read_text().replace('"annotations"', '"annotation"').replace('"image"', '"imagefilename"')
    )
    (images / CREATEML).write_text(text)
    convert(images, tmp_path / "out.json")
    assert boxes_of(tmp_path / "out.yaml").total() == 3


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
        assert "--data " not in str(caught.value)


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


def test_the_yaml_moves_with_its_folder_and_the_command_is_quoted(images, tmp_path, monkeypatch):
    write_createml(images)
    home = tmp_path / "my sets"
    home.mkdir()
    images.rename(home / "set")
    monkeypatch.chdir(home / "set")
    lines = convert(Path("../set"), Path("../set/../out.json"))
    assert lines[-1] == f"train: python train.py --data '{home}/out.yaml' --val-fraction 0.2"
    home.rename(tmp_path / "moved")
    content = yaml.safe_load((tmp_path / "moved/out.yaml").read_text())
    assert (content["path"], content["train"]) == (".", "set")
    spec = load_dataset_spec(tmp_path / "moved/out.yaml")
    assert len(load_index(spec, "train", IndexSettings(progress=False))) == len(TRUTH)


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (("train", "val"), "train: python train.py --data {data}"),
        (("train", "test"), "train: python train.py --data {data} --val-fraction 0.2"),
        (("val", "test"), "training needs a 'train' split, but {data} has only val, test"),
    ],
)
def test_the_last_line_is_a_command_that_training_accepts(splits, expected, images, tmp_path):
    for split in splits:
        folder = tmp_path / "export" / split
        shutil.copytree(images, folder)
        write_createml(folder)
    lines = convert(tmp_path / "export", tmp_path / "out.json")
    assert lines[-1] == expected.format(data=tmp_path / "out.yaml")


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
            ": image 'four.png': the image 'four.png': not found below .../set, where images have names such as "
            "one.png",
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
            ":2: 'cat' has x2 < x1 or y2 < y1 (x1 y1 x2 y2: 30 6 4 40)",
        ),
        (
            write_csv,
            "_annotations.csv",
            "4,6,30,40",
            "4,6,1e200,1e200",
            ":2: 'cat' is larger than any image (x1 y1 x2 y2: 4 6 1e+200 1e+200)",
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
        (write_createml, CREATEML, '"image": "two.png"', '"image": null', ": entry 1: has no image name"),
        (write_labelme, "two.json", '"imagePath": "two.png"', '"imagePath": ""', ": has no image name"),
        (write_createml, CREATEML, '"label": "cat"', '"label": true', ": entry 0: label: expected a name, got true"),
        (
            write_labelme,
            "one.json",
            '"label": "cat"',
            '"label": ["cat"]',
            ': shape 0: label: expected a name, got ["cat"]',
        ),
        (write_vott, "vott-export.json", '"tags": ["cat"]', '"tags": [null]', f": asset {32 * '0'}: '' {NO_NAME}"),
        (write_createml, CREATEML, '"image": "two.png"', '"image": 2.5', ": entry 1: expected a name, got 2.5"),
        (
            write_vott,
            "vott-export.json",
            '"name": "one.png"',
            '"nome": "one.png"',
            f": asset {32 * '0'}: has no image name",
        ),
        (write_image_folder, "metadata.jsonl", '"file_name": "three.png", ', "", ":3: has no image name"),
        (write_cvat, "annotations.xml", ' name="two.png"', "", ": image 1: has no image name"),
        (write_csv, "_annotations.csv", "one.png,64", ",64", ":2: has no image name"),
        (write_createml, CREATEML, '"cat"', '"  "', f": entry 0: '' {NO_NAME}"),
        (
            write_open_images,
            "class-descriptions-boxable.csv",
            "cat",
            "x" * 200_000,
            ": malformed CSV (field larger than field limit (131072))",
        ),
        (write_kitti, "label_2/one.txt", " 8.4 0.0", "", ":1: 13 fields, expected 15, or one more with a score"),
        (write_kitti, "label_2/one.txt", "cat 0", "0 2 cat 0", ":1: 17 fields, expected 15, or one more with a score"),
        (write_kitti, "label_2/one.txt", "wild_dog", "wild dog", ":2: fields 2 to 4: expected a number, got 'dog'"),
    ],
)
def test_wrong_files_are_named(write, name, old, new, message, images):
    write(images)
    text = (images / name).read_text()
    assert old in text
    (images / name).write_text(text.replace(old, new))
    check_refusal(images, f"set/{name}{message}")


def test_unclear_formats_are_refused_with_the_reason(images, tmp_path, capsys):
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


def test_a_folder_that_trains_as_it_is_is_named_with_the_command(images):
    (images / "classes.txt").write_text("cat\n")
    (images / "one.txt").write_text("0 .5 .5 .2 .2\n")
    check_refusal(images, "set: training reads it as it is, without conversion: python train.py --data .../set")


def test_a_polygon_of_yolo_is_no_row_of_kitti(images):
    """One of seven points has 15 fields, too."""
    (images / "one.txt").write_text(f"0 {'0.5 1e-1 ' * 7}\n")
    check_refusal(images, "set: no format is recognized...")


@pytest.mark.parametrize("encoding", ["UTF-16", "GBK"])
@pytest.mark.parametrize("write", [write_labelme, write_createml, write_csv, write_labelbox, write_kitti])
def test_files_in_another_encoding_are_named_with_the_encoding(write, encoding, images):
    write(images)
    file = next(path for path in sorted(images.rglob("*")) if path.is_file() and path.suffix != ".png")
    file.write_bytes(file.read_text().replace("cat", "行人车辆").encode(encoding))
    if "行人车辆" not in file.read_bytes().decode(encoding, "replace"):
        file.write_bytes(file.read_bytes() + "行人车辆".encode(encoding.replace("UTF-16", "UTF-16-LE")))
    with pytest.raises(UserError, match=rf"{file.name}: not UTF-8 but apparently {encoding}; save it as UTF-8"):
        convert(images, images.parent / "out.json")


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with refused("a.json: cannot be read (is a pipe or device, not a file)"):
        convert(tmp_path / "a.json", tmp_path / "out.json")


def test_what_a_killed_run_left_is_removed(images, tmp_path, monkeypatch):
    write_csv(images)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr("tools.convert.to_coco.write_dataset", lambda *_: os._exit(9))
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
        "annotations.xml: image 'one.png': one.png has the same box of 'cat' in .../annotations (1).xml; remove "
        "one file",
    )


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
    """three.png, with an empty list of objects, is one."""
    write(images)
    lines = convert(images, tmp_path / "out.json")
    assert "1 image without objects: background" in lines
    assert "1 image without usable labels: left out of training" in lines
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["images"]) == 2
    assert len(content["annotations"]) == len(TRUTH["one.png"])


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


def test_a_path_that_the_files_cannot_contain_is_refused(images, tmp_path):
    """Training would not find the images."""
    write_cvat(images)
    folder = images.rename(images.with_name(os.fsdecode(b"set\xff")))
    check_refusal(folder, "set\\udcff: is not UTF-8, so it cannot be in a YAML; rename it")


def test_an_output_that_a_yaml_cannot_name_is_refused(images, tmp_path):
    write_cvat(images)
    with refused("out\\udcff.json: is not UTF-8, so it cannot be in a YAML; rename it"):
        convert(images, tmp_path / os.fsdecode(b"out\xff.json"))
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.parametrize("stem", ["t\nwo", " two", os.fsdecode(b"two\xff")])
def test_an_image_name_that_a_list_cannot_contain_is_refused(stem, images):
    """Training would not find the image. A row is relative to the output's folder, here that of the images."""
    write_labelme(images)
    content = json.loads((images / "two.json").read_text())
    (images / "val").mkdir()  # the split of two.png
    (images / "val" / f"{stem}.json").write_text(json.dumps(content | {"imagePath": f"{stem}.png"}))
    (images / "two.json").unlink()
    (images / "two.png").rename(images / f"{stem}.png")
    reason = "has a line break or outer spaces, or is not UTF-8, so it cannot be in a list of images"
    with refused(f"{stem + '.png'!r}: {reason}; rename it"):
        convert(images, images / "out.json")
    assert not list(images.glob("out*"))


def test_an_image_name_with_a_backslash_is_refused(images):
    write_cvat(images)
    file = images / "annotations.xml"
    file.write_text(file.read_text().replace("two.png", "t\\wo.png"))
    (images / "two.png").rename(images / "t\\wo.png")
    check_refusal(images, r"'t\\wo.png': has a \, which separates folders in a COCO JSON; rename the image")


def test_a_folder_may_have_a_backslash(images):
    write_cvat(images)
    (images / "a\\b").mkdir()
    (images / "two.png").rename(images / "a\\b" / "two.png")
    convert(images, images.parent / "out.json")
    assert boxes_of(images.parent / "out.yaml").total() == sum(map(len, TRUTH.values()))


@pytest.mark.parametrize("name", ["out.json", "out.yaml"])
def test_a_link_of_the_outputs_name_is_not_replaced(name, images, tmp_path):
    write_cvat(images)
    link = tmp_path / name
    link.symlink_to("disk that is not mounted")
    with refused(f"{link}: exists; remove it, or choose another name"):
        convert(images, tmp_path / "out.json")
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["set ", "set.yaml", "~"])
def test_a_folder_that_would_be_read_differently_is_refused(name, images):
    """In a YAML, the first loses its space, the second joins a data set, and the third is the user's home."""
    write_cvat(images)
    folder = images.rename(images.with_name(name))
    reason = "in a YAML, a suffix .yaml, outer spaces and a leading ~ have a meaning"
    check_refusal(folder, f"{name!r}: would not be read as this path ({reason}); rename it")


def test_labels_that_training_refuses_are_refused_and_named(images):
    """Those of two.png are for another version of the image."""
    write_labelme(images)
    file = images / "two.json"
    file.write_text(file.read_text().replace('"imageHeight": 60', '"imageHeight": 80'))
    check_refusal(
        images,
        ".../out.json: training would refuse 'train': 1 of 3 images and 1 of 3 labeled objects can't be used "
        "(--max-bad is 0.1): size mismatch: two.png (labeled in .../set/two.json): labels are for 80x80, the image is "
        "80x60 upright",
    )


def test_more_unusable_labels_are_accepted_with_max_bad(images, capsys):
    write_labelme(images)
    file = images / "two.json"
    file.write_text(file.read_text().replace('"imageHeight": 60', '"imageHeight": 80'))
    call(main, images, images.parent / "out.json", "--max-bad", "0.5")
    out = capsys.readouterr().out
    assert "training leaves out 1 of 3 images and 1 of 3 labeled objects of 'train'" in out
    assert out.endswith("/out.yaml --val-fraction 0.2 --max-bad 0.5\n")


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


def test_two_sizes_of_an_image_are_refused(images):
    """The boxes of one row would be wrong."""
    write_csv(images)
    with open(images / "_annotations.csv", "a") as file:
        file.write("two.png,800,600,cat,100,100,200,200\n")
    check_refusal(
        images, "_annotations.csv:6: two.png has 800x600 pixels here, and 80x60 in another entry; remove one of them"
    )


@pytest.mark.parametrize("size", ["0,0", "-1,-1", ","])
def test_an_unknown_size_is_that_of_the_image(size, images, tmp_path):
    write_csv(images)
    text = (images / "_annotations.csv").read_text()
    (images / "_annotations.csv").write_text(text.replace("two.png,80,60", f"two.png,{size}"))
    convert(images, tmp_path / "out.json")
    sizes = {
        entry["file_name"]: (entry["width"], entry["height"])
        for entry in json.loads((tmp_path / "out.json").read_text())["images"]
    }
    assert sizes == SIZES


@pytest.mark.parametrize(
    ("file_name", "reason"),
    [
        ("two.gif", ".gif files are not supported; convert them to JPEG or PNG"),
        (".two.png", "hidden; rename it, or its folder, without the leading dot"),
    ],
)
def test_an_image_whose_file_is_not_read_is_named_with_the_reason(file_name, reason, images):
    write_csv(images)
    (images / "two.png").rename(images / file_name)
    text = (images / "_annotations.csv").read_text()
    (images / "_annotations.csv").write_text(text.replace("two.png", file_name))
    check_refusal(images, f"_annotations.csv:4: the image '{file_name}': .../set/{file_name}: {reason}")


def test_labels_for_a_scaled_copy_of_all_images_are_converted(images, tmp_path):
    """Training scales them."""
    write_labelme(images)
    for name, (width, height) in SIZES.items():
        cv2.imwrite(str(images / name), np.zeros((2 * height, 2 * width, 3), np.uint8))
    lines = convert(images, tmp_path / "out.json")
    (line,) = [line for line in lines if line.startswith("labels for another size")]
    file = images / "one.json"
    assert line.startswith(f"labels for another size: 3 images of 'train', first one.png (labeled in {file}): ")
    assert line.endswith("labels are for 64x48, the image is 128x96 upright; boxes are scaled by 2")
    assert boxes_of(tmp_path / "out.yaml")["cat", 8, 12, 60, 80] == 1


def test_an_archive_is_to_be_unpacked(tmp_path):
    archive = tmp_path / "export.zip"
    archive.write_bytes(b"PK")
    with pytest.raises(UserError, match=r"export.zip: an archive; unpack it and name the folder"):
        convert(archive, tmp_path / "out.json")


def test_the_flag_names_all_formats():
    assert set(FORMATS) == set(ANNOTATION_FORMATS)
