"""The classes on which a model is scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data.index import IndexSettings
from data.load import load_index
from data.read_spec import load_dataset_spec
from data.spec import DatasetSpec, DataSource
from engine.inference.model import CheckpointModel
from engine.inference.model_data import classes_to_score, open_model_data
from models.detector import build_detector
from tests.helpers.tiny import TINY_MODEL, write_dataset
from utils.distributed.context import DistributedContext
from utils.errors import UserError

WORKERS = ["vest", "person"]


@pytest.mark.parametrize(
    ("stored", "names", "single_cls", "scored"),
    [
        ({}, ["helmet"], False, []),
        ({"used_classes": ["shoe"]}, ["shoe"], False, []),  # which this data set does not have
        ({"used_classes": ["helmet", "vest"], "single_cls": True}, ["object"], True, ["helmet", "vest"]),
        ({"used_classes": ["helmet", "shoe"], "keep_old": True}, ["person", "helmet", "shoe"], False, ["helmet"]),
        ({"used_classes": ["Helmet"], "keep_old": True}, ["person", "Helmet"], False, ["helmet"]),
        ({"used_classes": ["vest"]}, ["vest"], True, ["vest"]),  # val.py --single-cls of a model with names
        ({"used_classes": ["1"], "keep_old": True}, ["person", "1"], False, []),  # a name, not a number
        # Numbers of the training's data set, in which the classes have another order.
        ({"classes": ["0", "2"], "used_classes": ["vest", "person"], "single_cls": True}, ["object"], True, WORKERS),
    ],
)
def test_a_model_is_scored_on_what_it_has_learned(tmp_path, stored, names, single_cls, scored):
    """Names no flag, so that `classes_to_score` chooses."""
    model, spec = _model_and_data(tmp_path, stored, names)
    assert list(classes_to_score(model, spec, single_cls=single_cls)) == scored


def test_a_data_set_without_any_trained_class_is_refused(tmp_path):
    model, spec = _model_and_data(tmp_path, {"used_classes": ["shoe"], "single_cls": True}, ["object"])
    with pytest.raises(UserError, match=r"was trained on --classes shoe, of which .*data.yaml has none; name its"):
        classes_to_score(model, spec, single_cls=True)


@pytest.mark.parametrize(
    ("splits", "empty", "has_held_out", "is_staged"),
    [("val", "", False, False), ("train", "", True, True), ("train val", "val", True, False)],
)
def test_images_that_the_training_held_out_stand_in_for_a_missing_val(
    tmp_path, splits: str, empty: str, has_held_out: bool, is_staged: bool
):
    """The data set may be another one than that of the training, and have no 'train'."""
    data = write_dataset(tmp_path / "set", train=3, val=2)
    paths = {split: "nowhere" if split == empty else f"images/{split}" for split in splits.split()}
    data.write_text(yaml.safe_dump({**paths, "names": ["light", "dark"]}))
    detector = build_detector(TINY_MODEL, 2, names=("light", "dark")).fuse()
    info = {"imgsz": 64, "config": {}, "val_images": ["images/train/001.png"]}
    model = CheckpointModel(detector, info, Path("best.pt"), torch.device("cpu"))
    source = DataSource(str(data), ("val",), stage=str(tmp_path / "stage") if is_staged else "")
    spec = open_model_data(model, source, DistributedContext.single(), single_cls=False)
    assert spec.is_held_out("val") is has_held_out
    assert len(load_index(spec, "val", IndexSettings(progress=False))) == (1 if has_held_out else 2)


def _model_and_data(folder: Path, stored: dict[str, Any], names: list[str]) -> tuple[CheckpointModel, DatasetSpec]:
    data = folder / "data.yaml"
    data.write_text("names: [helmet, vest, person]\nval: images\n")
    detector = build_detector(TINY_MODEL, len(names), names=tuple(names)).fuse()
    model = CheckpointModel(detector, {"imgsz": 64, "config": stored}, Path("best.pt"), torch.device("cpu"))
    return model, load_dataset_spec(str(data))
