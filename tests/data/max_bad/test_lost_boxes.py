"""Unusable boxes count against --max-bad, equally in all label formats; readable boxes are used."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from tests.data.max_bad.twenty_images import (
    EACH_FORMAT,
    IMAGES,
    NAMES,
    change_entries,
    edit_json,
    edit_rows,
    load,
    one_good_row_of_ten,
    with_unknown_class,
    write_yaml,
)
from utils.errors import UserError


def without_area(rows: list) -> list:
    return [(c, x1, y1, x1, y2) for c, x1, y1, x2, y2 in rows]


def outside(rows: list) -> list:
    return [(c, x1 + 500, y1, x2 + 500, y2) for c, x1, y1, x2, y2 in rows]


# What is done to how many images, how many images and objects of all are lost with it, and what the message names.
DEFECTS = {
    "without area": (without_area, 5, (5, 20), (10, 40), "the boxes have no area"),
    "outside": (outside, 5, (5, 20), (10, 40), "the boxes are outside the image"),
    "one good row of ten": (one_good_row_of_ten, 20, (0, 20), (180, 200), "bad row: 180 objects"),
    "unknown class": (with_unknown_class, 8, (0, 20), (8, 40), "unknown class: 8 objects"),
}


@EACH_FORMAT
@pytest.mark.parametrize("defect", DEFECTS)
def test_lost_rows_are_held_against_max_bad_with_each_reader(root, reader, defect):
    change, count, images, objects, cause = DEFECTS[defect]
    path = write_yaml(root, reader)
    for name in IMAGES[:count]:
        edit_rows(root, name, change)
    lost = " and ".join(
        f"{each} of {total} {noun}"
        for (each, total), noun in ((images, "images"), (objects, "labeled objects"))
        if each
    )
    for _ in range(2):  # a cached index is judged alike
        with pytest.raises(UserError, match=re.escape(cause)) as refused:
            load(path)
        assert f"{path}: 'train': {lost} can't be used (--max-bad is 0.1): " in str(refused.value)
    share = max(each / total for each, total in (images, objects))
    with pytest.raises(UserError):
        load(path, max_bad=share - 0.01)
    index = load(path, max_bad=share + 0.01)
    assert len(index) == 20 - images[0]
    assert np.diff(index.offsets).all(), "an image with lost rows is a background"
    assert index.incomplete.sum() == count - images[0]


REVERSED = {
    "voc": lambda rows: [(c, x2, y1, x1, y2) for c, x1, y1, x2, y2 in rows],
    "coco": lambda rows: [(c, x2, y2, x1, y1) for c, x1, y1, x2, y2 in rows],
    "yolo": lambda rows: [(c, x2, y2, x1, y1) for c, x1, y1, x2, y2 in rows],
}


@EACH_FORMAT
@pytest.mark.parametrize("count", [5, 20])
def test_corners_in_the_wrong_order_and_negative_sizes_are_read(root, caplog, reader, count):
    path = write_yaml(root, reader)
    before = load(path)
    for name in IMAGES[:count]:
        edit_rows(root, name, REVERSED[reader])
    caplog.set_level(logging.INFO, "lockstep")
    for _ in range(2):
        caplog.clear()
        after = load(path)
        (message,) = (text for text in caplog.messages if "wrong order" in text and "boxes with" in text)
        start = "train: boxes with corners in the wrong order, or negative sides, which are used: "
        assert message.startswith(f"{start}{2 * count}, first ")
    assert after.report.ledger.losses == ()
    np.testing.assert_allclose(after.boxes_xywh_px, before.boxes_xywh_px)
    np.testing.assert_allclose(after.area_px, before.area_px)


@EACH_FORMAT
def test_boxes_in_another_notation_are_lost_where_they_do_not_fit(root, reader):
    """Corners in place of sizes, or sizes in place of corners: those that fit do so by chance."""

    def rewritten(rows: list) -> list:
        if reader == "voc":
            return [(c, x1, y1, x2 - x1, y2 - y1) for c, x1, y1, x2, y2 in rows]
        if reader == "coco":
            return [(c, x1, y1, x1 + x2, y1 + y2) for c, x1, y1, x2, y2 in rows]
        return [(c, x1 - x2 / 2, y1 - y2 / 2, x1 + x2 / 2, y1 + y2 / 2) for c, x1, y1, x2, y2 in rows]

    path = write_yaml(root, reader)
    for name in IMAGES:
        edit_rows(root, name, rewritten)
    with pytest.raises(UserError, match=r"labeled objects can't be used.* boxes do not fit into their images as .* as"):
        load(path)


def test_a_box_of_voc_outside_of_an_object_is_a_lost_row(root):
    path = write_yaml(root, "voc")
    for name in IMAGES[:5]:
        file = root / "voc" / name.replace(".png", ".xml")
        file.write_text(file.read_text().replace("<object>", "<Object>").replace("</object>", "</Object>"))
    with pytest.raises(UserError, match=r"5 of 20 images.*<Object> with a box where VOC has <object>"):
        load(path)


@EACH_FORMAT
def test_boxes_far_beyond_their_images_are_lost(root, reader):
    """Such labels belong to a larger image, whose size they do not state."""
    path = write_yaml(root, reader)
    edit_json(root, change_entries("images", lambda entry: entry.pop("width")))
    for name in IMAGES:
        edit_rows(root, name, lambda rows: [(c, 1.4 * x1, y1, 1.4 * x2, 1.3 * y2) for c, x1, y1, x2, y2 in rows])
    with pytest.raises(UserError, match="20 of 40 boxes exceed their images by more than 10% of a side"):
        load(path)


@pytest.mark.parametrize("reader", ["voc", "coco"])
def test_boxes_as_fractions_where_pixels_are_expected_are_named(root, reader):
    path = write_yaml(root, reader)
    for name in IMAGES[:7]:
        edit_rows(root, name, lambda rows: [(c, x1 / 80, y1 / 60, x2 / 80, y2 / 60) for c, x1, y1, x2, y2 in rows])
    with pytest.raises(UserError, match="the boxes are fractions of the image, expected pixels"):
        load(path)
    assert len(load(path, max_bad=0.5)) == 13
    for name in IMAGES:
        edit_rows(root, name, lambda _: [(0, 0, 0, 1, 1)])  # whole images
    with pytest.raises(UserError, match="the boxes are fractions of the image, expected pixels"):
        load(path)


def polygon(points: list[tuple[float, float]]) -> str:
    return "0 " + " ".join(f"{x} {y}" for x, y in points) + "\n"


def test_different_polygons_of_one_box_are_two_objects(root):
    low, high = (0.2, 0.2), (0.6, 0.7)
    triangles = [polygon([low, (0.6, 0.2), high]), polygon([low, (0.2, 0.7), high])]  # of one area, too
    box = polygon([low, (0.6, 0.2), high, (0.2, 0.7)])
    (root / "labels/train/00.txt").write_text("".join(triangles))
    (root / "labels/train/01.txt").write_text(triangles[0] * 2 + box * 2)
    index = load(write_yaml(root, "yolo"), repeats=True)
    assert index.repeated[:6].tolist() == [False, False, False, True, False, True]
    segmentations = [[[16, 12, 48, 12, 48, 42]], [[16, 12, 16, 42, 48, 42]], [[16, 12, 16, 42, 48, 42]]]
    object_of_both = {"image_id": 100, "category_id": 10, "bbox": [16, 12, 32, 30], "area": 480}
    extra = [object_of_both | {"id": 900 + i, "segmentation": each} for i, each in enumerate(segmentations)]
    edit_json(root, lambda content: content["annotations"].extend(extra))
    index = load(write_yaml(root, "coco"))
    assert index.repeated.sum() == 1
    odd = [[[1, 2], [3, 4]]], [{}], [], "", {"counts": [1, 2], "size": [60, 80]}, [[None] * 8]
    extra = [object_of_both | {"id": 910 + i, "segmentation": each} for i, each in enumerate(odd)]
    edit_json(root, lambda content: content["annotations"].extend(extra))
    assert load(write_yaml(root, "coco")).repeated.sum() == 1 + len(odd) - 1  # they are boxes


def test_lost_labels_from_one_percent_on_are_warned_of(root, caplog):
    path = write_yaml(root, "yolo")
    many = "".join(f"0 0.5 {0.1 + i / 1000} 0.2 0.1\n" for i in range(180))
    edit_rows(root, IMAGES[0], with_unknown_class)
    for _ in range(2):
        caplog.clear()
        index = load(path)
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        reason = "unknown class: labels/train/00.txt:2: class 7 is not among the classes (0 to 1)"
        assert warned == [f"train: 1 of 40 labeled objects can't be used and are left out: {reason}"]
    assert index.report.ledger.share == 1 / 40
    (root / "labels/train/01.txt").write_text(many)
    caplog.clear()
    load(path)
    assert [record for record in caplog.records if record.levelno == logging.WARNING] == []


@EACH_FORMAT
def test_many_images_labeled_without_objects_are_asked_about(root, caplog, reader):
    caplog.set_level(logging.INFO, "lockstep")
    path = write_yaml(root, reader)
    for count in (10, 15):
        for name in IMAGES[:count]:
            edit_rows(root, name, lambda _: [])
        caplog.clear()
        load(path)
        hint = [text for text in caplog.messages if "have no object" in text]
        assert len(hint) == (count == 15)
    assert hint[0].startswith("train: 15 of 20 labeled images have no objects: an empty label file, or no annotations")


@pytest.mark.parametrize("used", [False, True])
def test_a_background_class_is_named_before_training(root, caplog, used):
    path = write_yaml(root, "yolo", names=["cat", "dog", "__Background__"])
    if used:
        edit_rows(root, IMAGES[0], lambda rows: [*rows, (2, 0, 0, 80, 60)])
    load(path, "val")
    assert caplog.messages == []
    load(path)
    (message,) = caplog.messages
    assert f"'__Background__' is one of the classes, with {'1 box' if used else '0 boxes'}: " in message
    assert ("its boxes are learned as objects" if used else "'ignore: [__Background__]'") in message
    if not used:
        assert load(write_yaml(root, "yolo", names=["cat", "dog", "Background"], ignore=["Background"])).names == NAMES
