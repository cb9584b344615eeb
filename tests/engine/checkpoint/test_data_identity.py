from __future__ import annotations

import os
import shutil
from pathlib import Path

from data.dataset.spec import DataSource
from data.index.load import load_index
from data.open import open_data
from engine.checkpoint.data_identity import DataIdentity
from tests.helpers.tiny import write_dataset
from utils.distributed.context import DistributedContext


def identity_of(folder: Path) -> DataIdentity:
    spec = open_data(DataSource(str(folder), ("train", "val")), DistributedContext.single())
    return DataIdentity.of(load_index(spec, "train"), load_index(spec, "val"))


def test_a_copy_is_the_same_data_until_a_label_changes(tmp_path: Path):
    write_dataset(tmp_path / "set", train=2, val=2)
    original = identity_of(tmp_path / "set")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "set", copy)
    for path in copy.rglob("*.*"):
        os.utime(path, (1e9, 1e9))
    assert identity_of(copy) == original
    (copy / "labels/train/000.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    changed = identity_of(copy)
    assert changed != original
    assert changed.val_labels == original.val_labels
    (copy / "labels/val/000.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    assert identity_of(copy).val_labels != original.val_labels
