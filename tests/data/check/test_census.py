"""The census of a split, and the warning about small boxes."""

from __future__ import annotations

import numpy as np
import pytest

from data import box_sizes
from data.box_sizes import remedy_for_small_boxes, size_that_shows, warn_of_small_boxes
from data.check.census import take_census
from data.index.load import load_index
from data.spec.dataset_yaml import load_dataset_spec
from tests.helpers.tiny import write_dataset


@pytest.fixture
def index(tmp_path):
    spec = load_dataset_spec(write_dataset(tmp_path / "set", train=20, val=2))
    return load_index(spec, "train", cache_dir=str(tmp_path / "index"), progress=False)


def test_small_boxes_are_warned_of_with_a_size_at_which_they_no_longer_are(index, monkeypatch):
    lines = []
    monkeypatch.setattr(box_sizes.get_logger(), "warning", lambda text, *values: lines.append(text % values))
    boxes = index.boxes_xywh_px[:, 2:] / 64  # the images have 64 x 64 pixels
    median = float(np.median(np.sqrt(boxes.prod(1))))
    large, small = int(17 / median), int(12 / median)
    warn_of_small_boxes(index, imgsz=large, stride=32)
    assert lines == []
    warn_of_small_boxes(index, imgsz=small, stride=32)
    better = size_that_shows(median * small, small, 32)
    assert len(lines) == 1
    assert f"{median * small:.1f} px at --imgsz {small}" in lines[0]
    assert f"--imgsz {better}" in lines[0]
    assert better % 32 == 0
    assert median * (better - 32) < 16 <= median * better


def test_sizes_that_nobody_trains_at_are_not_advised():
    assert remedy_for_small_boxes(16.0, 640, 32) is None
    assert "--imgsz 2048 " in remedy_for_small_boxes(5.0, 640, 32)
    assert (
        remedy_for_small_boxes(4.9, 640, 32)
        == "add 'tile: 640' to the data set's YAML, which cuts the images into tiles"
    )


def test_counts_are_those_of_the_labels(index):
    found = take_census(index, "train", 64)
    assert found.images == 20
    assert found.boxes == len(index.boxes_xywh_px) == found.centers.sum()
    assert found.class_boxes.tolist() == np.bincount(index.classes, minlength=2).tolist()
    assert found.backgrounds == int((np.diff(index.offsets) == 0).sum())
