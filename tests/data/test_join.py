"""Data sets that join others: classes are merged by name, and what a set does not label is ignored in its images."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from tests.data.data_set import BOX, Counts, DataSet, counts, load, num_boxes, open_set, refusal


@pytest.fixture
def sets(tmp_path) -> DataSet:
    """Set one labels light and dark, set two dark, as number 0, and glow. ``data`` joins them."""
    for name, names in (("one", ["light", "dark"]), ("two", ["dark", "glow"])):
        part = DataSet(tmp_path / name)
        part.pairs("train/x", "val/v", rows=BOX)
        part.pairs("train/y", rows="1 0.5 0.5 0.2 0.2\n")
        part.yaml(names=names)
    joined = DataSet(tmp_path)
    parts = ["one/data.yaml", "two/data.yaml"]
    joined.file("data.yaml", yaml.safe_dump({"train": parts, "val": parts}))
    return joined


def test_classes_are_merged_by_name_and_unlabeled_ones_ignored(sets):
    index = sets.index()
    assert index.names == ("light", "dark", "glow")
    assert [path.split("/")[-4] for path in map(index.path, range(4))] == ["one", "one", "two", "two"]
    assert index.classes[~index.crowd].tolist() == [0, 1, 1, 2]
    assert index.classes[index.crowd].tolist() == [2, 2, 0, 0]  # each in all of its image
    np.testing.assert_array_equal(index.boxes_xywh_px[index.crowd], [[0, 0, 80, 60]] * 4)
    assert counts(index) == Counts(4, 4)


def test_chosen_classes_and_names_in_another_order(sets):
    content = yaml.safe_load(sets.data.read_text())
    sets.file("data.yaml", yaml.safe_dump(content | {"names": ["glow", "light", "dark"]}))
    assert sets.index().names == ("glow", "light", "dark")
    some = load(open_set(sets.data, ["train"], classes=("dark",)))
    assert some.names == ("dark",)
    assert sorted(num_boxes(some).values()) == [0, 0, 1, 1]
    assert not some.crowd.any()


def test_each_part_is_judged_by_itself(sets):
    """A loss that is small overall may be all of a small data set."""
    one = DataSet(sets.root / "one")
    one.pairs(*(f"train/{i}" for i in range(30)))
    two = DataSet(sets.root / "two")
    two.file("labels/train/y.txt", "7 0.5 0.5 0.2 0.2\n")
    assert "two/data.yaml" in refusal(lambda: sets.index(max_bad=0.1))
    assert counts(sets.index(max_bad=0.5)) == Counts(33, 33, 1, 1)


def test_a_fraction_is_of_the_whole_and_held_out_images_may_be_of_any_part(sets):
    assert len(sets.index(fraction=0.5)) == 2
    content = yaml.safe_load(sets.data.read_text())
    sets.file("data.yaml", yaml.safe_dump({"train": content["train"]}))
    names = tuple(path for path in sets.index().paths if path.endswith("y.png"))
    spec = open_set(sets.data, ["train", "val"], val_images=names)
    assert list(load(spec, "val").paths) == list(names)
    assert len(load(spec)) == 2


def test_a_data_set_is_extended_by_the_classes_of_a_model(sets):
    """As for a model that keeps its classes: its first ones are matched without case."""
    spec = open_set(sets.root / "one/data.yaml", ["train"]).extended(("Dark", "tree"), "best.pt")
    assert spec.names == ("Dark", "tree", "light")
    index = load(spec)
    assert index.classes[~index.crowd].tolist() == [2, 0]
    assert index.classes[index.crowd].tolist() == [1, 1]
