"""The numbers of a split's labels."""

from __future__ import annotations

import numpy as np

from data.dataset.yaml_file import load_dataset_spec
from data.index.index import IndexSettings
from data.index.load import load_index
from engine.report.census import take_census
from tests.helpers.tiny import write_dataset


def test_counts_are_those_of_the_labels(tmp_path):
    spec = load_dataset_spec(write_dataset(tmp_path / "set", train=20, val=2))
    index = load_index(spec, "train", IndexSettings(cache_dir=str(tmp_path / "index"), progress=False))
    found = take_census(index, "train", 64)
    assert found.images == 20
    assert found.boxes == len(index.boxes_xywh_px) == found.centers.sum()
    assert found.class_boxes.tolist() == np.bincount(index.classes, minlength=2).tolist()
    assert found.backgrounds == int((np.diff(index.offsets) == 0).sum())
