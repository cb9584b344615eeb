"""The index of a split, and the part of it that a run uses."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from data.findings import BAD_IMAGE, BAD_ROW, NO_LABEL, ORPHAN
from tests.data.data_set import (
    BOX,
    Counts,
    DataSet,
    boxes,
    coco,
    counts,
    image_bytes,
    load,
    num_boxes,
    open_set,
    places,
)
from tests.helpers.damaged_jpegs import write_jpegs


@pytest.fixture
def three(data: DataSet) -> DataSet:
    """Six images with a, b, or both, of which one has no label file."""
    for i, rows in enumerate(("0 0.3 0.3 0.2 0.2\n", "1 0.6 0.6 0.2 0.2\n", BOX + "1 0.6 0.6 0.2 0.2\n", "", BOX)):
        data.pairs(f"train/{i}", rows=rows)
    data.images("images/train/none.jpg", hw=(30, 50))
    data.yaml(train="images/train", val="images/train")
    return data


def assert_same(a, b) -> None:
    assert list(a.paths) == list(b.paths)
    for name in ("image_hw", "offsets", "boxes_xywh_px", "classes", "crowd", "area_px", "repeated", "row_number"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert list(map(str, a.report.findings)) == list(map(str, b.report.findings))
    assert counts(a) == counts(b)


def test_the_arrays_of_an_index(three, tmp_path):
    index = three.index(cache_dir=str(tmp_path / "cache"))
    assert list(index.paths) == [f"images/train/{name}" for name in ("0.png", "1.png", "2.png", "3.png", "4.png")] + [
        "images/train/none.jpg"
    ]
    assert index.path(0) == str(three.root / "images/train/0.png")
    assert index.image_hw.tolist() == [[60, 80]] * 5 + [[30, 50]]
    assert index.offsets.tolist() == [0, 1, 2, 4, 4, 5, 5]
    assert index.classes.tolist() == [0, 1, 0, 1, 0]
    assert index.row_number.tolist() == [1, 1, 1, 2, 1]
    np.testing.assert_allclose(index.boxes_xywh_px[0], [16, 12, 16, 12])
    np.testing.assert_allclose(index.labels(1), [[1, 0.6, 0.6, 0.2, 0.2]], atol=1e-7)
    assert index.labels(3).shape == (0, 5)
    assert counts(index) == Counts(6, 5)
    cached = three.index(cache_dir=str(tmp_path / "cache"))
    for other in (cached, pickle.loads(pickle.dumps(cached)), three.index(use_cache=False, workers=4)):
        assert_same(index, other)


@pytest.mark.parametrize("form", ["yolo", "coco"])
def test_single_cls_and_chosen_classes_select_boxes_of_all_images(three, form):
    if form == "coco":
        rows = [[(1, 5, 5, 9, 9)], [(2, 5, 5, 9, 9)], [(1, 5, 5, 9, 9), (2, 30, 5, 9, 9)], [], [(1, 5, 5, 9, 9)]]
        three.file("a.json", coco([(f"{i}.png", of_image) for i, of_image in enumerate(rows)] + [("none.jpg", [])]))
        three.yaml(train="images/train", annotations={"train": "a.json"})
    whole = three.index()
    one = three.index(single_cls=True)
    assert one.names == ("object",)
    assert one.classes.tolist() == [0] * 5
    np.testing.assert_array_equal(one.boxes_xywh_px, whole.boxes_xywh_px)
    for chosen in ("b", "1"):
        some = load(open_set(three.data, ["train"], classes=(chosen,)))
        assert some.names == ("b",)
        assert list(some.paths) == list(whole.paths)
        np.testing.assert_array_equal(some.boxes_xywh_px, whole.boxes_xywh_px[whole.classes == 1])
        assert some.classes.tolist() == [0, 0]
        assert some.ground_truth().category_ids == ((2,) if form == "coco" else (1,))
        assert counts(some) == counts(whole)  # what a user leaves out is not lost


def test_an_image_with_a_lost_row_and_no_object_of_the_chosen_classes_is_left_out(data):
    """The lost row may have been of these classes; as a background it would teach the opposite."""
    data.pairs("train/x", rows=BOX + "1 0.5 0.5\n")
    data.pairs("train/y", rows=BOX)
    data.pairs("train/z", rows="1 0.5 0.5 0.2 0.2\n")
    data.yaml()
    index = load(open_set(data.data, ["train"], classes=("b",)))
    assert num_boxes(index) == {"images/train/y.png": 0, "images/train/z.png": 1}
    assert counts(index) == Counts(3, 3, 0, 1)


def test_classes_are_merged_and_ignored_as_the_yaml_says(three):
    three.yaml(train="images/train", names=["cat", "dog"], classes={"dog": "ignore", "cat": "animal"})
    index = three.index()
    assert index.names == ("animal",)
    assert index.crowd.tolist() == [False, True, False, True, False]
    assert index.classes[~index.crowd].tolist() == [0, 0, 0]
    assert counts(index) == Counts(6, 5)
    three.yaml(train="images/train", names=["cat", "dog"], classes={"dog": "cat"})
    assert three.index().names == ("cat",)
    assert three.index().classes.tolist() == [0] * 5


def test_a_fraction_is_drawn_by_the_seed_and_smaller_ones_are_subsets(data):
    data.pairs(*(f"train/{i}" for i in range(20)))
    data.yaml()
    whole = boxes(data.index())
    parts = [boxes(data.index(fraction=share)) for share in (0.25, 0.5, 1.0)]
    assert [len(part) for part in parts] == [5, 10, 20]
    assert parts[0].items() <= parts[1].items() <= whole.items()
    assert boxes(data.index(fraction=0.5)) == parts[1]
    assert boxes(data.index(fraction=0.5, seed=1)) != parts[1]
    assert len(data.index(fraction=1e-6)) == 1


def test_held_out_images_are_the_validation_split(three):
    three.yaml(train="images/train")
    names = ["images/train/1.png", "images/train/2.png"]
    spec = open_set(three.data, ["train", "val"], val_images=tuple(names))
    train, val = load(spec), load(spec, "val")
    assert list(val.paths) == names
    assert sorted([*train.paths, *val.paths]) == list(three.index().paths)
    three.pairs("val/own")
    three.yaml()
    assert list(load(open_set(three.data, ["train", "val"], val_images=tuple(names)), "val").paths) == [
        "images/val/own.png"
    ]


def test_a_held_out_part_has_the_findings_of_its_images(data):
    data.pairs(*(f"train/{i}" for i in range(4)), rows=BOX + "0 0.5 0.5 0.2\n")
    data.images("images/train/5.png", "images/train/6.png")
    data.file("labels/train/z.txt")
    data.yaml(train="images/train")
    spec = open_set(data.data, ["train", "val"], val_images=("images/train/0.png", "images/train/5.png"))
    for split, with_bad_row, unlabeled in (("train", "123", "6"), ("val", "0", "5")):
        index = load(spec, split)
        assert places(index, BAD_ROW) == [f"labels/train/{i}.txt:2" for i in with_bad_row]
        assert places(index, NO_LABEL) == [f"images/train/{unlabeled}.png"]
        assert [index.paths[i] for i in np.flatnonzero(index.without_label_file())] == places(index, NO_LABEL)
    assert places(load(spec), ORPHAN) == ["labels/train/z.txt"]
    assert places(load(spec, "val"), ORPHAN) == []


def test_unreadable_images_are_counted_with_their_objects(data):
    data.pairs(*(f"train/{i}" for i in range(6)), rows=BOX + "1 0.3 0.3 0.1 0.1\n")
    contents = (b"not an image", image_bytes()[:999], b"")
    for i, content in enumerate(contents):
        data.file(f"images/train/{i}.png", content)
    os.remove(data.root / "images/train/3.png")
    os.mkfifo(data.root / "images/train/3.png")  # reading it would block forever
    data.yaml()
    index = data.index()
    assert set(boxes(index)) == {"4", "5"}
    assert (index.report.lost_images, index.report.lost_objects) == (4, 8)
    assert places(index, BAD_IMAGE) == [f"images/train/{i}.png" for i in range(3)]


def test_image_ids_are_numeric_stems_unless_two_are_equal(data):
    for name, ids in (
        ("42", (42,)),
        ("p/007", (42, 7)),
        ("q/7", ("42", "007", "7")),
        ("r/7", ("images/train/42.png", "images/train/p/007.png", "images/train/q/7.png", "images/train/r/7.png")),
    ):
        data.pairs(f"train/{name}")
        data.yaml()
        assert data.index().ground_truth().image_ids == ids


def test_a_jpeg_with_a_hole_is_found_by_the_scan(tmp_path):
    path = write_jpegs(tmp_path / "set", damaged=20)
    assert counts(load(path)) == Counts(4, 4, 20, 20)
