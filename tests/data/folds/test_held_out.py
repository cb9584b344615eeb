"""The part of a training split that is held out for validation."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from data.folds.assign import class_counts
from data.folds.held_out import index_to_divide, validation_images
from data.loading.build import open_val_index
from data.read_spec import load_dataset_spec
from tests.data.folds.eighteen_images import index_of, transfer
from tests.helpers.messages import refused
from tests.helpers.tiny import write_dataset
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext


@pytest.mark.parametrize("workers", [-1, 0, 1])
def test_a_split_that_is_divided_is_scanned_like_any_other(tmp_path, monkeypatch, workers):
    """At least one thread per core scans, even if the loader has no worker processes."""
    used = []

    def map_and_record(function, items, *, threads: int):
        used.append(threads)
        return map(function, items)

    monkeypatch.setattr("data.scan.map_ahead", map_and_record)
    data = write_dataset(tmp_path / "set", train=2, val=2)
    config = TrainConfig(data=str(data), workers=workers, cache_dir=str(tmp_path / "cache"))
    spec = load_dataset_spec(data)
    index_to_divide(spec, "train", config)
    open_val_index(DistributedContext.single(), config, spec, "val")
    assert used[0] == used[1]


@pytest.mark.parametrize(("fraction", "images"), [(0.1, 2), (0.25, 5), (0.5, 9), (0.05, 1)])
def test_a_part_of_each_class_is_held_out(config, fraction, images):
    index = index_of(config)
    names = validation_images(index, fraction)
    assert abs(len(names) - images) <= 1
    assert names == validation_images(index, fraction)
    taken = index.take(np.array([list(index.paths).index(name) for name in names]))
    assert list(taken.paths) == names
    counts = class_counts(taken).sum(0)
    of_all = class_counts(index).sum(0)
    assert (np.abs(counts - fraction * of_all) <= 3).all()


def test_whole_groups_are_held_out(config):
    index = index_of(config)
    for number in range(6):  # six images of three copies
        old = index.path(number)
        for copy in range(3):
            transfer(shutil.copy if copy < 2 else shutil.move, old, old.replace(".png", f"_png.rf.{copy}.png"))
    index = index_of(config)
    names = {name.partition("_png.rf.")[0] for name in validation_images(index, 0.4) if ".rf." in name}
    assert names
    assert sum(name.startswith(f"{stem}_png.rf.") for stem in names for name in index.paths) == 3 * len(names)
    one = index.take(np.flatnonzero([next(iter(names)) in name for name in index.paths]))
    with refused(
        "--val-fraction: 3 training images: near-duplicates and copies stay together, so none can be held out"
    ):
        validation_images(one, 0.2)
    assert len(validation_images(index.take(np.array([0, 17])), 0.05)) == 1  # of two groups
    with refused("--val-fraction: 1 training image: near-duplicates and copies stay together, so none can be held out"):
        validation_images(index.take(np.array([0])), 0.2)
