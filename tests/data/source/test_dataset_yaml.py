"""YAMLs of YOLOv5 and Ultralytics are read unchanged; mistakes in them are one line."""

import pytest

from data.source.dataset_yaml import load_dataset_spec
from tests.data.source.yaml_file import write_yaml
from tests.helpers.messages import refused


def test_splits_names_and_nc_are_read(tmp_path):
    text = """
        train: [images/a, images/b]
        val: val.txt
        test:
        nc: 2
        names: {1: two, 0: one}
        download: import os; os.system("touch ran")
    """
    spec = load_dataset_spec(write_yaml(tmp_path, text))
    assert spec.names == ("one", "two")
    assert spec.split("train").images == (tmp_path / "images/a", tmp_path / "images/b")
    assert spec.split("val").images == (tmp_path / "val.txt",)
    assert not (tmp_path / "ran").exists()
    assert "never run" in str(spec.missing_error(tmp_path / "images"))
    with refused("d.yaml: has no 'test' split, only train, val; add 'test: <folder>'"):
        spec.split("test")
    numbers = load_dataset_spec(write_yaml(tmp_path, "train: t\nnames: [0, 1.5, person]\n"))
    assert numbers.names == ("0", "1.5", "person")
    assert load_dataset_spec(write_yaml(tmp_path, "train: t\nnc: 2\n")).names == ("class_0", "class_1")
    assert "val" in load_dataset_spec(write_yaml(tmp_path, "train: t\nvalidation: v\nnames: [a]\n")).splits


@pytest.mark.parametrize("text", ["# converted from darwin_json", "url: ../region_attributes/set.zip"])
def test_a_yaml_may_mention_an_export(tmp_path, text):
    for name in ("data.yaml", "data.txt"):
        (tmp_path / name).write_text(f"{text}\ntrain: images\nnames: [a]\n")
        assert load_dataset_spec(tmp_path / name).names == ("a",)
    (tmp_path / "export.yaml").write_text('{"version": "darwin_json"}')
    with refused("export.yaml: V7's Darwin JSON: export as COCO or YOLO instead"):
        load_dataset_spec(tmp_path / "export.yaml")


def test_annotations_are_given_per_split_or_for_all(tmp_path):
    (tmp_path / "voc").mkdir()
    body = "train: a\nval: b\nnames: [x]\n"
    one = load_dataset_spec(write_yaml(tmp_path, body + "annotations: voc\n"))
    assert {s: v.annotations for s, v in one.splits.items()} == dict.fromkeys(("train", "val"), tmp_path / "voc")
    each = load_dataset_spec(write_yaml(tmp_path, body + "annotations: {train: a.json}\n"))
    assert each.split("train").annotations == tmp_path / "a.json"
    assert each.split("val").annotations is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian: t\nnames: [a]\n", "unknown key 'trian' (did you mean 'train'?)"),
        ("names: [a]\n", "names no images; add 'train: <folder>' and 'val: <folder>'"),
        ("train: 5\nnames: [a]\n", "train: must be text, got 5"),
        ("train: ['']\nnames: [a]\n", "train: an entry is empty; name a folder, or remove it"),
        (
            "train: t\nnames: [0: a, 1: b]\n",
            "names: {0: 'a'} is not a name; write a list of names, or 'number: name' lines",
        ),
        ("train: t\nnames: [a, [b]]\n", "names: ['b'] is not a name; write a list of names, or 'number: name' lines"),
        (
            "classes = 1\ntrain = train.txt\nnames = obj.names\n",
            "expected keys (path, train, val, names), got str; for a Darknet .data file, name its folder",
        ),
        ("train: t\n", "has no 'names'; list the classes in the order of their ids"),
        ("- a\n", "expected keys (path, train, val, names), got list"),
        ("", "expected keys (path, train, val, names), got NoneType"),
        (
            "train: t\nnames: {0: a, 1: a}\nannotations: x\n",
            "names: several classes are called 'a'; class names must be unique",
        ),
    ],
)
def test_mistakes_are_one_line_that_names_the_file(tmp_path, text, message):
    with refused(f"d.yaml: {message}"):
        load_dataset_spec(write_yaml(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: t\ntrain: u\nnames: [a]\n", "key 'train' appears twice (first in line 1); remove one"),
        ("train: [\n", "expected the node content, but found '<stream end>'"),
    ],
)
def test_mistakes_in_yaml_are_one_line_that_names_the_line(tmp_path, text, message):
    with refused(f"d.yaml:2: {message}"):
        load_dataset_spec(write_yaml(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kpt_shape: [17, 3]", "'kpt_shape' declares a data set of keypoints; only bounding boxes are supported"),
        ("channels: many", "channels: must be a whole number, got 'many'"),
        ("nc: many", "nc: must be a whole number or null, got 'many'"),
        ("annotations: {tran: x}", "annotations: unknown split 'tran' (did you mean 'train'?)"),
        ("annotations: {train: /}", "annotations: train: / is the whole disk; name the folder of the annotations"),
        ("annotations: {val: x}", "annotations for 'val', but no 'val: <folder of its images>'"),
        ("annotations: 5", "annotations: must be 'key: value' lines, got 5"),
    ],
)
def test_wrong_values_are_one_line(tmp_path, line, message):
    with refused(f"d.yaml: {message}"):
        load_dataset_spec(write_yaml(tmp_path, f"train: t\nnames: [a]\n{line}\n"))
