"""Rule D9: ``--data FOLDER`` reads what annotation tools export, and refuses other folders with what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.data.data_set import BOX, DataSet, boxes, coco, load, num_boxes, open_set, refusal, told, voc

# Class (0: a, 1: b), x, y, w, h in pixels of 80 x 60, by split and stem.
OBJECTS = {
    "train": {"x": [(0, 8, 6, 32, 24), (1, 0, 0, 40, 30)], "y": [(1, 10, 10, 20, 30)]},
    "val": {"v": [(0, 4, 4, 20, 20)], "w": [(1, 8, 8, 40, 40)]},
}
EXPECTED = {
    split: {stem: [("ab"[c], *map(float, box)) for c, *box in objects] for stem, objects in of_split.items()}
    for split, of_split in OBJECTS.items()
}


def txt(objects: list) -> str:
    return "".join(f"{c} {(x + w / 2) / 80} {(y + h / 2) / 60} {w / 80} {h / 60}\n" for c, x, y, w, h in objects)


def xml(objects: list) -> str:
    return voc(*(("ab"[c], x, y, x + w, y + h) for c, x, y, w, h in objects))


def json_of(*splits: str, folder: str = "", rooted: bool = False) -> dict:
    objects = {stem: rows for split in splits for stem, rows in OBJECTS[split].items()}
    entries = [(f"{folder}{stem}.png", [(c + 1, *box) for c, *box in rows]) for stem, rows in objects.items()]
    categories = [{"id": i + 1, "name": name, "supercategory": "shapes"} for i, name in enumerate("ab")]
    root = [{"id": 0, "name": "shapes", "supercategory": "none"}] if rooted else []
    return coco(entries, categories=root + categories)


class Export(NamedTuple):
    """Places of the images and their label files, in which {} is the split as it is called, and other files."""

    images: str
    labels: str = ""
    form: Callable[[list], str] = txt
    called: dict[str, str] | None = None
    files: dict[str, str | bytes | dict] | None = None

    def write(self, folder: Path) -> DataSet:
        export = DataSet(folder)
        for split, of_split in OBJECTS.items():
            folder = (self.called or {}).get(split, split)
            for stem, objects in of_split.items():
                export.images(f"{self.images.format(folder)}/{stem}.png")
                if self.labels:
                    suffix = ".xml" if self.form is xml else ".txt"
                    export.file(f"{self.labels.format(folder)}/{stem}{suffix}", self.form(objects))
        for name, content in (self.files or {}).items():
            export.file(name, content)
        return export


VALID = {"train": "train", "val": "valid"}
NAMES = {"classes.txt": "a\nb\n"}
YOLO = Export("images/{}", "labels/{}", files=NAMES)
ROBOFLOW_VOC = Export("{}", "{}", xml, VALID)
CVAT = {"train": "Train", "val": "Validation"}
CVAT_LISTS = {  # YOLO 1.1: lists with paths that begin with a folder data, which is not in the archive
    f"{name}.txt": "".join(f"data/obj_{name}_data/{stem}.png\n" for stem in OBJECTS[split])
    for split, name in CVAT.items()
}
VOC2012 = "VOCdevkit/VOC2012"
SHOWN = {"data.yaml": "train: ../train/images\nval: ../valid/images\nnc: 2\nnames: ['a', 'b']\n"}
EXPORTS = {
    "YOLO": YOLO,
    "YOLO by split": Export("{}/images", "{}/labels", files=NAMES),
    "unpacked on a Mac": Export(
        "set/images/{}", "set/labels/{}", files={"set/classes.txt": "a\nb", "__MACOSX/._set": b"", ".DS_Store": b""}
    ),
    "Roboflow, YOLO": Export("{}/images", "{}/labels", txt, VALID, SHOWN),
    "Supervision, with the names alone": Export(
        "{}/images", "{}/labels", txt, VALID, {"data.yaml": "names: [a, b]\nnc: 2\n"}
    ),
    "Roboflow, Darknet": Export("{}", "{}", txt, VALID, {f"{n}/_darknet.labels": "a\nb\n" for n in VALID.values()}),
    "Roboflow, COCO": Export(
        "{}",
        called=VALID,
        files={f"{VALID[split]}/_annotations.coco.json": json_of(split, rooted=True) for split in VALID},
    ),
    "Roboflow, VOC": ROBOFLOW_VOC,
    "COCO 2017": Export(
        "{}2017",
        files={f"annotations/instances_{split}2017.json": json_of(split) for split in VALID}
        | {f"annotations/captions_{split}2017.json": {"images": [], "annotations": []} for split in VALID},
    ),
    "CVAT, YOLO": Export(
        "obj_{}_data", "obj_{}_data", txt, CVAT, CVAT_LISTS | {"obj.names": "a\nb\n", "obj.data": "x"}
    ),
    "VOC 2012": Export(
        f"{VOC2012}/JPEGImages",
        f"{VOC2012}/Annotations",
        xml,
        files={f"{VOC2012}/ImageSets/Main/{split}.txt": "\n".join(OBJECTS[split]) for split in OBJECTS},
    ),
    "TensorFlow's tutorial, whose folder training has no image": Export(
        "images/{}", "images/{}", xml, files={"training/labelmap.pbtxt": "item {}"}
    ),
} | {
    f"{train} and {val}": Export("{}", "{}", txt, {"train": train, "val": val}, NAMES)
    for train, val in (
        ("train_images", "valid_images"),
        ("Training", "Validate"),
        ("train-set", "validation_set"),
        ("traindata", "valdata"),
    )
}


@pytest.mark.parametrize("case", EXPORTS)
def test_an_export_has_the_boxes_of_its_source(case, tmp_path, monkeypatch):
    export = EXPORTS[case].write(tmp_path / "export")
    before = {path: path.read_bytes() for path in export.root.rglob("*") if path.is_file()}
    monkeypatch.chdir(export.root)
    spec = open_set(".", ["train", "val"])
    indexes = {split: load(spec, split) for split in spec.splits}
    assert {split: boxes(index) for split, index in indexes.items()} == EXPECTED
    assert not any(index.report.num_findings for index in indexes.values())
    assert {path: path.read_bytes() for path in export.root.rglob("*") if path.is_file()} == before


BOTH = EXPECTED["train"] | EXPECTED["val"]
ALL = json_of("train", "val")
ONE_FOLDER = {
    "LabelImg": Export(".", ".", files=NAMES),
    "LabelImg, VOC": Export(".", ".", xml),
    "Label Studio": Export("images", "labels", files=NAMES),
    "Label Studio, COCO": Export("images", files={"result.json": json_of("train", "val", folder="images/")}),
    "CVAT, COCO": Export("images/default", files={"annotations/instances_default.json": ALL}),
    "a text about the test": Export("images", files={"result.json": ALL, "test.txt": "Notes: x is sharp.\n"}),
}


@pytest.mark.parametrize("case", ONE_FOLDER)
def test_without_splits_all_images_are_for_training(case, tmp_path):
    export = ONE_FOLDER[case].write(tmp_path / "export")
    spec = open_set(export.root)
    assert {split: boxes(load(spec, split)) for split in spec.splits} == {"train": BOTH}


def of(count: int, start: int = 0) -> list[str]:
    return [f"s{i}" for i in range(start, start + count)]


def files_of(*patterns: str, stems: list[str]) -> str:
    return " ".join(pattern.format(stem) for pattern in patterns for stem in stems)


OWN = [{"id": 1, "name": "a"}]
LABELME = '{"shapes": [{"label": "a", "points": [[8, 6], [40, 30]], "shape_type": "rectangle"}]}'
# Files (see `DataSet.write`), others, and the images and boxes that each split uses.
CHOSEN: dict[str, tuple[str, dict, dict[str, tuple[int, int]]]] = {
    "lists of VOC beside a folder train without labels": (
        files_of("JPEGImages/{}.png", "Annotations/{}.xml", stems=of(6)) + " train/photo.png",
        {"ImageSets/Main/train.txt": "\n".join(of(4)), "ImageSets/Main/val.txt": "\n".join(of(2, 4))},
        {"train": (4, 4), "val": (2, 2)},
    ),
    "folders with labels beside lists of another export": (
        files_of("images/train/{0}.png", "labels/train/{0}.txt", stems=of(3))
        + " images/train/s3.png images/val/s4.png labels/val/s4.txt",
        {"classes.txt": "a\n", "train.txt": "images/train/s0.png\n", "test.txt": "images/val/s4.png\n"},
        {"train": (4, 3), "val": (1, 1)},
    ),
    "label files of the splits of one folder": (
        files_of("images/{}.png", stems=of(5)),
        {
            f"annotations/instances_{name}.json": coco([(f"{s}.png", [(1, 1, 1, 9, 9)]) for s in stems], categories=OWN)
            for name, stems in (("Train", of(3)), ("Validation", of(2, 3)))
        },
        {"train": (3, 3), "val": (2, 2)},
    ),
    "a table of TensorFlow's xml_to_csv.py": (
        files_of("train/{}.png", "train/{}.xml", stems=of(20)),
        {"train_labels.csv": "filename,width,height,class,xmin,ymin,xmax,ymax\ns0.png,80,60,x,1,1,9,9\n"},
        {"train": (20, 20)},
    ),
    "LabelMe beside the images, and left over XML": (
        files_of("a/{}.png", stems=of(3)) + " b/x.xml b/y.xml",
        {f"a/{stem}.json": LABELME for stem in of(3)},
        {"train": (3, 3)},
    ),
    "VOC with a folder of images for each split": (
        files_of("Images-train/{0}.png", "Annotations/{0}.xml", stems=of(3))
        + " "
        + files_of("Images-test/{0}.png", "Annotations/{0}.xml", stems=of(2, 3)),
        {"ImageSets/Main/train.txt": "\n".join(of(3)), "ImageSets/Main/test.txt": "\n".join(of(2, 3))},
        {"train": (3, 3), "test": (2, 2)},
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_of_several_exports_the_labeled_one_counts(case, tmp_path):
    export = DataSet(tmp_path / "set")
    files, others, expected = CHOSEN[case]
    export.write(files)
    for name, content in others.items():
        export.file(name, content)
    spec = open_set(export.root)
    indexes = {split: load(spec, split) for split in spec.splits}
    assert {split: (len(index), len(index.classes)) for split, index in indexes.items()} == expected


def test_a_split_whose_rows_all_fit_several_images_is_refused_and_does_not_vanish(tmp_path):
    """RSOD."""
    export = DataSet(tmp_path / "set")
    export.write(files_of("imgs/{0}.png", "Annotations/{0}.xml", stems=of(6)) + " small/s4.png small/s5.png")
    export.file("ImageSets/Main/train.txt", "\n".join(of(3)))
    export.file("ImageSets/Main/val.txt", "\n".join(of(2, 4)))
    assert len(load(export.root)) == 3
    assert "ImageSets/Main/val.txt:1" in refusal(lambda: load(export.root, "val"))


REFUSED: dict[str, dict[str, str | bytes | dict]] = {
    "empty": {},
    "images alone": {"a.png": b""},
    "another tool": {"a.png": b"", "a.json": b"{}"},
    "no names": {"images/a.png": b"", "labels/a.txt": BOX},
    "two YAMLs": {"one.yaml": "train: x\nnames: [a]\n", "two.yaml": "train: y\nnames: [b]\n"},
    "two folders of a split": {"test1/a.png": b"", "test2/a.png": b"", "classes.txt": "a\n"},
    "an empty YAML": {"data.yaml": b"", "images/train/a.png": b""},
    "two formats": {
        "train/a.png": b"",
        "train/_annotations.coco.json": json_of(),
        "valid/b.png": b"",
        "valid/b.txt": BOX,
    },
    "two formats of a split": {"train/x.png": b"", "train/_annotations.coco.json": json_of(), "train/x.txt": BOX},
    "two lists of a split": {"a.png": b"", "train.txt": "a.png", "ImageSets/Main/train.txt": "a", "classes.txt": "a"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_folder_is_one_line_that_names_it(tmp_path, case):
    export = DataSet(tmp_path / "export")
    export.root.mkdir()
    for name, content in REFUSED[case].items():
        export.file(name, content)
    assert str(export.root) in refusal(lambda: open_set(export.root))


ADVISED = {  # folders, and what the YAML of the refusal reads
    "experiencor/kangaroo": ("images/{0}.png annots/{0}.xml", {"train": 4}),
    "a named folder beside labels": ("Tungro/{0}.png labels/{0}.txt", {"train": 4}),
    "RobertLucian/license-plate-dataset": (
        "train/images/{0}.png train/annots/{0}.xml valid/images/{0}.png valid/annots/{0}.xml:2",
        {"train": 4, "val": 8},
    ),
}


@pytest.mark.parametrize("case", ADVISED)
def test_a_refusal_has_the_yaml_that_reads_the_folder(case, tmp_path):
    export = DataSet(tmp_path / "set")
    files, expected = ADVISED[case]
    export.write(files_of(files, stems=of(4)))
    if "labels" in files:
        export.file("labels/classes.txt", "a\n")
    message = refusal(lambda: open_set(export.root))
    export.file("data.yaml", "\n".join(re.findall("'(.*?)'", message.partition("write a YAML with ")[2])))
    spec = open_set(export.root)
    assert {split: len(load(spec, split).classes) for split in spec.splits} == expected


def test_a_refusal_of_images_above_images_names_the_folder_with_the_labels(tmp_path):
    export = DataSet(tmp_path / "set")
    export.write("images/s0.png " + files_of("images/images/{0}.png", "annotations/{0}.xml", stems=of(4)))
    assert "'train: images/images'" in refusal(lambda: load(open_set(export.root)))
    data = export.file("data.yaml", "path: .\ntrain: images/images\nannotations: annotations\n")
    assert told(load(data)) == files_of("images/images/{}.png:1", stems=of(4))


UNREAD = {
    "CreateML": ("a.json", '[{"image": "x.png", "annotations": [{"label": "a", "coordinates": {"x": 1}}]}]'),
    "Supervisely": ("ann/x.png.json", '{"objects": [{"classTitle": "a"}]}'),
    "oriented boxes": ("labelTxt/x.txt", "10 10 40 10 40 40 10 40 disc 0\n"),
    "CSV without header": ("_annotations.csv", "x.png,10,10,40,40,mask\n"),
    "CSV with another header": ("train.csv", "image_name,x_min,y_min,x_max,y_max\nx,10,10,40,40\n"),
    "CSV with a blank first line": (
        "a.csv",
        "\nfilename,width,height,class,xmin,ymin,xmax,ymax\nx.png,80,60,a,1,1,9,9\n",
    ),
    "TFRecord": ("x.tfrecord", ""),
    "Hugging Face": ("metadata.jsonl", "{}"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_a_format_that_is_not_read_is_named(case, tmp_path):
    """With a YAML, too, whose label files are missing."""
    export = DataSet(tmp_path / "set")
    export.images("train/x.png")
    name, content = UNREAD[case]
    file = export.file(name, content)
    title = case.partition(" with")[0]
    assert re.search(f"{file} is .*{title}", refusal(lambda: open_set(export.root)))
    export.yaml(train="train")
    assert re.search(f"{file} is .*{title}", refusal(export.index))


def test_a_data_set_one_level_down_is_named(tmp_path):
    YOLO.write(tmp_path / "repository/data")
    DataSet(tmp_path / "repository").file("scripts/plot.py", "")
    assert f"--data {tmp_path}/repository/data" in refusal(lambda: open_set(tmp_path / "repository"))


def test_other_folders_with_labels_are_named_in_a_line(tmp_path, lines):
    export = ROBOFLOW_VOC.write(tmp_path / "set")
    export.write(files_of("extra/{0}.png", "extra/{0}.xml", "masks/{0}.png", stems=of(3)))
    open_set(export.root)
    (line,) = [text for record in lines.records if "not used" in (text := record.getMessage())]
    assert re.search(r"not used: extra \(.*\b3\b", line)
    assert "masks" not in line


def test_labels_in_two_places_are_refused_with_both_and_a_yaml_decides(tmp_path):
    """Of a folder of annotations with some of the labels, and of YOLO beside its images."""
    export = DataSet(tmp_path / "set")
    export.write(files_of("train/{0}.png", "train/{0}.xml", stems=of(20)))
    export.write(files_of("annotations/{}.xml:2", stems=of(6)))
    message = refusal(lambda: open_set(export.root))
    for text in ("'annotations: {train: train}' (Pascal VOC: 20", "'annotations: {train: annotations}' (Pascal VOC: 6"):
        assert text in message
    export.file("data.yaml", "train: train\nannotations: train\n")
    assert len(load(export.root).classes) == 20
    export = YOLO.write(tmp_path / "yolo")
    export.file("images/val/v.txt")
    message = refusal(lambda: open_set(export.root))
    for text in ("'labels: {val: labels/val}' (YOLO txt: 2", "'labels: {val: images/val}' (YOLO txt: 1"):
        assert text in message


@pytest.mark.parametrize("annotations", ["Annotations", "annotations"])
def test_nothing_outside_a_folder_is_read(tmp_path, annotations):
    """Labels of somebody else are beside the folder, where they would count if a YAML named it."""
    around = DataSet(tmp_path / "images/mine")
    photos = DataSet(around.root / "photos")
    around.write(files_of(f"{annotations}/{{0}}.xml:9", "../../labels/mine/photos/{0}.txt:9", stems=of(2)))
    photos.write(files_of("{0}.png", "{0}.xml", stems=of(2)))
    assert told(load(photos.root)) == "s0.png:1 s1.png:1"
    for stem in of(2):
        (photos.root / f"{stem}.xml").rename(photos.root / f"{stem}.txt")
        photos.file(f"{stem}.txt")
    photos.file("classes.txt", "own\n")
    assert told(load(photos.root)) == "s0.png:1 s1.png:1"


def test_a_yaml_in_a_folder_decides(tmp_path):
    export = YOLO.write(tmp_path / "export")
    export.file("data.yaml", yaml.safe_dump({"train": "images/val", "names": ["p", "q"]}))
    spec = open_set(export.root)
    assert spec.names == ("p", "q")
    assert set(num_boxes(load(spec))) == {"images/val/v.png", "images/val/w.png"}
