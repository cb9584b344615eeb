"""Entries of a COCO JSON: ids are equal in any notation, and what fits no image or category is lost and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.data.max_bad.twenty_images import (
    HEIGHT,
    IMAGES,
    NAMES,
    WIDTH,
    change_annotations,
    change_entries,
    edit_json,
    load,
    move_half_to_folder,
    write_yaml,
)
from tests.helpers.three_formats import write_image
from utils.errors import UserError

SAME_IDS = {
    "image_id as text": change_annotations(lambda a, _: a.update(image_id=str(a["image_id"]))),
    "image_id as a whole float": change_annotations(lambda a, _: a.update(image_id=float(a["image_id"]))),
    "image_id as the text of a float": change_annotations(lambda a, _: a.update(image_id=f"{a['image_id']}.0")),
    "image_id as text, every second": change_annotations(lambda a, i: i % 2 or a.update(image_id=str(a["image_id"]))),
    "category_id as text": change_annotations(lambda a, _: a.update(category_id=str(a["category_id"]))),
    "category_id as a whole float": change_annotations(lambda a, _: a.update(category_id=float(a["category_id"]))),
    "ids of images as text": change_entries("images", lambda entry: entry.update(id=f"00{entry['id']}")),
    "ids of images as whole floats": change_entries("images", lambda entry: entry.update(id=float(entry["id"]))),
    "ids of categories as whole floats": change_entries(
        "categories", lambda entry: entry.update(id=float(entry["id"]))
    ),
}


@pytest.mark.parametrize("case", SAME_IDS)
def test_text_and_whole_floats_of_one_number_are_one_id(root, case):
    path = write_yaml(root, "coco")
    before = load(path)
    edit_json(root, SAME_IDS[case])
    after = load(path)
    assert after.report.ledger.losses == ()
    for array in ("offsets", "classes", "boxes_xywh_px"):
        np.testing.assert_array_equal(getattr(after, array), getattr(before, array))


STRAYS = {
    "text": (
        lambda a: a.update(image_id=f"{a['image_id']}x"),
        'image_id "100x" is a string; the images\' ids are numbers',
    ),
    "a fraction": (lambda a: a.update(image_id=a["image_id"] + 0.5), "image_id 100.5 is not among the images' ids"),
    "missing": (lambda a: a.pop("image_id"), "has no image_id"),
    "null": (lambda a: a.update(image_id=None), "image_id null is not among the images' ids"),
    "true": (lambda a: a.update(image_id=True), "image_id true is not among the images' ids"),
    "unknown": (lambda a: a.update(image_id=7), "image_id 7 is not among the images' ids"),
}


@pytest.mark.parametrize("case", STRAYS)
def test_annotations_of_no_image_are_named_and_counted(root, case):
    """Without them half of the images would be backgrounds, on which a perfect model would score badly."""
    change, message = STRAYS[case]
    path = write_yaml(root, "coco")
    edit_json(root, change_annotations(lambda a, position: position % 4 < 2 and change(a)))
    for split in ("train", "val"):
        with pytest.raises(UserError, match=r"20 of 40 labeled objects can't be used.*annotation without") as refused:
            load(path, split)
        assert f"instances.json: annotation 0: {message}" in str(refused.value)


def test_a_json_without_categories_is_named(root):
    path = write_yaml(root, "coco")
    edit_json(root, lambda content: content.update(categories=[]))
    with pytest.raises(UserError, match="category_id 10 refers to an empty list: the categories' ids are missing"):
        load(path)


def test_an_id_that_fits_two_images_is_not_guessed(root):
    path = write_yaml(root, "coco")

    def two_of_one_number(content: dict) -> None:
        content["images"][1]["id"] = "0100"
        for annotation in content["annotations"]:
            annotation["image_id"] = "100"

    edit_json(root, two_of_one_number)
    with pytest.raises(UserError, match=re.escape('image_id "100" matches several of the images\' ids')):
        load(path)


@pytest.mark.parametrize("position", [0, 20])
def test_of_two_entries_of_an_image_the_one_with_annotations_is_taken(root, position):
    """With the other one, the image would be a background."""
    path = write_yaml(root, "coco")
    edit_json(root, lambda content: content["images"].insert(position, {**content["images"][0], "id": 7}))
    index = load(path)
    assert np.diff(index.offsets).tolist() == [2] * 20
    assert index.report.ledger.losses == ()


@pytest.mark.parametrize("written", [" {}.png ", "./{}.png", "images\\train\\{}.png", "{}%2Epng"])
def test_names_of_images_are_read_as_tools_write_them(root, written):
    path = write_yaml(root, "coco")
    edit_json(root, change_entries("images", lambda e: e.update(file_name=written.format(e["file_name"][:2]))))
    assert load(path).report.ledger.losses == ()


@pytest.mark.parametrize("name", ["", " ", "/", "..", "images/", "a\0b.png"])
def test_names_that_are_none_are_named_and_counted(root, name):
    path = write_yaml(root, "coco")
    edit_json(root, lambda content: content["images"][0].update(file_name=name))
    (loss,) = load(path).report.ledger.losses
    assert (loss.images, loss.objects) == (1, 2)
    assert "instances.json: image 100: " in loss.example


def test_two_names_of_one_folder_have_the_same_images(root):
    """The JSON names images without their folder, and the splits name it by way of a link and without."""
    (root / "link").symlink_to("images/train")
    path = write_yaml(root, "coco", train="link")
    for split in ("train", "val"):
        index = load(path, split)
        assert len(index) == 20
        assert index.report.ledger.losses == ()


def test_another_image_of_the_same_name_does_not_hide_a_repeated_entry(root):
    move_half_to_folder(root, "coco")
    write_image(root / "images/more" / IMAGES[0], HEIGHT, WIDTH)
    path = write_yaml(root, "coco")

    def repeat(name: str) -> Callable[[dict], None]:
        def change(content: dict) -> None:
            content["images"].append({"id": 7, "file_name": name})
            content["annotations"].append({**content["annotations"][0], "id": 999, "image_id": 7})

        return change

    edit_json(root, repeat(f"more/{IMAGES[0]}"))
    assert load(path).report.ledger.losses == ()
    edit_json(root, lambda content: content["images"][-1].update(file_name=IMAGES[0]))
    (loss,) = load(path).report.ledger.losses
    assert "matches images/train/00.png, which is already used by another entry" in loss.example


@pytest.mark.parametrize("name", ["id", "name"])
@pytest.mark.parametrize("named", [True, False])
def test_categories_are_named_as_they_are_written(root, name, named):
    path = write_yaml(root, "coco", **({} if named else {"names": None}))
    edit_json(root, lambda content: content["categories"][1].update({name: {"id": "2"}.get(name)}))
    problem = {"id": 'id "2" is a string; category ids must be integers', "name": "name null is not a string"}[name]
    with pytest.raises(UserError, match=re.escape(f"{root / 'instances.json'}: categories[1]: {problem}")):
        load(path)


@pytest.mark.parametrize("named", [True, False])
def test_a_category_name_that_is_used_twice(root, named):
    """The JSON is to blame, not the YAML; and where one of the two is unused, the id is that of the other."""
    path = write_yaml(root, "coco", **({} if named else {"names": None}))

    def twice(content: dict) -> None:
        content["categories"].append({"id": 90, "name": "dog"})
        content["annotations"][1]["category_id"] = 90

    before = (root / "instances.json").read_text()
    edit_json(root, twice)
    text = f"{root / 'instances.json'}: categories: 'dog' is the name of the ids 20 and 90; rename one"
    with pytest.raises(UserError, match=re.escape(text)):
        load(path)
    (root / "instances.json").write_text(before)
    for unused in (5, 90):
        content = json.loads(before)
        content["categories"].append({"id": unused, "name": "dog"})
        (root / "instances.json").write_text(json.dumps(content))
        if named:
            assert load(path).ground_truth().category_ids == (10, 20)


def test_names_of_categories_have_no_outer_spaces(root):
    """YAML removes the outer spaces of its names, so they could not be equal otherwise."""
    edit_json(root, lambda content: content["categories"][0].update(name=" cat\t"))
    for names in (list(NAMES), None):
        index = load(write_yaml(root, "coco", names=names))
        assert index.names == NAMES
        assert index.report.problems == 0
    edit_json(root, lambda content: content["categories"][0].update(name=" "))
    with pytest.raises(UserError, match=re.escape('categories[0]: name " " is empty; give the category a name')):
        load(write_yaml(root, "coco"))
