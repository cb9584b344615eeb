"""Settings of val.py and detect.py that do nothing with a model get one line of the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.inference.predict import unused_detection_settings
from models.postprocess.tiles import Tiles
from utils.config.parser import parse_config
from utils.config.settings import DetectConfig, ValConfig

WITH_NMS = {"is_unscored_branch": True, "nms_iou": 0.7, "input_hw": None, "names": ["cat", "dog"]}
NMS_FREE = WITH_NMS | {"nms_iou": None}
ONE_CLASS = WITH_NMS | {"names": ["cat"]}
FIXED_SIZE = WITH_NMS | {"input_hw": (640, 640)}
VAL = (ValConfig, "--weights a.pt")
DETECT = (DetectConfig, "--weights a.pt --source b.jpg")


@pytest.mark.parametrize(
    ("model", "command", "line", "trained_tile", "expected"),
    [
        (NMS_FREE, VAL, "--no-box-voting", 0, "--no-box-voting"),
        (WITH_NMS, DETECT, "--no-tile-full-image --overlap 0.5", 320, "--no-tile-full-image"),
        (FIXED_SIZE, VAL, "--no-rect", 0, "--no-rect"),
        (WITH_NMS, DETECT, "--nosave --hide-conf --line-width 2", 0, "--line-thickness 2 and --hide-conf"),
        # With an effect:
        (WITH_NMS, VAL, "--nms --no-box-voting --rect --tile 320 --overlap 0.5 --no-tile-full-image", 0, None),
        (WITH_NMS, DETECT, "--save-conf --save-txt --agnostic-nms --nosave --view-img --hide-conf", 0, None),
        (ONE_CLASS | {"nms_iou": None}, DETECT, "--agnostic-nms", 0, None),  # it asks for NMS
    ],
)
def test_a_setting_without_effect_gets_one_line(model, command, line, trained_tile, expected):
    cls, required = command
    config = parse_config(cls, f"{required} {line}".split())
    opened: Any = SimpleNamespace(**model)
    lines = unused_detection_settings(config, opened, Tiles.from_config(config, trained_tile))
    assert [line.partition(" do")[0] for line in lines] == ([expected] if expected else [])
