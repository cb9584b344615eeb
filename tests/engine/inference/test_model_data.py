"""The classes on which a model is scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.source.dataset_yaml import load_dataset_spec
from engine.inference.model import CheckpointModel
from engine.inference.model_data import classes_to_score
from models.detector import build_detector
from tests.helpers.tiny import TINY_MODEL

WORKERS = ["vest", "person"]


@pytest.mark.parametrize(
    ("flags", "names", "single_cls", "scored"),
    [
        ({}, ["helmet"], False, []),
        ({"classes": ["helmet"]}, ["helmet"], False, ["helmet"]),
        ({"classes": ["1"]}, ["vest"], False, ["vest"]),  # the number is one of the training's data
        ({"classes": ["shoe"]}, ["shoe"], False, []),  # which this data set does not have
        ({"classes": ["helmet", "vest"], "single_cls": True}, ["object"], True, ["helmet", "vest"]),
        ({"classes": ["helmet"], "keep_old": True}, ["person", "helmet"], False, ["helmet"]),  # not person
        ({"classes": ["helmet", "shoe"], "keep_old": True}, ["person", "helmet", "shoe"], False, ["helmet"]),
        ({"classes": ["shoe"], "keep_old": True}, ["person", "shoe"], False, []),
        ({"keep_old": True}, ["person", "helmet"], False, []),
        ({"classes": ["Helmet"], "keep_old": True}, ["person", "Helmet"], False, ["helmet"]),
        # Numbers of the training's data set, in which the classes have another order.
        ({"classes": ["0", "2"], "used_classes": ["vest", "person"], "single_cls": True}, ["object"], True, WORKERS),
        ({"classes": ["2"], "used_classes": ["vest"], "keep_old": True}, ["person", "vest"], False, ["vest"]),
    ],
)
def test_a_model_is_scored_on_what_it_has_learned(tmp_path, flags, names, single_cls, scored):
    """The rows of the table of `classes_to_score`."""
    data = tmp_path / "data.yaml"
    data.write_text("names: [helmet, vest, person]\nval: images\n")
    spec = load_dataset_spec(str(data))
    detector = build_detector(TINY_MODEL, len(names), names=tuple(names)).fuse()
    model = CheckpointModel(detector, {"imgsz": 64, "config": flags}, Path("best.pt"), torch.device("cpu"))
    assert list(classes_to_score(model, spec, single_cls=single_cls)) == scored
