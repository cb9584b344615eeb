"""COCO's category ids, against pairs from its annotation files."""

import pytest
import yaml

from data.labels.coco_classes import coco_category_ids
from utils.program_folders import CONFIGS

NAMES = list(yaml.safe_load((CONFIGS / "data" / "coco.yaml").read_text())["names"].values())
# From instances_val2017.json: around each id that is not used, and at both ends.
PUBLISHED = {
    "person": 1, "fire hydrant": 11, "stop sign": 13, "cow": 21, "zebra": 24, "giraffe": 25, "backpack": 27,
    "umbrella": 28, "handbag": 31, "wine glass": 46, "bottle": 44, "potted plant": 64, "bed": 65, "dining table": 67,
    "toilet": 70, "tv": 72, "refrigerator": 82, "book": 84, "toothbrush": 90,
}  # fmt: skip


def test_the_ids_are_those_of_the_annotation_files():
    ids = dict(zip(NAMES, coco_category_ids(NAMES)))
    assert {name: ids[name] for name in PUBLISHED} == PUBLISHED
    assert len(set(ids.values())) == 80


def test_they_go_by_name_in_any_order_and_for_some_of_the_classes():
    assert coco_category_ids(NAMES[::-1]) == coco_category_ids(NAMES)[::-1]
    assert coco_category_ids(["toothbrush", "person"], NAMES) == (90, 1)
    darknet = [{"motorcycle": "motorbike", "tv": "tvmonitor"}.get(name, name.title()) for name in NAMES]
    assert coco_category_ids(darknet) == coco_category_ids(NAMES)


@pytest.mark.parametrize(
    ("names", "labeled"),
    [
        (["person", "car"], ()),
        ([*NAMES[:79], "unicorn"], ()),
        ([*NAMES, "unicorn"], ()),
        ([*NAMES[:79], "person"], ()),
        (["vehicle", "person"], NAMES),
        (["object"], NAMES),
        ([], ()),
    ],
)
def test_other_classes_have_no_ids_of_coco(names, labeled):
    assert coco_category_ids(names, labeled) is None
