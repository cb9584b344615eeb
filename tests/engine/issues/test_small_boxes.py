"""The warning about boxes that are too small for the size of training."""

from __future__ import annotations

import re

import numpy as np
import pytest

from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index
from engine.issues.small_boxes import remedy_for_small_boxes, warn_of_small_boxes
from tests.helpers.tiny import write_dataset
from utils.logger import get_logger


@pytest.fixture
def index(tmp_path):
    spec = load_dataset_spec(write_dataset(tmp_path / "set", train=20, val=2))
    return load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "index"), progress=False))


def test_small_boxes_are_warned_of_with_a_size_at_which_they_no_longer_are(index, monkeypatch):
    lines = []
    monkeypatch.setattr(get_logger(), "warning", lambda text, *values: lines.append(text % values))
    boxes = index.boxes_xywh_px[:, 2:] / 64  # the images have 64 x 64 pixels
    median = float(np.median(np.sqrt(boxes.prod(1))))
    large = int(17 / median)
    small = int(12 / median)
    warn_of_small_boxes(index, imgsz=large, stride=32)
    assert lines == []
    warn_of_small_boxes(index, imgsz=small, stride=32)
    assert len(lines) == 1
    assert f"{median * small:.1f} px at --imgsz {small}" in lines[0]
    better = int(re.search(r"use --imgsz (\d+)", lines[0])[1])
    assert better % 32 == 0
    assert median * (better - 32) < 16 <= median * better


def test_sizes_that_nobody_trains_at_are_not_advised():
    assert remedy_for_small_boxes(16.0, 640, 32) is None
    assert "--imgsz 640 " in remedy_for_small_boxes(8.0, 320, 32)
    assert "--imgsz 352 " in remedy_for_small_boxes(15.9, 320, 32)
    assert "--imgsz 2048 " in remedy_for_small_boxes(5.0, 640, 32)
    assert remedy_for_small_boxes(4.9, 640, 32).startswith("add 'tile: 640' to the data set's YAML")


def test_a_set_with_tiles_is_advised_smaller_ones():
    assert remedy_for_small_boxes(8.0, 320, 32, tile=640) == (
        "use --imgsz 640 or more, or smaller tiles ('tile: 320' in the data set's YAML)"
    )
    assert remedy_for_small_boxes(4.9, 640, 32, tile=640) == "use smaller tiles ('tile: 192' in the data set's YAML)"
    assert "'tile: 32'" in remedy_for_small_boxes(0.1, 640, 32, tile=64)
    assert remedy_for_small_boxes(16.0, 640, 32, tile=64) is None
