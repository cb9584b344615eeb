"""Keys of other programs are read, named in the log, or refused if they are misspelled."""

import pytest

from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.open import open_data
from tests.data.source.yaml_file import write_yaml
from utils.distributed.context import DistributedContext
from utils.errors import UserError

BODY = "train: t\nnames: [a, b]\n"


OF_OTHER_PROGRAMS = {  # the YAML, and the keys that the log names
    "Ultralytics": (
        "task: detect\nname: x\nhash: 0a\nbytes: 5\ncreated_at: 2026-01-02\nupdated_at: 2026-01-03\n",
        "name, hash, bytes, created_at, updated_at",
    ),
    "Supervisely": ("nc: 2\ncolors: [[1, 2, 3], [4, 5, 6]]\n", "colors"),
    "YOLOv6": ("is_coco: False\nanno_path: ../coco/annotations/instances_val2017.json\n", "is_coco, anno_path"),
    "Roboflow": ("nc: 2\nroboflow: {workspace: w, license: MIT}\n", "roboflow"),
    "people": (
        "authors: [me]\ntype: x\nsource: y\ninfo: {a: 1}\nnum_images: 9\ntitle: z\nannotators: 3\n",
        "authors, type, source, info, num_images, title, annotators",
    ),
    "anchors": ("x: &n [a, b]\n.n: 1\n_test: nowhere\n", "x, .n, _test"),
    "other languages": ("names_zh: [c, d]\nclass_names: [e, f]\n", "names_zh, class_names"),
    "many": ("".join(f"info{i:02}: 1\n" for i in range(15)), "info11 and 3 more"),
}


@pytest.mark.parametrize("case", OF_OTHER_PROGRAMS)
def test_keys_that_describe_are_one_line_of_the_log(tmp_path, case, caplog):
    text, keys = OF_OTHER_PROGRAMS[case]
    path = write_yaml(tmp_path, BODY + text)
    (tmp_path / "t").mkdir()
    with caplog.at_level("INFO"):
        spec = open_data(DataSource(str(path)), DistributedContext.single())
    assert spec.names == ("a", "b")
    (line,) = caplog.messages
    assert line.startswith(f"{path}: not used: ")
    assert line.endswith(keys)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *((f"{key}: 1", "nc") for key in ("NC", "cn")),
        *((f"{key}: v", "val") for key in ("vla", "valid", "Val", "vall")),
        *((f"{key}: v", "test") for key in ("tests", "tset")),
        *((f"{key}: 64", "tile") for key in ("tiles", "tile_size")),
        *((f"{key}: 4", "channels") for key in ("channel", "chanels", "num_channels")),
        ("bit: 12", "bits"),
        ("bit_depth: 12", "bits"),
        ("annotation: a.json", "annotations"),
        ("ignored: [a]", "ignore"),
        ("class: {a: b}", "classes"),
        ("paths: .", "path"),
    ],
)
def test_a_misspelled_key_is_an_error_that_names_the_right_one(tmp_path, text, meant):
    with pytest.raises(UserError, match=rf"d.yaml: unknown key '\w+' \(did you mean '{meant}'\?\)$"):
        load_dataset_spec(write_yaml(tmp_path, f"{BODY}{text}\n"))


@pytest.mark.parametrize("key", ["name", "class_names", "Names", "namse"])
def test_names_under_another_key_are_an_error(tmp_path, key):
    with pytest.raises(UserError, match=rf"unknown key '{key}' \(did you mean 'names'\?\)$"):
        load_dataset_spec(write_yaml(tmp_path, f"train: t\n{key}: [a, b]\n"))


@pytest.mark.parametrize("key", ["num_classes", "number_of_classes", "n_classes"])
def test_the_number_of_classes_is_also_checked_under_other_names(tmp_path, key):
    assert load_dataset_spec(write_yaml(tmp_path, f"{BODY}{key}: 2\n")).notes == ()
    with pytest.raises(UserError, match="nc is 3, but 'names' has 2"):
        load_dataset_spec(write_yaml(tmp_path, f"{BODY}{key}: 3\n"))
    path = write_yaml(tmp_path, f"{BODY}nc: 2\n{key}: 3\n")
    assert load_dataset_spec(path).notes == (f"{path}: not used: {key}",)


def test_only_the_first_of_two_other_names_of_a_key_is_used(tmp_path):
    path = write_yaml(tmp_path, f"{BODY}num_classes: 2\nn_classes: 3\n")
    assert load_dataset_spec(path).notes == (f"{path}: not used: n_classes",)


def test_names_without_an_indent_and_a_list_of_classes_are_named(tmp_path):
    with pytest.raises(UserError, match="unknown key '0'; lines 'number: name' belong under 'names:', indented"):
        load_dataset_spec(write_yaml(tmp_path, "train: t\nnames:\n0: a\n1: b\n"))
    with pytest.raises(
        UserError, match=r"has no 'names'; .* \('classes' renames and merges those that 'names' lists\)"
    ):
        load_dataset_spec(write_yaml(tmp_path, "train: t\nclasses: [a, b]\n"))


@pytest.mark.parametrize("task", ["detect", "Detection", "object-detection", "object detection", "bbox", ""])
def test_the_task_of_this_program_is_no_line(tmp_path, task):
    assert load_dataset_spec(write_yaml(tmp_path, f"{BODY}task: {task}\n")).notes == ()


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("segment", "polygons are used as the boxes around them"),
        ("instance-segmentation", "polygons are used as the boxes around them"),
        ("obb", "rotated boxes are used as the upright boxes around them"),
        ("track", "not used; this program detects boxes"),
    ],
)
def test_the_labels_of_other_tasks_are_explained(tmp_path, task, text):
    path = write_yaml(tmp_path, f"{BODY}task: {task}\n")
    (line,) = load_dataset_spec(path).notes
    assert line.startswith(f"{path}: task: {task}: ")
    assert "this program detects boxes" in line
    assert line.endswith(text)


@pytest.mark.parametrize("task", ["pose", "keypoints", "classify", "classification", "semantic segmentation"])
def test_a_task_without_boxes_is_an_error(tmp_path, task):
    with pytest.raises(UserError, match=f"d.yaml: 'task: {task}' declares .*boxes"):
        load_dataset_spec(write_yaml(tmp_path, f"{BODY}task: {task}\n"))
