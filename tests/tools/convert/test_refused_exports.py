"""Exports that cannot be converted, and outputs that cannot be written, are refused in one line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from data.dataset.yaml_file import load_dataset_spec
from tests.helpers.messages import refused
from tests.helpers.scripts import call, error_of
from tests.helpers.tool_exports import (
    CORNERS,
    CREATEML,
    WRITERS,
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
    write_rows,
    write_vott,
)
from tools.convert.__main__ import main
from tools.convert.to_coco import convert
from utils.errors import UserError


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
    """Neither command recommends the other: each says what to export instead."""
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
            ": image 'four.png': not found below .../set, where images have names such as one.png",
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
        "set: no format is recognized; formats for --from are cvat, labelbox, labelme, vott, createml, csv, kitti, "
        "huggingface, imagefolder; if the tool that made it writes YOLO txt, COCO JSON or Pascal VOC, export one of "
        "these",
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
    ("name", "message"),
    [("createml", "set/a.json: must be a list, got {'a': 1}"), ("kitti", "set: has no file of KITTI")],
)
def test_files_of_the_named_format_are_read_though_none_is_recognized(name, message, images):
    (images / "a.json").write_text('{"a": 1}')
    check_refusal(images, message, name)
    check_refusal(images / "a.json", message.replace("set:", "set/a.json:"), name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("auto", "no format is recognized{}; formats for --from are ..."), ("kitti", "has no file of KITTI{}")],
)
def test_files_without_content_are_counted(images, name, reason):
    (images / "label_2").mkdir()
    for number in range(2):
        (images / "label_2" / f"{number}.txt").write_text("\n" * number)
    check_refusal(images, f"set: {reason.format('; 2 files without content, first .../set/label_2/0.txt')}", name)


def test_a_folder_that_trains_as_it_is_is_named_with_the_command(images):
    (images / "classes.txt").write_text("cat\n")
    (images / "one.txt").write_text("0 .5 .5 .2 .2\n")
    check_refusal(images, "set: training reads it as it is, without conversion: python train.py --data .../set")


def test_a_json_of_coco_needs_no_conversion(images):
    (images / "a.json").write_text('{"images": [{"id": 1, "file_name": "one.png"}], "annotations": []}')
    for source in (images, images / "a.json"):
        with refused("set/a.json: COCO JSON, which train.py reads as it is; give --data the folder that has it..."):
            convert(source, images.parent / "out.json")


def test_a_damaged_json_is_named_with_the_line(images):
    (images / "a.json").write_text("{\n")
    with refused("set/a.json:2: malformed JSON (...)"):
        convert(images / "a.json", images.parent / "out.json")


def test_a_missing_export_is_named_without_reading_libraries(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.convert.to_coco", None)
    assert error_of(capsys, main, "nowhere", str(tmp_path / "out.json")) == "error: nowhere: no such file or folder"


def test_no_folder_of_a_refused_output_is_left(images, tmp_path):
    write_cvat(images)
    (images / "one.png").unlink()
    (tmp_path / "old").mkdir()
    with refused("...: image 'one.png': not found below ..."):
        convert(images, tmp_path / "old" / "new" / "newer" / "out.json")
    assert list((tmp_path / "old").iterdir()) == []


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


def test_a_copy_of_the_annotations_does_not_double_the_boxes(images):
    write_cvat(images)
    (images / "annotations (1).xml").write_bytes((images / "annotations.xml").read_bytes())
    check_refusal(
        images,
        "annotations.xml: image 'one.png': one.png has the same box of 'cat' in .../annotations (1).xml; remove "
        "one file",
    )


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
    with refused(f"{stem + '.png'!r}: {reason}; rename it, and its label file"):
        convert(images, images / "out.json")
    assert not list(images.glob("out*"))


def test_an_image_name_with_a_backslash_is_refused(images):
    write_cvat(images)
    file = images / "annotations.xml"
    file.write_text(file.read_text().replace("two.png", "t\\wo.png"))
    (images / "two.png").rename(images / "t\\wo.png")
    check_refusal(images, r"'t\\wo.png': has a \, which separates folders in a COCO JSON; rename the image")


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


def test_two_sizes_of_an_image_are_refused(images):
    """The boxes of one row would be wrong."""
    write_csv(images)
    with open(images / "_annotations.csv", "a") as file:
        file.write("two.png,800,600,cat,100,100,200,200\n")
    check_refusal(
        images, "_annotations.csv:6: two.png has 800x600 pixels here, and 80x60 in another entry; remove one of them"
    )


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


def test_an_archive_is_to_be_unpacked(tmp_path):
    archive = tmp_path / "export.zip"
    archive.write_bytes(b"PK")
    with pytest.raises(UserError, match=r"export.zip: an archive; unpack it and name the folder"):
        convert(archive, tmp_path / "out.json")
