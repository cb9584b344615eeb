"""Copies of data sets: every image, of sets in any place that the commands accept, with YOLO labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.dataset_copy import copied
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from tests.helpers.tiny import write_dataset
from utils.errors import UserError

pytestmark = pytest.mark.benchmarks


def test_a_copy_repeats_every_training_image(tmp_path: Path):
    original = write_dataset(tmp_path / "set", train=4, val=3)
    with copied(str(original), times=3) as data:
        spec = load_dataset_spec(data)
        train, val = (list_split(spec, split) for split in ("train", "val"))
        assert (len(train.images), len(val.images)) == (12, 3)
        assert all(label.stamp is not None for label in train.labels)
    assert not data.exists()


def test_a_data_set_is_copied_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_dataset(tmp_path / "datasets" / "bccd", train=2, val=1)
    monkeypatch.chdir(tmp_path)
    with copied("bccd.yaml") as data:
        assert len(list_split(load_dataset_spec(data), "train").images) == 2


def test_a_missing_data_set_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="no-such-set"), copied("no-such-set"):
        pass


def test_only_yolo_labels_are_copied(tmp_path: Path):
    """COCO's and Pascal VOC's labels are in other files, and joined sets have several folders."""
    original = write_dataset(tmp_path / "set", train=2, val=1)
    content = yaml.safe_load(original.read_text())
    (original.parent / "boxes").mkdir()
    others = [content | {"annotations": {"train": name, "val": name}} for name in ("boxes.json", "boxes")]
    others.append({"train": [str(original)], "val": [str(original)]})
    for number, other in enumerate(others):
        path = original.parent / f"{number}.yaml"
        path.write_text(yaml.safe_dump(other))
        with pytest.raises(UserError, match="labels must be YOLO"), copied(str(path)):
            pass
