"""YAMLs of YOLOv5 and Ultralytics are read unchanged; mistakes in them are one line."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from data.labels.coco import read_coco
from data.labels.yolo import YOLO
from data.source.dataset_spec import DataSource
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.missing_data import labels_without_images, nearby_paths_hint
from data.source.open import open_data
from tests.helpers.messages import refused
from tests.helpers.open_counter import OpenCounter
from tests.helpers.tiny import write_dataset
from utils.distributed.context import DistributedContext
from utils.errors import UserError

CONFIGS = Path(__file__).parents[3] / "configs" / "data"


def write(folder, text, name="d.yaml"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_path_is_looked_up_next_to_the_yaml_then_in_the_working_folder(tmp_path, monkeypatch):
    here = tmp_path / "here"
    home = tmp_path / "home"
    for folder in (here / "set", home / "set", here / "only"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    body = "train: images/train\nnames: [a]\n"
    assert load_dataset_spec(write(home, "path: set\n" + body)).root == home / "set"
    assert load_dataset_spec(write(home, "path: only\n" + body)).root == here / "only"
    assert load_dataset_spec(write(home, f"path: {here / 'set'}\n" + body)).root == here / "set"
    assert load_dataset_spec(write(home, "path: ../here/set\n" + body)).root == here / "set"
    assert load_dataset_spec(write(home, "path: nowhere\n" + body)).root == home / "nowhere"
    for nothing in ("", "path:\n"):
        spec = load_dataset_spec(write(home, nothing + body))
        assert spec.root == home
        assert spec.split("train").images == (home / "images" / "train",)
    assert load_dataset_spec(os.path.relpath(home / "d.yaml", here)).root == home


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("a\nb", "'ba\\nbb'"),
        ("a\r", "'ba\\rb'"),
        ("\x1b[31mred", "'b\\x1b[31mredb'"),
        ("a\x85b", "'ba\\x85bb'"),
        ("a\u2028b", "'ba\\u2028bb'"),
        ("a\tb", "'ba\\tbb'"),
    ],
)
def test_class_names_are_one_line(tmp_path, broken, message):
    """They come from the YAML, or from a COCO JSON if the YAML has none."""
    text = "train: images\nnames: [fine, {}]\n".format(json.dumps(f"b{broken}b"))
    with refused(f"d.yaml: names: {message} contains a line break or another control character"):
        load_dataset_spec(write(tmp_path, text))
    categories = [{"id": 1, "name": f"b{broken}b"}]
    (tmp_path / "a.json").write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    with refused(f"d.yaml: names: {message} contains a line break or another control character"):
        load_dataset_spec(write(tmp_path, "train: images\nannotations: a.json\n"))
    good = "train: images\nnames: ['two  spaces', 'é 犬 👩\u200d🚒', '\u3000wide x']\n"
    assert load_dataset_spec(write(tmp_path, good)).names[:2] == ("two  spaces", "é 犬 👩\u200d🚒")


def test_splits_names_and_nc_are_read(tmp_path):
    text = """
        train: [images/a, images/b]
        val: val.txt
        test:
        nc: 2
        names: {1: two, 0: one}
        download: import os; os.system("touch ran")
    """
    spec = load_dataset_spec(write(tmp_path, text))
    assert spec.names == ("one", "two")
    assert spec.split("train").images == (tmp_path / "images/a", tmp_path / "images/b")
    assert spec.split("val").images == (tmp_path / "val.txt",)
    assert not (tmp_path / "ran").exists()
    assert "never run" in str(spec.missing_error(tmp_path / "images"))
    with refused("d.yaml: has no 'test' split, only train, val; add 'test: <folder>'"):
        spec.split("test")
    numbers = load_dataset_spec(write(tmp_path, "train: t\nnames: [0, 1.5, person]\n"))
    assert numbers.names == ("0", "1.5", "person")
    assert load_dataset_spec(write(tmp_path, "train: t\nnc: 2\n")).names == ("class_0", "class_1")
    assert "val" in load_dataset_spec(write(tmp_path, "train: t\nvalidation: v\nnames: [a]\n")).splits


@pytest.mark.parametrize(
    ("classes", "used"), [(["cow", 0], (0, 2)), ([1, "dog", "dog"], (1,)), ([2, 1, 0], ()), ([], ())]
)
def test_classes_are_chosen_by_number_or_name(tmp_path, classes, used):
    """Choosing none, (), means all of them."""
    spec = load_dataset_spec(write(tmp_path, "train: a\nnames: [cat, dog, cow]\n"))
    assert spec.use_classes(classes).classes == used


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["dig"], "--classes dig: .../d.yaml has no class of this name (did you mean 'dog'?)"),
        ([3], "--classes 3: .../d.yaml has classes 0 to 2"),
    ],
)
def test_unknown_classes_are_refused(tmp_path, classes, message):
    spec = load_dataset_spec(write(tmp_path, "train: a\nnames: [cat, dog, cow]\n"))
    with refused(message):
        spec.use_classes(classes)


def test_parent_folder_entries_of_exports_resolve_to_the_yamls_folder(tmp_path):
    """A labeling service exports ``../train/images`` although ``train/images`` is next to the YAML."""
    (tmp_path / "set" / "train" / "images").mkdir(parents=True)
    text = "train: ../train/images\nval: ../valid/images\nnc: 1\nnames: ['a']\nroboflow:\n  license: MIT\n"
    spec = load_dataset_spec(write(tmp_path / "set", text))
    assert spec.split("train").images == (tmp_path / "set" / "train" / "images",)
    assert spec.split("val").images == (tmp_path / "valid" / "images",)


@pytest.mark.parametrize(
    ("there", "entry", "message"),
    [
        ("images/validate", "images/val", "; '.../images/validate' exists"),
        ("Images/val", "images/val", "; '.../Images' exists"),
        ("images/a images/b", "images/val", "; .../images has a, b"),
        ("valid", "images/val", ""),
        ("a b c d e f", "val", "; ... has a, b, c, d, e, ..."),
        ("lists/vall.txt", "lists/val.txt", "; '.../lists/vall.txt' exists"),
        ("images", "images/*.jpg", "; patterns are not expanded: name the folder, .../images"),
    ],
)
def test_a_missing_path_says_what_is_there(tmp_path, there, entry, message):
    for path in there.split():
        (tmp_path / path).mkdir(parents=True)
    with refused(f"{entry}: not found (named by .../d.yaml){message}; correct its paths"):
        list_split(load_dataset_spec(write(tmp_path, f"val: {entry}\nnames: [a]\n")), "val")


def test_missing_annotations_without_names_are_named_with_the_yaml(tmp_path):
    (tmp_path / "train.json").touch()
    with refused("trian.json: not found (named by .../d.yaml); '.../train.json' exists; correct its paths"):
        load_dataset_spec(write(tmp_path, "train: images\nannotations: trian.json\n"))


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_missing_optional_split_is_left_out_with_a_warning(tmp_path, is_copied, caplog):
    """The name may be misspelled: training images would be held out although there are validation images."""
    data = write_dataset(tmp_path / "set", train=4, val=2)
    data.write_text(data.read_text().replace("images/val", "images/vall"))
    source = DataSource(str(data), ("train",), optional=("val",), stage=str(tmp_path / "stage") if is_copied else "")
    assert set(open_data(source, DistributedContext.single()).splits) == {"train"}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "images/vall: not found (named by " in warning
    assert warning.endswith("; 'val' is left out, and part of 'train' is held out in its place")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder.png", "folder.png: a folder, not a file"),
        (".hidden.png", ".hidden.png not found, because names that begin with a dot are hidden; rename the image"),
    ],
)
def test_a_row_that_names_no_image_says_why(tmp_path, name, message):
    data = write_dataset(tmp_path, train=2, val=1)
    (tmp_path / "images/train/folder.png").mkdir()
    (tmp_path / "images/train/.hidden.png").touch()
    (tmp_path / "train.txt").write_text(f"images/train/000.png\nimages/train/{name}\n")
    data.write_text("train: train.txt\nnames: [light, dark]\n")
    (finding,) = list_split(load_dataset_spec(data), "train").findings
    assert finding.where == "train.txt:2"
    assert finding.text == f"images/train/{message}"


@pytest.mark.parametrize("text", ["# converted from darwin_json", "url: ../region_attributes/set.zip"])
def test_a_yaml_may_mention_an_export(tmp_path, text):
    for name in ("data.yaml", "data.txt"):
        (tmp_path / name).write_text(f"{text}\ntrain: images\nnames: [a]\n")
        assert load_dataset_spec(tmp_path / name).names == ("a",)
    (tmp_path / "export.yaml").write_text('{"version": "darwin_json"}')
    with refused("export.yaml: V7's Darwin JSON: export as COCO or YOLO instead"):
        load_dataset_spec(tmp_path / "export.yaml")


def test_labels_without_images_are_seen_in_each_format_of_a_suffix(tmp_path, monkeypatch):
    write_dataset(tmp_path, train=2, val=1)
    shutil.rmtree(tmp_path / "images")
    other = replace(YOLO, files=replace(YOLO.files, is_labels=lambda head: False))
    monkeypatch.setattr("data.source.missing_data.LABEL_FORMATS", (YOLO, other))
    assert "has 3 label files" in labels_without_images(tmp_path)


def test_there_is_no_hint_where_no_folder_exists(monkeypatch):
    """Some systems have none after the working folder has been deleted."""
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    assert nearby_paths_hint(Path("folder/nothing.yaml")) == ""


def test_annotations_are_given_per_split_or_for_all(tmp_path):
    (tmp_path / "voc").mkdir()
    body = "train: a\nval: b\nnames: [x]\n"
    one = load_dataset_spec(write(tmp_path, body + "annotations: voc\n"))
    assert {s: v.annotations for s, v in one.splits.items()} == dict.fromkeys(("train", "val"), tmp_path / "voc")
    each = load_dataset_spec(write(tmp_path, body + "annotations: {train: a.json}\n"))
    assert each.split("train").annotations == tmp_path / "a.json"
    assert each.split("val").annotations is None


def test_names_come_from_coco_categories_in_the_order_of_ids(tmp_path):
    categories = [{"id": 7, "name": "b"}, {"id": 3, "name": "ä"}]
    info = {"text": '"categories": [1]', "categories": ["not these"]}
    (tmp_path / "a.json").write_text(
        json.dumps({"info": info, "images": [], "annotations": [], "categories": categories})
    )
    spec = load_dataset_spec(write(tmp_path, "train: t\nannotations: {train: a.json}\n"))
    assert spec.names == ("ä", "b")
    (tmp_path / "a.json").write_text("{}")
    with refused("a.json: has no categories to take the names from; is it a COCO JSON?"):
        load_dataset_spec(tmp_path / "d.yaml")


def coco_of(path, categories, used):
    """A COCO JSON; ``categories``: id, name and supercategory; ``used``: ids that have a box."""
    content = {
        "images": [{"id": 0, "file_name": "a.jpg"}],
        "annotations": [{"id": i, "image_id": 0, "category_id": i, "bbox": [1, 1, 9, 9]} for i in used],
        "categories": [{"id": i, "name": name, "supercategory": above} for i, name, above in categories],
    }
    path.write_text(json.dumps(content, indent=1))


ROOTED = [(0, "fleet", "none"), (1, "ship", "fleet"), (10, "boat", "fleet")]


@pytest.mark.parametrize(
    ("categories", "train", "val", "names"),
    [
        (ROOTED, [1], [10], ("ship", "boat")),
        (ROOTED, [1], [0], ("fleet", "ship", "boat")),  # used in the other split
        (ROOTED, [0, 1], [1], ("fleet", "ship", "boat")),
        ([*ROOTED, (3, "tree", "none")], [1], [1], ("fleet", "ship", "tree", "boat")),  # not the others' supercategory
        ([(0, "ship", "none"), (1, "ship", "ship")], [1], [1], ("ship",)),
        ([(0, "ship", "none")], [], [], ("ship",)),
        ([(1, "ship", "ship"), (2, "boat", "ship")], [2], [2], ("boat",)),
    ],
)
def test_a_supercategory_without_boxes_is_not_a_class(tmp_path, categories, train, val, names):
    """Roboflow exports such files. In the file of another split it may have another id, which is a class's here."""
    coco_of(tmp_path / "a.json", categories, train)
    coco_of(tmp_path / "b.json", [(i + 1, *rest) for i, *rest in categories], [i + 1 for i in val])
    path = write(tmp_path, "train: t\nval: v\nannotations: {train: a.json, val: b.json}\n")
    with OpenCounter(tmp_path) as counter:
        assert load_dataset_spec(path).names == load_dataset_spec(path).names == names
        opened = counter.counts()
    assert opened["a.json"] == 1  # by the rule of once_per_file
    assert opened["b.json"] <= 1
    for name in ("a.json", "b.json"):
        images = read_coco(tmp_path / name, names).images
        assert not any(image.labels.problems for image in images)
    assert (
        load_dataset_spec(write(tmp_path, "train: t\nannotations: a.json\nnames: [fleet, ship]\n")).names[0] == "fleet"
    )


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
        load_dataset_spec(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: t\ntrain: u\nnames: [a]\n", "key 'train' appears twice (first in line 1); remove one"),
        ("train: [\n", "expected the node content, but found '<stream end>'"),
    ],
)
def test_mistakes_in_yaml_are_one_line_that_names_the_line(tmp_path, text, message):
    with refused(f"d.yaml:2: {message}"):
        load_dataset_spec(write(tmp_path, text))


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
        load_dataset_spec(write(tmp_path, f"train: t\nnames: [a]\n{line}\n"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("[]", "names: expected a list or 'number: name' lines, got []"),
        ("person", "names: expected a list or 'number: name' lines, got 'person'"),
        ("{0: a, 2: b}", "names: must be numbered 0 to 1; 1 is missing"),
        ("{a: 0}", "names: 'a' is not the number of a class; write 'number: name' lines"),
        ("[yes, no]", "names: True is not a string in YAML; put it in quotes"),
        ("[a, b, a]", "names: several classes are called 'a'; class names must be unique"),
        ("[a, b]\nnc: 3", "nc is 3, but 'names' has 2; make them agree"),
    ],
)
def test_wrong_names_are_one_line(tmp_path, names, message):
    with refused(f"d.yaml: {message}"):
        load_dataset_spec(write(tmp_path, f"train: t\nnames: {names}\n"))


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
    path = write(tmp_path, BODY + text)
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
        load_dataset_spec(write(tmp_path, f"{BODY}{text}\n"))


@pytest.mark.parametrize("key", ["name", "class_names", "Names", "namse"])
def test_names_under_another_key_are_an_error(tmp_path, key):
    with pytest.raises(UserError, match=rf"unknown key '{key}' \(did you mean 'names'\?\)$"):
        load_dataset_spec(write(tmp_path, f"train: t\n{key}: [a, b]\n"))


@pytest.mark.parametrize("key", ["num_classes", "number_of_classes", "n_classes"])
def test_the_number_of_classes_is_also_checked_under_other_names(tmp_path, key):
    assert load_dataset_spec(write(tmp_path, f"{BODY}{key}: 2\n")).notes == ()
    with pytest.raises(UserError, match="nc is 3, but 'names' has 2"):
        load_dataset_spec(write(tmp_path, f"{BODY}{key}: 3\n"))
    path = write(tmp_path, f"{BODY}nc: 2\n{key}: 3\n")
    assert load_dataset_spec(path).notes == (f"{path}: not used: {key}",)


def test_only_the_first_of_two_other_names_of_a_key_is_used(tmp_path):
    path = write(tmp_path, f"{BODY}num_classes: 2\nn_classes: 3\n")
    assert load_dataset_spec(path).notes == (f"{path}: not used: n_classes",)


def test_names_without_an_indent_and_a_list_of_classes_are_named(tmp_path):
    with pytest.raises(UserError, match="unknown key '0'; lines 'number: name' belong under 'names:', indented"):
        load_dataset_spec(write(tmp_path, "train: t\nnames:\n0: a\n1: b\n"))
    with pytest.raises(
        UserError, match=r"has no 'names'; .* \('classes' renames and merges those that 'names' lists\)"
    ):
        load_dataset_spec(write(tmp_path, "train: t\nclasses: [a, b]\n"))


@pytest.mark.parametrize("task", ["detect", "Detection", "object-detection", "object detection", "bbox", ""])
def test_the_task_of_this_program_is_no_line(tmp_path, task):
    assert load_dataset_spec(write(tmp_path, f"{BODY}task: {task}\n")).notes == ()


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
    path = write(tmp_path, f"{BODY}task: {task}\n")
    (line,) = load_dataset_spec(path).notes
    assert line.startswith(f"{path}: task: {task}: ")
    assert "this program detects boxes" in line
    assert line.endswith(text)


@pytest.mark.parametrize("task", ["pose", "keypoints", "classify", "classification", "semantic segmentation"])
def test_a_task_without_boxes_is_an_error(tmp_path, task):
    with pytest.raises(UserError, match=f"d.yaml: 'task: {task}' declares .*boxes"):
        load_dataset_spec(write(tmp_path, f"{BODY}task: {task}\n"))


def test_names_that_yaml_reads_as_numbers_stay_as_they_are_written(tmp_path):
    numbers = ["1e3", "0x1F", "012", "12:30:45", "1_000", "1.50", "+5", ".5", "-0", ".inf", "0b11", "7", "190:20:30.15"]
    text = f"x: &n [{', '.join(numbers)}]\nnc: &c 13\ntrain: t\n"
    for names in (
        "names: *n",
        f"names: [{', '.join(numbers)}]",
        "names:\n" + "".join(f"  {i}: {name}\n" for i, name in enumerate(numbers)),
    ):
        assert load_dataset_spec(write(tmp_path, f"{text}{names}\n")).names == tuple(numbers)
    spec = load_dataset_spec(write(tmp_path, f"{text}names: *n\nclasses: {{012: 0x20, 1.50: 1.500}}\nignore: [1e3]\n"))
    assert spec.names == ("0x1F", "0x20", *numbers[3:5], "1.500", *numbers[6:])
    dumped = write(tmp_path, yaml.safe_dump({"train": "t", "names": numbers}))
    assert load_dataset_spec(dumped).names == tuple(numbers)


@pytest.mark.parametrize("name", ["!!float x", "!!int x"])
def test_values_tagged_as_numbers_must_be_numbers(tmp_path, name):
    with pytest.raises(UserError, match=r"d.yaml:2: .* is not a valid (int|float); put it in quotes if it is text"):
        load_dataset_spec(write(tmp_path, f"train: t\nnames: [a, {name}]\n"))


@pytest.mark.parametrize("name", ["yes", "no", "off", "true", "2026-01-02", "2026-01-02 10:00:00", "null", "~"])
def test_names_that_yaml_reads_as_something_else_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"names: .* is not a string in YAML; put it in quotes"):
        load_dataset_spec(write(tmp_path, f"train: t\nnames: [a, {name}]\n"))


@pytest.mark.parametrize("numbers", ['"0" "1"', "0 '1'", "00 01", "'0' 01"])
def test_the_numbers_of_names_may_be_text_or_have_zeros_in_front(tmp_path, numbers):
    zero, one = numbers.split()
    assert load_dataset_spec(write(tmp_path, f"train: t\nnames: {{{one}: b, {zero}: a}}\n")).names == ("a", "b")


def test_ten_numbers_with_a_zero_in_front_are_decimal(tmp_path):
    lines = "".join(f"  {i:03}: c{i}\n" for i in range(12))
    assert load_dataset_spec(write(tmp_path, f"train: t\nnames:\n{lines}")).names == tuple(f"c{i}" for i in range(12))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("{0: a, '0': b}", "key '0' appears twice"),
        ("{0: a, 00: b}", "two lines have the number 0"),
        ("{0.5: a}", "'0.5' is not the number of a class"),
        ("{-1: a}", "'-1' is not the number of a class"),
        ("{a: 0}", "'a' is not the number of a class"),
        ("{yes: a}", "True is not the number of a class"),
        ("{'0': a, '2': b}", "must be numbered 0 to 1; 1 is missing"),
    ],
)
def test_wrong_numbers_of_names_are_named(tmp_path, names, message):
    with pytest.raises(UserError, match=message):
        load_dataset_spec(write(tmp_path, f"train: t\nnames: {names}\n"))


def test_separators_of_windows_are_read_where_only_that_path_exists(tmp_path):
    (tmp_path / "set/images/train").mkdir(parents=True)
    (tmp_path / "set/images/val").mkdir()
    text = "path: .\\set\ntrain: [images\\train]\nval: ..\\images\\val\nannotations: images\\val\nnames: [a]\n"
    path = write(tmp_path, text)
    spec = load_dataset_spec(path)
    assert spec.split("train").images == (tmp_path / "set/images/train",)
    assert spec.split("val").images == (tmp_path / "set/images/val",)
    assert spec.split("val").annotations == tmp_path / "set/images/val"
    assert spec.notes == (
        f"{path}: train: images\\train is read as {tmp_path}/set/images/train",
        f"{path}: val: ..\\images\\val is read as {tmp_path}/set/images/val",
    )
    (tmp_path / "set/images\\train").mkdir()  # a folder of this name is one
    assert load_dataset_spec(path).split("train").images == (tmp_path / "set/images\\train",)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("images\\tra", r"folders are separated by / here, not by \\;"),
        ("C:\\sets\\train", r"folders are separated by / here, not by \\;"),
        ('"images\\train"', r"'images\\train' has a control character: in double quotes, YAML takes \\t for a tab;"),
    ],
)
def test_missing_paths_of_windows_are_named(tmp_path, entry, reason):
    (tmp_path / "images/train").mkdir(parents=True)
    spec = load_dataset_spec(write(tmp_path, f"train: {entry}\nnames: [a]\n"))
    with pytest.raises(UserError) as caught:
        spec.check_split("train")
    assert reason.replace("\\\\", "\\") in str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_yamls_load_without_running_their_downloads(path):
    spec = load_dataset_spec(path)
    assert {"train", "val"} <= set(spec.splits)
    assert "download" not in yaml.safe_load(path.read_text())
    if path.stem != "template":
        assert "download https://" in str(spec.missing_error(path))
    if path.stem.startswith("coco"):
        assert len(spec.names) == 80
        assert (spec.names[0], spec.names[79]) == ("person", "toothbrush")


KNOWN = "known by name: demo, bccd, coco, coco128, coco8"


def open_by_name(data: str):
    return open_data(DataSource(data, ("train",)), DistributedContext.single())


@pytest.mark.parametrize("data", ["coco128", "coco128.yaml"])
def test_public_data_sets_are_found_by_name(tmp_path, monkeypatch, data):
    """As in YOLOv5, a bare name refers to configs/data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets" / "coco128" / "images" / "train2017").mkdir(parents=True)
    assert open_by_name(data).source == str(CONFIGS / "coco128.yaml")


def test_a_file_goes_before_the_public_data_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    write(tmp_path, "train: images\nnames: [a]\n", "coco128.yaml")
    assert open_by_name("coco128.yaml").names == ("a",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            "bccd",
            "datasets/bccd/images/train: not found (named by .../configs/data/bccd.yaml); download "
            "https://github.com/Shenggan/BCCD_Dataset (license: MIT) and unpack it as the first lines of that "
            "file describe",
        ),
        (
            str(CONFIGS / "template.yaml"),
            "configs/data/images/train: not found (named by .../configs/data/template.yaml); correct its paths",
        ),
    ],
)
def test_images_of_a_public_data_set_that_are_not_there_say_where_to_get_them(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    with refused(message):
        list_split(open_by_name(data), "train")


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ("data/bccd.yaml", " (did you mean 'bccd'?)"),
        ("bcd", " (did you mean 'bccd'?)"),
        ("coc", " (did you mean 'coco'?)"),
        ("''", ""),
        ("racoon.yaml", " (did you mean 'datasets/raccoon/data.yaml'?)"),
        ("cone", " (did you mean 'cones.yaml'?)"),
        ("datasets/racoons/set.yaml", "; 'datasets/raccoon' exists"),
        ("nowhere/d.yaml", ""),
        ("xyz", "; the working folder has datasets"),
    ],
)
def test_an_unknown_data_set_is_told_what_is_like_it_and_what_is_known(tmp_path, monkeypatch, data, hint):
    monkeypatch.chdir(tmp_path)
    for name in ("datasets/raccoon/data.yaml", "cones.yaml"):
        write((tmp_path / name).parent, "train: images\nnames: [a]\n", Path(name).name)
    with refused(f"data set {data}: no such file{hint}; {KNOWN}"):
        open_by_name(data.strip("'"))


def test_the_only_yaml_of_a_folder_is_read_and_its_missing_images_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()
    write(tmp_path, "train: images\nnames: [a]\n", "cones.yaml")
    with refused("images: not found (named by .../cones.yaml); ... has datasets; correct its paths"):
        open_by_name(".")


def test_the_root_of_the_file_system_is_no_data_set():
    with pytest.raises(UserError, match=r"data set /: \d+ images, "):
        open_by_name("/")


@pytest.mark.parametrize(
    ("name", "message"), [("x" * 256, "x..."), ("a/" * 2100, "a/..."), ("../" + "x" * 256, "../x...")]
)
def test_a_path_that_is_too_long_is_one_line(tmp_path, name, message):
    with refused(f"d.yaml: train: a path or a name in it is longer than file systems allow: {message}") as caught:
        load_dataset_spec(write(tmp_path, f"train: {name}\nval: {name}\nnames: [a]\n"))
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_the_message_says_that_a_data_set_has_moved_with_its_yaml(tmp_path):
    """The ``path`` of a YAML from Colab is that of another machine."""
    (tmp_path / "images/train").mkdir(parents=True)
    spec = load_dataset_spec(write(tmp_path, "path: /content/datasets/x\ntrain: images/train\nnames: [a]\n"))
    text = f"{tmp_path}/images/train exists: remove 'path: /content/datasets/x' from the YAML"
    with pytest.raises(UserError, match=re.escape(text)):
        spec.check_split("train")


@pytest.mark.parametrize("has_val", [True, False])
def test_held_out_images_are_the_validation_split_unless_there_is_one(tmp_path, has_val):
    data = write_dataset(tmp_path / "set", train=4, val=2)
    if not has_val:
        data.write_text("train: images/train\nnames: [light, dark]\n")
    source = DataSource(str(data), ("train",), val_images=("images/train/001.png",))
    spec = open_data(source, DistributedContext.single())
    assert spec.is_held_out("val") is not has_val
    assert spec.held_out == (frozenset() if has_val else {"images/train/001.png"})
