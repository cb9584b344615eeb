"""The data set's YAML: paths, names, classes, and mistakes, each of which is one line that names the file."""

from __future__ import annotations

import pytest
import yaml

from tests.data.data_set import DataSet, load, num_boxes, open_set, refusal
from tests.helpers.repository import ROOT

PATHS = {  # the key ``path``, and the folder of the YAML
    "relative to the YAML": (".", "set"),
    "its default": (None, "set"),
    "a folder beside the YAML's": ("../set", "yamls"),
    "relative to the working folder": ("set", "yamls"),
    "absolute": ("{root}", "yamls"),
    "with Windows separators": ("..\\set", "yamls"),
}


@pytest.mark.parametrize("case", PATHS)
def test_paths_are_relative_to_the_key_path_or_to_the_yaml(data, tmp_path, monkeypatch, case):
    path, folder = PATHS[case]
    monkeypatch.chdir(tmp_path)
    data.pairs("train/x")
    content = {"train": "images/train", "names": ["a"]}
    if path is not None:
        content["path"] = path.format(root=data.root)
    named = DataSet(tmp_path / folder).file("data.yaml", yaml.safe_dump(content))
    assert num_boxes(load(named)) == {"images/train/x.png": 1}


@pytest.mark.parametrize("train", ["../train/images", "train/images", ["train/images"], "train\\images"])
def test_an_entry_of_roboflow_is_read_as_beside_the_yaml(data, train):
    data.images("train/images/x.png")
    data.file("train/labels/x.txt")
    data.yaml(train=train)
    assert num_boxes(data.index()) == {"train/images/x.png": 1}


def test_an_entry_of_roboflow_is_not_read_from_another_export_in_the_parent(tmp_path):
    """As of an export that is unpacked in the folder of another."""
    for folder, stem in (("set", "outer"), ("set/inner", "x")):
        export = DataSet(tmp_path / folder)
        export.images(f"train/images/{stem}.png")
        export.file(f"train/labels/{stem}.txt")
    export.yaml(train="../train/images")
    assert num_boxes(export.index()) == {"train/images/x.png": 1}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"path": "/content/set", "train": "images/train"}, {"path": "."}),
        ({"train": "/content/set/images/train"}, {"train": "images/train"}),
        ({"path": "D:\\me\\set", "train": "images\\train"}, {"path": "."}),
        ({"train": "C:\\me\\set\\images\\train"}, {"train": "images/train"}),
    ],
)
def test_a_yaml_of_another_machine_says_which_line_to_write(data, content, line):
    data.pairs("train/x")
    data.file("data.yaml", yaml.safe_dump(content | {"names": ["a"]}))
    message = refusal(data.index)
    assert f"{data.root}/images/train exists" in message
    assert next(iter(line.values())) in message
    data.file("data.yaml", yaml.safe_dump(content | {"names": ["a"]} | line))
    assert num_boxes(data.index()) == {"images/train/x.png": 1}


NAMES = {
    "[cat, dog]": ("cat", "dog"),
    "{1: dog, 0: cat}": ("cat", "dog"),
    "{'0': cat, 01: dog}": ("cat", "dog"),
    "[012, 0x1F, 1e3, 1.50]": ("012", "0x1F", "1e3", "1.50"),
    "['yes', \"\u00fc\", ' a b ']": ("yes", "\u00fc", "a b"),
    "[yes, no, off, 2024-02-30]": ("yes", "no", "off", "2024-02-30"),
}


@pytest.mark.parametrize("names", NAMES)
def test_names_are_read_as_they_are_written(data, names):
    data.pairs("train/x")
    data.file("data.yaml", f"train: images/train\nnames: {names}\n")
    assert open_set(data.data).names == NAMES[names]


MISTAKES = [
    "names: []",
    "names: person",
    "names: {0: a, 2: b}",
    "names: {a: 0}",
    "names: [a, a]",
    "names: [a, null]",
    'names: ["a\\nb"]',
    "nc: 3",
    "nc: none",
    "classes: [a]",
    "classes: {c: a}",
    "classes: {a: null}",
    "ignore: a",
    "ignore: [a, b]",
    "{classes: {a: b}, ignore: [a]}",
    "kpt_shape: [17, 3]",
    "channels: 0",
    "bits: 20",
    "tile: 1",
    "train: 5",
    "train: [images/train, '']",
    "train: [images/train, other.yaml]",
    "annotations: {trian: a.json}",
    "annotations: {test: a.json}",
    "annotations: a.csv",
    "path: 5",
    'train: "images\\train"',  # a tab
    "[not, a, map]",
    "names: [a",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_file(data, mistake):
    data.pairs("train/x")
    base = {"train": "images/train", "names": ["a", "b"]}
    try:
        content = yaml.safe_load(mistake)
    except yaml.YAMLError:
        content = None
    text = yaml.safe_dump(base | content) if isinstance(content, dict) else mistake
    data.file("data.yaml", text)
    assert str(data.data) in refusal(lambda: open_set(data.data, ["train"]))


def test_keys_that_are_not_used_are_one_line(data, lines):
    data.pairs("train/x")
    open_set(data.yaml(train="images/train", vall="images/val", roboflow={"version": 1}, title="x"), ["train"])
    (line,) = [text for record in lines.records if "not used" in (text := record.getMessage())]
    assert "vall, roboflow, title" in line


def test_the_content_of_a_data_set_is_read_as_the_same_classes(data):
    """Copies and folds store it. One class has the name of the value that ignores a class."""
    data.pairs("train/x")
    for chosen in ({"classes": {"a": "b"}}, {"ignore": ["ignore"]}, {"classes": {"a": "x"}, "ignore": ["b"]}):
        spec = open_set(data.yaml(train="images/train", names=["a", "b", "ignore"], tile=64, **chosen))
        copy = data.file("copy.yaml", yaml.safe_dump({"train": "images/train"} | spec.content()))
        again = open_set(copy)
        for name in ("names", "label_names", "class_of", "tile", "pixels"):
            assert getattr(again, name) == getattr(spec, name)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_yamls_name_classes_and_download_nothing(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "download" not in yaml.safe_load(path.read_text())
    spec = open_set(path)
    assert {"train", "val"} <= set(spec.splits)
    if path.stem.startswith("coco"):
        assert (len(spec.names), spec.names[0], spec.names[79]) == (80, "person", "toothbrush")
    if path.stem != "template":
        assert "https://" in refusal(lambda: open_set(path, ["train"]))
