"""Class names come from the YAML or COCO categories, are text as written, and are numbered without gaps."""

import json

import pytest
import yaml

from data.labels.coco import read_coco
from data.source.dataset_yaml import load_dataset_spec
from tests.data.source.yaml_file import write_yaml
from tests.helpers.messages import refused
from tests.helpers.open_counter import OpenCounter
from utils.errors import UserError


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
        load_dataset_spec(write_yaml(tmp_path, text))
    categories = [{"id": 1, "name": f"b{broken}b"}]
    (tmp_path / "a.json").write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    with refused(f"d.yaml: names: {message} contains a line break or another control character"):
        load_dataset_spec(write_yaml(tmp_path, "train: images\nannotations: a.json\n"))
    good = "train: images\nnames: ['two  spaces', 'é 犬 👩\u200d🚒', '\u3000wide x']\n"
    assert load_dataset_spec(write_yaml(tmp_path, good)).names[:2] == ("two  spaces", "é 犬 👩\u200d🚒")


@pytest.mark.parametrize(
    ("classes", "used"), [(["cow", 0], (0, 2)), ([1, "dog", "dog"], (1,)), ([2, 1, 0], ()), ([], ())]
)
def test_classes_are_chosen_by_number_or_name(tmp_path, classes, used):
    """Choosing none, (), means all of them."""
    spec = load_dataset_spec(write_yaml(tmp_path, "train: a\nnames: [cat, dog, cow]\n"))
    assert spec.use_classes(classes).classes == used


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["dig"], "--classes dig: .../d.yaml has no class of this name (did you mean 'dog'?)"),
        ([3], "--classes 3: .../d.yaml has classes 0 to 2"),
    ],
)
def test_unknown_classes_are_refused(tmp_path, classes, message):
    spec = load_dataset_spec(write_yaml(tmp_path, "train: a\nnames: [cat, dog, cow]\n"))
    with refused(message):
        spec.use_classes(classes)


def test_names_come_from_coco_categories_in_the_order_of_ids(tmp_path):
    categories = [{"id": 7, "name": "b"}, {"id": 3, "name": "ä"}]
    info = {"text": '"categories": [1]', "categories": ["not these"]}
    (tmp_path / "a.json").write_text(
        json.dumps({"info": info, "images": [], "annotations": [], "categories": categories})
    )
    spec = load_dataset_spec(write_yaml(tmp_path, "train: t\nannotations: {train: a.json}\n"))
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
    path = write_yaml(tmp_path, "train: t\nval: v\nannotations: {train: a.json, val: b.json}\n")
    with OpenCounter(tmp_path) as counter:
        assert load_dataset_spec(path).names == load_dataset_spec(path).names == names
        opened = counter.counts()
    assert opened["a.json"] == 1  # by the rule of once_per_file
    assert opened["b.json"] <= 1
    for name in ("a.json", "b.json"):
        images = read_coco(tmp_path / name, names).images
        assert not any(image.labels.problems for image in images)
    assert (
        load_dataset_spec(write_yaml(tmp_path, "train: t\nannotations: a.json\nnames: [fleet, ship]\n")).names[0]
        == "fleet"
    )


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
        load_dataset_spec(write_yaml(tmp_path, f"train: t\nnames: {names}\n"))


def test_names_that_yaml_reads_as_numbers_stay_as_they_are_written(tmp_path):
    numbers = ["1e3", "0x1F", "012", "12:30:45", "1_000", "1.50", "+5", ".5", "-0", ".inf", "0b11", "7", "190:20:30.15"]
    text = f"x: &n [{', '.join(numbers)}]\nnc: &c 13\ntrain: t\n"
    for names in (
        "names: *n",
        f"names: [{', '.join(numbers)}]",
        "names:\n" + "".join(f"  {i}: {name}\n" for i, name in enumerate(numbers)),
    ):
        assert load_dataset_spec(write_yaml(tmp_path, f"{text}{names}\n")).names == tuple(numbers)
    spec = load_dataset_spec(
        write_yaml(tmp_path, f"{text}names: *n\nclasses: {{012: 0x20, 1.50: 1.500}}\nignore: [1e3]\n")
    )
    assert spec.names == ("0x1F", "0x20", *numbers[3:5], "1.500", *numbers[6:])
    dumped = write_yaml(tmp_path, yaml.safe_dump({"train": "t", "names": numbers}))
    assert load_dataset_spec(dumped).names == tuple(numbers)


@pytest.mark.parametrize("name", ["!!float x", "!!int x"])
def test_values_tagged_as_numbers_must_be_numbers(tmp_path, name):
    with pytest.raises(UserError, match=r"d.yaml:2: .* is not a valid (int|float); put it in quotes if it is text"):
        load_dataset_spec(write_yaml(tmp_path, f"train: t\nnames: [a, {name}]\n"))


@pytest.mark.parametrize("name", ["yes", "no", "off", "true", "2026-01-02", "2026-01-02 10:00:00", "null", "~"])
def test_names_that_yaml_reads_as_something_else_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"names: .* is not a string in YAML; put it in quotes"):
        load_dataset_spec(write_yaml(tmp_path, f"train: t\nnames: [a, {name}]\n"))


@pytest.mark.parametrize("numbers", ['"0" "1"', "0 '1'", "00 01", "'0' 01"])
def test_the_numbers_of_names_may_be_text_or_have_zeros_in_front(tmp_path, numbers):
    zero, one = numbers.split()
    assert load_dataset_spec(write_yaml(tmp_path, f"train: t\nnames: {{{one}: b, {zero}: a}}\n")).names == ("a", "b")


def test_ten_numbers_with_a_zero_in_front_are_decimal(tmp_path):
    lines = "".join(f"  {i:03}: c{i}\n" for i in range(12))
    assert load_dataset_spec(write_yaml(tmp_path, f"train: t\nnames:\n{lines}")).names == tuple(
        f"c{i}" for i in range(12)
    )


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
        load_dataset_spec(write_yaml(tmp_path, f"train: t\nnames: {names}\n"))
