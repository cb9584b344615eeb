"""Keywords of the Python functions become the settings of a command, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
from utils.config.parser import parse_config, parse_keywords
from utils.config.settings import ExportConfig, Hyperparameters, TrainConfig


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"epochs": "3", "device": 0, "classes": "cat"}, "--epochs 3 --device 0 --classes cat"),
        ({"epochs": np.int64(3), "weights": Path("a b")}, ["--epochs", "3", "--weights", "a b"]),
        ({"device": [0, 1], "imgsz": torch.tensor(320)}, "--device 0,1 --imgsz 320"),
        ({"freeze": range(2), "classes": np.array([0, 3])}, "--freeze 0 1 --classes 0 3"),
        ({"freeze": [3]}, "--freeze 3 3"),  # a list names layers, as in Ultralytics
        ({"batch": 8, "cache": True, "amp": False, "optimizer": "sgd"},
         "--batch-size 8 --cache ram --amp off --optimizer SGD"),
        ({"cache": False, "multi_scale": False, "cos_lr": True, "nbs": 64},
         "--cache none --multi-scale 0 --cos-lr --nominal-batch 64"),
        ({"export": ["onnx", "pt2"], "device": torch.device("cuda:1")}, "--export onnx pt2 --device cuda:1"),
        ({"lr0": 0.01, "close_mosaic": 3}, "--set lr0=0.01 --set close_mosaic=3"),
        ({"lr_mult": None, "epochs": None}, "--set lr_mult=null"),  # null is a value of lr_mult only
        ({"imgsz": (320, 320), "val": False}, "--imgsz 320 --val-every 0"),
    ],
)  # fmt: skip
def test_values_mean_the_same_as_on_a_command_line(keywords, words):
    config = parse_keywords(TrainConfig, {}, keywords).config
    assert config == parse_config(TrainConfig, words.split() if isinstance(words, str) else words)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"epochs": 0}, "epochs"),
        ({"epocs": 1}, "epochs"),
        ({"resume": True}, "lockstep.resume"),
        ({"half": False, "wandb": False}, "wandb: leave it out"),
        ({"callbacks": lambda run: None}, "callbacks"),
    ],
)
def test_mistakes_are_one_line_that_names_the_keyword(keywords, named):
    with pytest.raises(lockstep.Error) as error:
        lockstep.train(**{"data": "demo", **keywords})
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_keywords_without_effect_are_left_out_as_on_a_command_line():
    config = parse_keywords(ExportConfig, {"weights": "a.pt"}, {"device": 0, "simplify": True, "half": True}).config
    assert config == parse_config(ExportConfig, ["--weights", "a.pt", "--device", "0", "--simplify", "--half"])
    assert config == ExportConfig(weights="a.pt", half=True)


def test_every_hyperparameter_is_a_keyword():
    defaults = {name: getattr(Hyperparameters(), name) for name in Hyperparameters.__annotations__}
    assert len(parse_keywords(TrainConfig, {}, defaults).config.override) == len(defaults)
