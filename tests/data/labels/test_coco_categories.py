"""Categories of a COCO JSON: their names, whatever types their fields have, and the ids of merged classes."""

from __future__ import annotations

import json

import pytest

from data.labels.categories import Category, id_of_merged_class
from data.labels.coco_categories import category_names

ANY_JSON = [None, True, 1, 1.5, "x", "", [], ["x"], {}, {"name": "x"}]


@pytest.mark.parametrize("value", ANY_JSON)
@pytest.mark.parametrize("key", ["supercategory", "keypoints", "color", "isthing"])
def test_names_are_read_whatever_the_other_fields_of_a_category_hold(tmp_path, key, value):
    path = tmp_path / "all.json"
    categories = [{"id": 1, "name": "ship", key: value}, {"id": 2, "name": "boat", key: value}]
    path.write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
    assert category_names([path]) == ("ship", "boat")


def test_a_supercategory_whose_boxes_have_ids_with_a_decimal_point_is_a_class(tmp_path):
    path = tmp_path / "all.json"
    categories = [{"id": 0.0, "name": "shapes"}, {"id": 1.0, "name": "light", "supercategory": "shapes"}]
    annotations = [{"id": 0, "image_id": 0, "category_id": 0.0, "bbox": [1, 1, 2, 2]}]
    path.write_text(json.dumps({"images": [], "annotations": annotations, "categories": categories}))
    assert category_names([path]) == ("shapes", "light")


@pytest.mark.parametrize(
    ("ids", "merged"),
    [
        ((18,), 18),  # one class, with its own id
        ((1, 18, 20), 18),  # the smallest with annotations: a root of Roboflow's has none
        ((1, 5), 1),  # none has annotations
        ((101, 99), 99),  # none is in the file
    ],
)
def test_a_merged_class_has_the_id_of_a_class_that_it_merges(ids, merged):
    categories = [Category(i, f"c{i}", is_used=i >= 18) for i in (1, 5, 18, 20)]
    assert id_of_merged_class(categories, ids) == merged
    assert id_of_merged_class([], ids) == min(ids)
