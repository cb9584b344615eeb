"""Settings of detection in Python: which values are taken, as what, and which are refused."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from engine.inference.predictor import load
from engine.inference.yolov5 import load_yolov5
from models.postprocess.tiles import Tiles
from tests.engine.inference.conftest import picture
from utils.errors import UserError


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ({"conf": np.float32(0.5)}, {"conf": 0.5}),
        ({"conf": torch.tensor(0.25), "iou": 1}, {"conf": 0.25, "iou": 1.0}),
        ({"imgsz": np.int64(96), "max_det": torch.tensor(3)}, {"imgsz": 96, "max_det": 3}),
        ({"agnostic": np.True_, "box_voting": False}, {"agnostic": True, "box_voting": False}),
        ({"agnostic": 1, "box_voting": np.int64(0)}, {"agnostic": True, "box_voting": False}),
        ({"classes": "ring"}, {"classes": ["ring"]}),
        ({"classes": 1}, {"classes": [1]}),
        ({"classes": np.array([1, 0])}, {"classes": [1, 0]}),
        ({"classes": {0: "disc", 1: "ring"}.keys()}, {"classes": [0, 1]}),
        ({"classes": deque([1])}, {"classes": [1]}),
        ({"half": False, "augment": None, "visualize": 0}, {}),
        ({"imgsz": None, "conf": None}, {}),
    ],
)
def test_values_become_plain_ones(predictor, settings, plain):
    changed = predictor.settings.changed(settings)
    expected = {"imgsz": 64, "conf": 0.0, "iou": None, "max_det": 5, "classes": None}
    expected |= {"agnostic": False, "box_voting": True, **plain}
    assert vars(changed) == expected
    assert [type(value) for value in vars(changed).values()] == [type(value) for value in expected.values()]


def refused_values() -> list[tuple[str, Any]]:
    return [
        ("conf", True),
        ("conf", 1.5),
        ("conf", float("nan")),
        ("iou", False),
        ("iou", [0.5]),
        ("imgsz", True),
        ("imgsz", (64, 96)),
        ("imgsz", np.array([64, 64])),
        ("imgsz", -64),
        ("max_det", True),
        ("max_det", 0),
        ("max_det", 2.5),
        ("classes", True),
        ("classes", [0.5]),
        ("classes", (c for c in (0, 1))),
        ("agnostic", "no"),
        ("agnostic", 2),
        ("agnostic", "1"),
        ("box_voting", "False"),
        ("batch_size", 2.5),
        ("batch_size", -1),
        ("embed", np.array([1, 2])),
    ]


@pytest.mark.parametrize(("name", "value"), refused_values())
def test_a_mistake_is_a_user_error_that_names_the_setting(predictor, name, value):
    with pytest.raises(UserError, match=rf"^{name}(: must be|=.*: unknown)"):
        predictor(picture(), color="rgb", **{name: value})


@pytest.mark.parametrize(("name", "value"), [("conf", True), ("max_det", True), ("agnostic", "no"), ("iou", "x")])
def test_attributes_are_checked_when_they_are_assigned(weights, name, value):
    model = load_yolov5(weights, device="cpu")
    before = getattr(model, name)
    with pytest.raises(UserError, match=f"^{name}: must be"):
        setattr(model, name, value)
    assert getattr(model, name) == before


@pytest.mark.parametrize("name", ["nms", "trust"])
def test_text_is_not_taken_as_true(weights, name):
    with pytest.raises(UserError, match=f"^{name}: must be true or false, got 'no'"):
        load(weights, device="cpu", **{name: "no"})
    for value in (0, None, np.False_):
        load(weights, device="cpu", **{name: value})


def test_tiles_are_a_size_or_settings(weights):
    def tiles(value: Any) -> Tiles | None:
        return load(weights, device="cpu", tiles=value).image_detector.tiles

    assert tiles(64) == tiles(np.int64(64)) == Tiles(64)
    assert [tiles(value) for value in (True, False, None, 0, np.False_)] == [None] * 5
    assert tiles(Tiles(64, overlap=0.5)) == Tiles(64, overlap=0.5)
    for mistake in ("640", 64.5, -64, 33):
        with pytest.raises(UserError, match=r"tile"):
            tiles(mistake)
    for mistake in ({"size": 64.5}, {"size": 64, "overlap": 20}, {"size": 64, "full_image": "no"}):
        with pytest.raises(UserError, match=rf"^Tiles: {[*mistake][-1]}: must be"):
            Tiles(**mistake)


def test_vid_stride_is_a_whole_number(predictor):
    for mistake in (0, "2", True):
        with pytest.raises(UserError, match=r"^vid_stride: must be"):
            predictor.stream([], vid_stride=mistake)
