"""Each rule of the advice speaks on the numbers that it is about, and the program takes its command line."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.index import DatasetIndex
from engine.evaluation.analysis import BACKGROUND, KINDS, MISSED, ErrorSplit
from engine.report.advice import Advice, Known, Subject, advise
from tests.helpers.synthetic_index import index_of
from utils.config.commands import COMMANDS
from utils.config.parser import parse_config
from utils.config.settings import TrainConfig, ValConfig

OWN = {"data": "my set.yaml", "weights": "a.pt"}


def index(side: float, images: int = 100, tile: int = 0) -> DatasetIndex:
    """Returns an index of images of 320 pixels with a square box each."""
    made = index_of(
        names=("a",),
        paths=[f"{i}.jpg" for i in range(images)],
        image_hw=np.full((images, 2), 320),
        offsets=np.arange(images + 1),
        boxes_xywh_px=np.tile([0.0, 0, side, side], (images, 1)),
        classes=np.zeros(images, int),
    )
    return replace(made, tile=tile)


def advised(
    *,
    epochs: int = 0,
    costs: dict[int, float] | None = None,
    settings: dict[str, Any] | None = None,
    command: dict[str, Any] | None = None,
    label_errors: int = 0,
    unlabeled: int = 0,
    **subject: Any,
) -> list[Advice]:
    """Returns the advice about a run of ``epochs`` (0: about a validation), of which nothing else is known."""
    run = TrainConfig(imgsz=320, epochs=epochs or 1, **(OWN | (settings or {})))
    about = Subject(
        title="run",
        folder=Path("my runs"),
        config=run if epochs else ValConfig(data="my set.yaml", weights="best.pt"),
        stride=32,
        validated=index(50.0),
        split="val",
        best_epoch=2,
        command=TrainConfig(epochs=epochs, **OWN, **command) if command else None,
        **{"train": None} | subject,
    )
    cost = np.array([(costs or {}).get(kind, 0.0) for kind in range(len(KINDS))])
    errors = ErrorSplit(0.5, np.ones((1, len(KINDS)), int), cost[None], cost, 0.0, 0.0)
    is_validated = costs is not None or label_errors > 0 or unlabeled > 0
    return advise(about, Known(errors, label_errors, unlabeled) if is_validated else None)


@pytest.mark.parametrize(
    ("given", "sentence", "command"),
    [
        ({"epochs": 4, "batches": 9}, "Train longer", {"epochs": 34, "weights": "a.pt", "data": "my set.yaml"}),
        ({"epochs": 6, "batches": 9, "settings": {"weights": ""}}, "Train longer", {"epochs": 28}),
        (
            {"epochs": 4, "train": index(30.0), "settings": {"weights": "", "model": "yolov8n"}},
            "Start from weights",
            {"weights": "yolox_s", "model": "", "epochs": 4},
        ),
        ({"epochs": 4, "train": index(15.9)}, "larger images", {"imgsz": 352, "epochs": 4}),
        ({"epochs": 4, "train": index(8.0, tile=320)}, "tile: 160", {"imgsz": 640}),
        ({"epochs": 4, "costs": {BACKGROUND: 0.2, MISSED: 0.1}}, "missing labels", {"weights": "my runs/best.pt"}),
        ({"epochs": 4, "costs": {MISSED: 0.2}}, "larger images", {"imgsz": 640}),
        ({"unlabeled": 2}, "2 images without a label file", {"weights": "best.pt", "split": ["val"]}),
        ({"label_errors": 3, "is_held_out": True}, "3 labels", {"data": "my set.yaml", "split": ["train"]}),
        (
            {
                "epochs": 4,
                "batches": 9,
                "command": {"imgsz": 160, "override": ["lr0=0.1"]},
                "settings": {"optimizer": "Muon"},
            },
            "Train longer",
            {"epochs": 34, "imgsz": 160, "optimizer": "auto", "override": ["lr0=0.1"]},
        ),
    ],
)
def test_a_rule_speaks_alone_and_its_command_can_be_pasted(given, sentence, command):
    (row,) = advised(**given)
    assert sentence in row.sentence
    name = "train" if row.command.startswith(COMMANDS["train"].typed) else "check"
    typed = COMMANDS[name].typed
    assert row.command.startswith(typed)
    config = parse_config(COMMANDS[name].settings, shlex.split(row.command.removeprefix(typed)))
    assert {key: getattr(config, key) for key in command} == command


def test_no_rule_speaks_without_its_numbers():
    assert advised(epochs=4, costs={MISSED: 0.009}, train=index(30.0)) == []
    assert advised(epochs=3, train=index(30.0, images=1000), settings={"weights": ""}) == []
