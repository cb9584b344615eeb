"""Rule D5: an entry of a file for all images is of the image whose path ends with its file name, in whole folders."""

from __future__ import annotations

import pytest

from data.findings import ORPHAN, UNDECLARED
from tests.data.data_set import DataSet, coco, load, open_set, places, told

ONE = [(1, 5, 5, 20, 20)]
TWO = [(1, 5, 5, 20, 20), (2, 30, 5, 20, 20)]
ALL = {"train": "all.json", "val": "all.json"}

# The image of an entry with two boxes, beside train/t.png and val/v.png, or nothing.
FITTING = {
    "8.png": "val/8.png",
    "val/8.png": "val/8.png",
    "images/val/8.png": "val/8.png",
    "{root}/images/val/8.png": "val/8.png",
    ".\\val\\8.png": "val/8.png",
    "VAL/8.PNG": "val/8.png",
    "val%2F8.png": "val/8.png",
    "train/a/7.png": "train/a/7.png",
    "U\u0308%20y.png": "train/\u00dc y.png",
    "u\u0308 y.png": "train/\u00dc y.png",
} | dict.fromkeys(
    ("7.png", "a/7.png", "A/7.PNG", "gone.png", "other/8.png", "b/a/7.png", "8", "/elsewhere/images/val/8.png", ""), ""
)


@pytest.fixture
def shared(data: DataSet) -> DataSet:
    """Two splits that share a JSON."""
    data.images(*(f"images/{name}.png" for name in ("train/a/7", "val/a/7", "val/8", "train/\u00dc y")))
    data.write("images/train/t.png images/val/v.png")
    data.yaml(annotations=ALL)
    return data


def entries(data: DataSet, *others: tuple[str, list]) -> None:
    data.file("all.json", coco([("train/t.png", ONE), ("val/v.png", ONE), *others]))


@pytest.mark.parametrize("file_name", FITTING)
def test_an_entry_is_of_the_only_image_whose_path_ends_with_its_name_or_lost_in_each_split(shared, file_name):
    entries(shared, (file_name.format(root=shared.root), TWO))
    image = FITTING[file_name]
    for split, own in (("train", "images/train/t.png:1"), ("val", "images/val/v.png:1")):
        if not image:
            assert told(shared.index(split)) == f"{own} lost 1+2 all.json"
            continue
        images = [own, f"images/{image}:2"] if image.startswith(split) else [own]
        assert told(shared.index(split)) == " ".join(sorted(images))


def test_of_two_entries_of_an_image_one_is_lost(shared):
    entries(shared, ("8.png", ONE), ("val/8.png", TWO))
    assert told(shared.index("val")) == "images/val/8.png:1 images/val/v.png:1 lost 0+2 all.json"


def test_entries_of_images_that_exist_but_are_not_declared_are_one_line_and_not_lost(shared):
    """One that fits several of these is lost, and one that fits a declared image is its entry."""
    shared.write("images/extra/1.png images/extra/2.png images/thumbnails/8.png")
    more = [(name.format(root=shared.root), ONE) for name in ("{root}/images/extra/1.png", "EXTRA/2.PNG", "%31.png")]
    entries(shared, ("extra/1.png", TWO), ("8.png", ONE), *more)
    index = shared.index("val")
    assert told(index) == "images/val/8.png:1 images/val/v.png:1"
    assert len(places(index, UNDECLARED)) == 1
    shared.write("images/more/1.png")
    entries(shared, ("1.png", TWO))
    assert told(shared.index()) == "images/train/t.png:1 lost 1+2 all.json"


def test_entries_of_a_split_with_other_annotations_or_without_images_here_are_not_lost(shared):
    shared.file("val.json", coco([("val/v.png", TWO)]))
    shared.yaml(annotations={"train": "all.json", "val": "val.json"})
    entries(shared)
    assert (told(shared.index()), told(shared.index("val"))) == ("images/train/t.png:1", "images/val/v.png:2")
    splits = {split: f"images/{split}" for split in ("train", "val", "test")}
    shared.yaml(**splits, annotations="all.json")
    entries(shared, ("test/1.png", TWO), ("2.png", ONE))
    index = load(open_set(shared.data, ["train"]))
    assert told(index) == "images/train/t.png:1"
    assert len(places(index, UNDECLARED)) == 1
    shared.images("images/test/1.png")
    assert len(places(load(open_set(shared.data, ["train"])), ORPHAN)) == 1


def write(data: DataSet, content: dict, **yaml: object) -> None:
    data.images("images/train/x.png", "images/train/y.png")
    data.file("a.json", content)
    data.yaml(train="images/train", annotations={"train": "a.json"}, **yaml)


def test_ids_of_images_and_categories_are_those_of_the_json(data):
    content = coco([("x.png", [(7, 5, 5, 20, 20)]), ("y.png", [])], categories=[{"id": 7, "name": "b"}])
    content["images"][0]["id"] = content["annotations"][0]["image_id"] = "0042"
    content["images"][1]["id"] = 5.0
    write(data, content, names=["b"])
    truth = data.index().ground_truth()
    assert truth.image_ids == ("0042", 5)
    assert truth.category_ids == (7,)


@pytest.mark.parametrize(
    ("content", "options", "ids"),
    [
        ({"names": ["ship", "boat"]}, {}, (3, 7)),
        ({"names": ["boat", "tug", "ship", "raft"]}, {}, (7, 8, 3, 9)),
        ({"names": ["ship", "boat"], "classes": {"boat": "ship"}}, {}, (3,)),
        ({"names": ["vessel"]}, {"single_cls": True}, (3,)),
    ],
)
def test_a_class_has_the_id_of_its_category_the_smallest_if_merged(data, content, options, ids):
    """The file has categories without boxes, one of them called like a class."""
    categories = [
        {"id": number, "name": name} for number, name in ((0, "fleet"), (3, "ship"), (7, "boat"), (1, "ship"))
    ]
    write(data, coco([("x.png", [(7, 5, 5, 20, 20), (3, 30, 5, 20, 20)])], categories=categories), **content)
    index = data.index(**options)
    assert index.ground_truth().category_ids == ids
    assert index.report.used_objects == 2


ROOTED = [(0, "fleet", "none"), (1, "ship", "fleet"), (10, "boat", "fleet")]


@pytest.mark.parametrize(
    ("categories", "used", "names"),
    [
        (ROOTED, [1], ("ship", "boat")),
        (ROOTED, [0, 1], ("fleet", "ship", "boat")),
        ([*ROOTED, (3, "tree", "none")], [1], ("fleet", "ship", "tree", "boat")),
        ([(7, "b", "x"), (3, "ä", "x")], [7], ("ä", "b")),
        ([(0, "ship", "none"), (1, "ship", "ship")], [1], ("ship",)),
    ],
)
def test_names_come_from_the_categories_without_the_root_of_roboflow(data, categories, used, names):
    """Its exports have a category without boxes, the supercategory of all others (rf-detr, pull request 1303)."""
    named = [{"id": number, "name": name, "supercategory": above} for number, name, above in categories]
    write(data, coco([("x.png", [(number, 5, 5, 20, 20) for number in used])], categories=named))
    data.file("data.yaml", "train: images/train\nannotations: {train: a.json}\n")
    spec = open_set(data.data, ["train"])
    assert spec.names == names
    assert load(spec).report.used_objects == len(used)


def test_categories_are_matched_with_names_by_name(data):
    write(data, coco([("x.png", TWO)]), names=["z", "b", "a"])
    assert data.index().classes.tolist() == [2, 1]
