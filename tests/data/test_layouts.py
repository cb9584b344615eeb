"""``--data FOLDER``: exports of annotation tools have the boxes of the data set from which they were made."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable

import pytest
import yaml

from tests.data.data_set import BOX, DataSet, boxes, coco, load, num_boxes, open_set, refusal, voc

# Class (0: a, 1: b), x, y, w, h in pixels of 80 x 60, by split and stem.
OBJECTS = {
    "train": {"x": [(0, 8, 6, 32, 24), (1, 0, 0, 40, 30)], "y": [(1, 10, 10, 20, 30)]},
    "val": {"v": [(0, 4, 4, 20, 20)], "w": [(1, 8, 8, 40, 40)]},
}
VALID = {"train": "train", "val": "valid"}


def txt(objects: list) -> str:
    return "".join(f"{c} {(x + w / 2) / 80} {(y + h / 2) / 60} {w / 80} {h / 60}\n" for c, x, y, w, h in objects)


def xml(objects: list) -> str:
    return voc(*(("ab"[c], x, y, x + w, y + h) for c, x, y, w, h in objects))


def json_of(split: str, *, rooted: bool = False) -> dict:
    entries = [(f"{stem}.png", [(c + 1, *box) for c, *box in rows]) for stem, rows in OBJECTS[split].items()]
    categories = [{"id": i + 1, "name": name, "supercategory": "shapes"} for i, name in enumerate("ab")]
    root = [{"id": 0, "name": "shapes", "supercategory": "none"}] if rooted else []
    return coco(entries, categories=root + categories)


def write(export: DataSet, images: str, labels: str = "", form: Callable = txt, called: dict | None = None) -> None:
    """Writes the images, and a label file of each. In places, {} is the split, as ``called`` names it."""
    for split, of_split in OBJECTS.items():
        folder = (called or {}).get(split, split)
        for stem, objects in of_split.items():
            export.images(f"{images.format(folder)}/{stem}.png".removeprefix("./"))
            if labels:
                suffix = ".xml" if form is xml else ".txt"
                export.file(f"{labels.format(folder)}/{stem}{suffix}".removeprefix("./"), form(objects))


def yolo(export: DataSet) -> None:
    write(export, "images/{}", "labels/{}")
    export.file("classes.txt", "a\nb\n")


def yolo_by_split(export: DataSet) -> None:
    write(export, "{}/images", "{}/labels")
    export.file("classes.txt", "a\nb\n")


def roboflow_yolo(export: DataSet) -> None:
    write(export, "{}/images", "{}/labels", called=VALID)
    export.file("data.yaml", "train: ../train/images\nval: ../valid/images\nnc: 2\nnames: ['a', 'b']\n")


def supervision(export: DataSet) -> None:
    """Its YAML has the names alone."""
    write(export, "{}/images", "{}/labels", called=VALID)
    export.file("data.yaml", "names: [a, b]\nnc: 2\n")


def roboflow_darknet(export: DataSet) -> None:
    write(export, "{}", "{}", called=VALID)
    for folder in VALID.values():
        export.file(f"{folder}/_darknet.labels", "a\nb\n")


def roboflow_coco(export: DataSet) -> None:
    write(export, "{}", called=VALID)
    for split, folder in VALID.items():
        export.file(f"{folder}/_annotations.coco.json", json_of(split, rooted=True))


def roboflow_voc(export: DataSet) -> None:
    write(export, "{}", "{}", xml, VALID)


def coco_2017(export: DataSet) -> None:
    write(export, "{}2017")
    for split in OBJECTS:
        export.file(f"annotations/instances_{split}2017.json", json_of(split))
        export.file(f"annotations/captions_{split}2017.json", {"images": [], "annotations": []})


def cvat_yolo(export: DataSet) -> None:
    """YOLO 1.1: lists with paths that begin with a folder data, which is not in the archive."""
    called = {"train": "Train", "val": "Validation"}
    write(export, "obj_{}_data", "obj_{}_data", called=called)
    for split, name in called.items():
        rows = "".join(f"data/obj_{name}_data/{stem}.png\n" for stem in OBJECTS[split])
        export.file(f"{name}.txt", rows)
    export.file("obj.names", "a\nb\n")
    export.file("obj.data", "classes = 2\ntrain = data/train.txt\n")


def voc_devkit(export: DataSet) -> None:
    base = "VOCdevkit/VOC2012"
    write(export, f"{base}/JPEGImages", f"{base}/Annotations", xml)
    for split, of_split in OBJECTS.items():
        export.file(f"{base}/ImageSets/Main/{split}.txt", "".join(f"{stem}\n" for stem in of_split))


def unpacked_on_a_mac(export: DataSet) -> None:
    yolo(DataSet(export.root / "my set"))
    export.file("__MACOSX/._my set", b"")
    export.file(".DS_Store", b"")


EXPORTS = [
    yolo,
    yolo_by_split,
    roboflow_yolo,
    supervision,
    roboflow_darknet,
    roboflow_coco,
    roboflow_voc,
    coco_2017,
    cvat_yolo,
    voc_devkit,
    unpacked_on_a_mac,
]


def expected(split: str) -> dict[str, list[tuple]]:
    return {stem: [("ab"[c], *map(float, box)) for c, *box in rows] for stem, rows in OBJECTS[split].items()}


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.__name__)
def test_an_export_has_the_boxes_of_its_source(export, tmp_path):
    folder = DataSet(tmp_path / "export")
    export(folder)
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    spec = open_set(folder.root, ["train", "val"])
    for split in OBJECTS:
        index = load(spec, split)
        assert boxes(index) == expected(split)
        assert len(index.report.findings) == 0
    assert {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()} == before


def labelimg(export: DataSet) -> None:
    write(export, ".", ".")
    export.file("classes.txt", "a\nb\n")


def labelimg_voc(export: DataSet) -> None:
    write(export, ".", ".", xml)


def label_studio(export: DataSet) -> None:
    write(export, "images", "labels")
    export.file("classes.txt", "a\nb\n")


def cvat_coco(export: DataSet) -> None:
    write(export, "images/default")
    export.file("annotations/instances_default.json", json_of_all())


def label_studio_coco(export: DataSet) -> None:
    write(export, "images")
    content = json_of_all()
    content["images"] = [image | {"file_name": f"images/{image['file_name']}"} for image in content["images"]]
    export.file("result.json", content)


def json_of_all() -> dict:
    content = json_of("train")
    more = json_of("val")
    content["images"] += [image | {"id": image["id"] + 100} for image in more["images"]]
    content["annotations"] += [a | {"id": a["id"] + 100, "image_id": a["image_id"] + 100} for a in more["annotations"]]
    return content


@pytest.mark.parametrize(
    "export", [labelimg, labelimg_voc, label_studio, label_studio_coco, cvat_coco], ids=lambda e: e.__name__
)
def test_without_splits_all_images_are_for_training(export, tmp_path):
    export(DataSet(tmp_path / "export"))
    spec = open_set(tmp_path / "export")
    assert list(spec.splits) == ["train"]
    assert boxes(load(spec)) == expected("train") | expected("val")


def test_a_folder_may_be_named_from_within(tmp_path, monkeypatch):
    roboflow_coco(DataSet(tmp_path / "export"))
    monkeypatch.chdir(tmp_path / "export")
    assert boxes(load(open_set("."), "val")) == expected("val")


JSON = coco([("a.png", [(1, 5, 5, 20, 20)]), ("b.png", [])])
REFUSED = {
    "empty": {},
    "images alone": {"a.png": b""},
    "another tool": {"a.png": b"", "a.json": b"{}"},
    "no names": {"images/a.png": b"", "labels/a.txt": b"0 0.5 0.5 0.1 0.1\n"},
    "two YAMLs": {"one.yaml": b"train: x\nnames: [a]\n", "two.yaml": b"train: y\nnames: [b]\n"},
    "two folders of a split": {"test1/a.png": b"", "test2/a.png": b"", "classes.txt": b"a\n"},
    "an empty YAML": {"data.yaml": b"", "images/train/a.png": b""},
    "COCO and YOLO": {"train/a.png": b"", "train/_annotations.coco.json": JSON, "valid/b.png": b"", "valid/b.txt": BOX},
    "COCO and YOLO of a split": {
        "train/x.png": b"",
        "train/_annotations.coco.json": JSON,
        "train/x.txt": BOX,
        "classes.txt": b"a",
    },
    "two lists of a split": {"train.txt": b"a.png\n", "ImageSets/Main/train.txt": b"a\n", "classes.txt": b"a\n"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_folder_is_one_line_that_names_it(tmp_path, case):
    export = DataSet(tmp_path / "export")
    export.root.mkdir()
    for name, content in REFUSED[case].items():
        export.file(name, content)
    assert str(tmp_path / "export") in refusal(lambda: open_set(export.root))


def described(message: str) -> dict:
    """Returns the YAML that a message tells to write."""
    lines = re.findall(r"'((?:path|train|val|test|annotations|labels|names): [^']*)'", message)
    return yaml.safe_load("\n".join(lines))


def named_annotations(export: DataSet) -> None:
    """As in experiencor/kangaroo."""
    for stem in of(4):
        export.images(f"images/{stem}.png")
        export.file(f"annots/{stem}.xml", voc(("own", 10, 10, 60, 50)))


def labels_beside_a_named_folder(export: DataSet) -> None:
    export.images(*(f"Tungro/{stem}.png" for stem in of(4)))
    for stem in of(4):
        export.file(f"labels/{stem}.txt")
    export.file("labels/classes.txt", "own\n")


def copies_above(export: DataSet) -> None:
    export.images("images/s0.png", *(f"images/images/{stem}.png" for stem in of(4)))
    for stem in of(4):
        export.file(f"annotations/{stem}.xml", voc(("own", 10, 10, 60, 50)))


@pytest.mark.parametrize("write", [named_annotations, labels_beside_a_named_folder, copies_above])
def test_a_refusal_has_the_yaml_that_reads_the_folder(write, tmp_path):
    export = DataSet(tmp_path / "set")
    write(export)
    message = refusal(lambda: load(open_set(export.root)))
    if write is copies_above:
        assert "'train: images/images'" in message
        content = {"path": ".", "train": "images/images", "annotations": "annotations"}
    else:
        assert "docs/formats.md" in message
        content = described(message)
        assert content.get("names", ["own"]) == ["own"]
    found = num_boxes(load(export.file("data.yaml", yaml.safe_dump(content))))
    assert list(found.values()) == [1] * 4


UNREAD = {
    "CreateML": ("a.json", '[{"image": "x.png", "annotations": [{"label": "a", "coordinates": {"x": 1}}]}]'),
    "Supervisely": ("ann/x.png.json", '{"objects": [{"classTitle": "a"}]}'),
    "oriented boxes": ("labelTxt/x.txt", "10 10 40 10 40 40 10 40 disc 0\n"),
    "a CSV without a header": ("_annotations.csv", "x.png,10,10,40,40,mask\n"),
    "TFRecord": ("x.tfrecord", ""),
    "Hugging Face": ("metadata.jsonl", "{}"),
}


@pytest.mark.parametrize("title", UNREAD)
def test_a_format_that_is_not_read_is_named(title, tmp_path):
    export = DataSet(tmp_path / "set")
    export.images("train/x.png")
    name, content = UNREAD[title]
    file = export.file(name, content)
    message = refusal(lambda: open_set(export.root))
    assert f"{file} is {title}" in message


def test_a_yaml_whose_labels_are_not_read_names_their_format(data):
    """As Roboflow's export of oriented boxes."""
    data.images("train/images/x.png")
    file = data.file("train/labelTxt/x.txt", "10 10 40 10 40 40 10 40 disc 0\n")
    data.yaml(train="train/images")
    assert f"{file} is oriented boxes" in refusal(data.index)


def test_a_data_set_one_level_down_is_named(tmp_path):
    yolo(DataSet(tmp_path / "repository/data"))
    DataSet(tmp_path / "repository").file("scripts/plot.py", "")
    assert f"--data {tmp_path}/repository/data" in refusal(lambda: open_set(tmp_path / "repository"))


@pytest.mark.parametrize(
    "called",
    [
        {"train": "train_images", "val": "valid_images"},
        {"train": "Training", "val": "Validate"},
        {"train": "train-set", "val": "validation_set"},
        {"train": "traindata", "val": "valdata"},
        {"train": "train2017", "val": "val2017"},
    ],
)
def test_splits_are_folders_of_the_usual_names(called, tmp_path):
    export = DataSet(tmp_path / "set")
    write(export, "{}", "{}", called=called)
    export.file("classes.txt", "a\nb\n")
    spec = open_set(export.root)
    assert {split: boxes(load(spec, split)) for split in spec.splits} == {split: expected(split) for split in OBJECTS}


def test_a_folder_without_an_image_and_one_with_splits_below_are_no_splits(tmp_path):
    """As in TensorFlow's tutorial, where training has the configuration."""
    export = DataSet(tmp_path / "set")
    write(export, "data/train/{}", "data/train/{}", xml)
    export.file("training/labelmap.pbtxt", "item {}")
    assert list(open_set(export.root).splits) == ["train", "val"]


def test_a_text_named_after_a_split_that_names_no_image_is_no_list(tmp_path):
    export = DataSet(tmp_path / "set")
    label_studio_coco(export)
    export.file("test.txt", "Notes about the test: sharp images only.\n")
    spec = open_set(export.root)
    assert list(spec.splits) == ["train"]
    assert boxes(load(spec)) == expected("train") | expected("val")


def test_a_folder_that_cannot_be_listed_and_is_no_split_is_left_out(tmp_path, monkeypatch):
    """As lost+found, which only the administrator lists."""
    export = DataSet(tmp_path / "set")
    yolo(export)
    closed = export.root / "lost+found"
    closed.mkdir()
    plain_scandir = os.scandir

    def scandir(path="."):
        if os.fspath(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(closed))
        return plain_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert boxes(load(open_set(export.root), "val")) == expected("val")


def test_other_folders_with_labels_are_named_in_a_line(tmp_path, lines):
    export = DataSet(tmp_path / "set")
    roboflow_voc(export)
    for stem in of(3):
        export.images(f"extra/{stem}.png", f"masks/{stem}.png")
        export.file(f"extra/{stem}.xml", voc(("a", 1, 1, 9, 9)))
    open_set(export.root)
    (line,) = [text for record in lines.records if "not used" in (text := record.getMessage())]
    assert "extra" in line
    assert "3" in line
    assert "masks" not in line


def of(count: int, start: int = 0) -> list[str]:
    return [f"s{i}" for i in range(start, start + count)]


def leftover_annotations(export: DataSet) -> None:
    """A folder of annotations with some of the labels, which are beside all images."""
    for stem in of(20):
        export.images(f"train/{stem}.png")
        export.file(f"train/{stem}.xml", voc(("own", 10, 10, 60, 50)))
    for stem in of(6):
        export.file(f"annotations/{stem}.xml", voc(("other", 1, 1, 9, 9)))


def stray_train(export: DataSet) -> None:
    export.images("train/photo1.png", "train/photo2.png", *(f"JPEGImages/{stem}.png" for stem in of(6)))
    for stem in of(6):
        export.file(f"Annotations/{stem}.xml", voc(("own", 10, 10, 60, 50)))
    export.file("ImageSets/Main/train.txt", "\n".join(of(4)))
    export.file("ImageSets/Main/val.txt", "\n".join(of(2, 4)))


def list_of_a_part(export: DataSet) -> None:
    """Lists of another export: one names an image of the folder, which also has a background."""
    export.images(*(f"images/train/{stem}.png" for stem in of(4)), *(f"images/val/{stem}.png" for stem in of(2, 4)))
    for stem in of(3):
        export.file(f"labels/train/{stem}.txt")
    export.file("labels/val/s4.txt")
    export.file("classes.txt", "own\n")
    export.file("train.txt", "images/train/s0.png\n")
    export.file("test.txt", "images/val/s4.png\n")


def coco_of_two_splits(export: DataSet) -> None:
    export.images(*(f"images/{stem}.png" for stem in of(5)))
    for name, stems in (("Train", of(3)), ("Validation", of(2, 3))):
        entries = [(f"{stem}.png", [(1, 1, 1, 9, 9)]) for stem in stems]
        export.file(f"annotations/instances_{name}.json", coco(entries, categories=[{"id": 1, "name": "own"}]))


def table_of_xml(export: DataSet) -> None:
    """As of TensorFlow's xml_to_csv.py."""
    leftover_annotations(export)
    shutil.rmtree(export.root / "annotations")
    export.file("train_labels.csv", "filename,width,height,class,xmin,ymin,xmax,ymax\ns0.png,80,60,x,1,1,9,9\n")


CHOSEN = {  # number of boxes by split
    stray_train: {"train": 4, "val": 2},
    list_of_a_part: {"train": 3, "val": 1},
    coco_of_two_splits: {"train": 3, "val": 2},
    table_of_xml: {"train": 20},
}


@pytest.mark.parametrize("export", CHOSEN, ids=lambda export: export.__name__)
def test_of_several_exports_the_labeled_one_counts(export, tmp_path):
    export(DataSet(tmp_path / "set"))
    spec = open_set(tmp_path / "set")
    assert spec.names == ("own",)
    assert {split: len(load(spec, split).classes) for split in spec.splits} == CHOSEN[export]


def test_labels_in_two_places_are_refused_with_both_and_a_yaml_decides(tmp_path):
    export = DataSet(tmp_path / "set")
    leftover_annotations(export)
    message = refusal(lambda: open_set(export.root))
    for text in ("'annotations: train' (Pascal VOC: 20)", "'annotations: annotations' (Pascal VOC: 6)"):
        assert text in message
    export.file("data.yaml", "train: train\nannotations: train\n")
    assert len(load(export.root).classes) == 20


def test_labels_of_a_split_in_two_places_are_refused_with_its_name(tmp_path):
    export = DataSet(tmp_path / "set")
    yolo(export)
    export.file("images/val/v.txt")
    message = refusal(lambda: open_set(export.root))
    assert "'labels: {val: labels/val}' (2 files)" in message
    assert "'labels: {val: images/val}' (1 file)" in message


def test_a_name_of_a_list_means_the_only_image_of_its_stem(tmp_path):
    """As of Pascal VOC sets with a folder of images for each split."""
    export = DataSet(tmp_path / "set")
    for split, stems in (("train", of(3)), ("test", of(2, 3))):
        export.images(*(f"JPEGImages-{split}/{stem}.png" for stem in stems))
        export.file(f"ImageSets/Main/{split}.txt", "\n".join(stems))
        for stem in stems:
            export.file(f"Annotations/{stem}.xml", voc(("own", 10, 10, 60, 50)))
    spec = open_set(export.root)
    assert {split: len(load(spec, split).classes) for split in spec.splits} == {"train": 3, "test": 2}


@pytest.mark.parametrize("annotations", ["Annotations", "annotations"])
def test_nothing_outside_a_folder_is_read(tmp_path, annotations):
    """Labels of somebody else are beside the folder, where they would count if a YAML named it."""
    around = DataSet(tmp_path / "images/mine")
    photos = DataSet(around.root / "photos")
    for stem in of(2):
        photos.images(f"{stem}.png")
        photos.file(f"{stem}.xml", voc(("own", 10, 10, 60, 60)))
        around.file(f"{annotations}/{stem}.xml", voc(("foreign", 1, 1, 9, 9)))
        around.file(f"../../labels/mine/photos/{stem}.txt")
    spec = open_set(photos.root)
    assert spec.names == ("own",)
    assert boxes(load(spec))["s0"] == [("own", 10, 10, 50, 50)]
    for stem in of(2):
        (photos.root / f"{stem}.xml").rename(photos.root / f"{stem}.txt")
        photos.file(f"{stem}.txt", "0 0.5 0.5 0.5 0.5\n")
    photos.file("classes.txt", "own\n")
    assert boxes(load(open_set(photos.root)))["s0"] == [("own", 20, 15, 40, 30)]


def test_a_yaml_in_a_folder_decides(tmp_path):
    export = DataSet(tmp_path / "export")
    yolo(export)
    export.file("data.yaml", "train: images/val\nval: images/train\nnames: [p, q]\n")
    spec = open_set(export.root)
    assert spec.names == ("p", "q")
    assert set(boxes(load(spec))) == set(OBJECTS["val"])


def test_the_yaml_of_a_refusal_reads_each_split_with_its_own_labels(tmp_path):
    """RobertLucian/license-plate-dataset: an unknown name of a folder, in both splits. Here stems are equal, too."""
    export = DataSet(tmp_path / "set")
    for split, count in (("train", 1), ("valid", 3)):
        export.images(f"{split}/images/1.png")
        export.file(f"{split}/annots/1.xml", voc(*[("own", 1, 1, 9, 9)] * count))
    message = refusal(lambda: open_set(export.root))
    export.file("data.yaml", "\n".join(re.findall("'(.*?)'", message.partition("write a YAML with ")[2])))
    assert [len(load(export.root, split).classes) for split in ("train", "val")] == [1, 3]
