"""Each row of the table of advice speaks on the numbers that it is about, and its command line is one that the program
takes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from data.index import DatasetIndex
from engine.evaluation.analysis import BACKGROUND, MISSED
from engine.report.advice import Advice, Facts, advise
from engine.report.summary import Subject, Validated
from tests.engine.report.known_results import errors_of, index
from utils.config.commands import COMMANDS
from utils.config.parser import parse_config
from utils.config.settings import TrainConfig, ValConfig

FOLDER = Path("my runs")


def advised(
    *,
    epochs: int = 0,
    train: DatasetIndex | None = None,
    costs: dict[int, float] | None = None,
    batches: int = 0,
    settings: dict[str, Any] | None = None,
    command: dict[str, Any] | None = None,
    label_errors: int = 0,
    unlabeled: int = 0,
    is_held_out: bool = False,
) -> list[Advice]:
    """Returns the advice about a run of ``epochs`` (0: about a validation), of which nothing else is known."""
    given = {"data": "my set.yaml", "weights": "a.pt", **(settings or {})}
    subject = Subject(
        title="run",
        config=TrainConfig(epochs=epochs, **given) if epochs else ValConfig(data="my set.yaml", weights="best.pt"),
        hyp=None,
        machine=(),
        imgsz=320,
        stride=32,
        train=train,
        validated=index([1] * 3, 50.0),
        split="val",
        is_held_out=is_held_out,
        batches=batches,
        best_epoch=2,
        command=None if command is None else TrainConfig(data="my set.yaml", weights="a.pt", epochs=epochs, **command),
    )
    known = Validated(errors_of(costs or {}, {}), label_errors, unlabeled)
    is_validated = costs is not None or label_errors > 0 or unlabeled > 0
    return advise(Facts(subject, FOLDER, known if is_validated else None))


@pytest.mark.parametrize(
    ("given", "sentence", "command"),
    [
        ({"epochs": 4, "batches": 9}, "Train longer", {"epochs": 34, "weights": "a.pt", "data": "my set.yaml"}),
        ({"epochs": 9, "batches": 2, "settings": {"batch_size": 64}}, "smaller", {"epochs": 150, "batch_size": 64}),
        ({"epochs": 6, "batches": 9, "settings": {"weights": ""}}, "Train longer", {"epochs": 28}),
        (
            {"epochs": 4, "train": index([100], 30.0, images=100), "settings": {"weights": "", "model": "yolov8n"}},
            "Start from weights",
            {"weights": "yolox_s", "model": "", "epochs": 4},
        ),
        ({"epochs": 4, "train": index([100], 8.0, images=100)}, "larger images", {"imgsz": 640, "epochs": 4}),
        ({"costs": {BACKGROUND: 0.2, MISSED: 0.1}}, "missing labels", {"data": "my set.yaml", "weights": "best.pt"}),
        (
            {"epochs": 4, "costs": {BACKGROUND: 0.2}},
            "missing labels",
            {"data": "my set.yaml", "weights": "my runs/best.pt", "split": ["val"]},
        ),
        ({"epochs": 4, "costs": {MISSED: 0.2}}, "larger images", {"imgsz": 640}),
        ({"unlabeled": 2}, "2 images without a label file", {"weights": "best.pt", "split": ["val"]}),
        ({"label_errors": 3}, "3 labels", {"data": "my set.yaml", "weights": "best.pt", "split": ["val"]}),
        ({"label_errors": 3, "is_held_out": True}, "3 labels", {"data": "my set.yaml", "split": ["train"]}),
        (
            {
                "epochs": 4,
                "batches": 9,
                "command": {"imgsz": 160, "override": ["lr0=0.1"]},
                "settings": {"imgsz": 160, "optimizer": "Muon"},
            },
            "Train longer",
            {"epochs": 34, "imgsz": 160, "optimizer": "auto", "override": ["lr0=0.1"]},
        ),
    ],
)
def test_a_row_speaks_alone_and_its_command_can_be_pasted(given, sentence, command):
    (row,) = advised(**given)
    assert sentence in row.sentence
    name = "train" if row.command.startswith(COMMANDS["train"].typed) else "check"
    typed = COMMANDS[name].typed
    assert row.command.startswith(typed)
    config = parse_config(COMMANDS[name].settings, shlex.split(row.command.removeprefix(typed)))
    assert {key: getattr(config, key) for key in command} == command


@pytest.mark.parametrize(
    "given",
    [{}, {"epochs": 3, "train": index([2000, 0, 60], 30.0, images=100)}, {"epochs": 4, "costs": {MISSED: 0.009}}],
)
def test_no_row_speaks_without_its_numbers(given):
    assert advised(**given) == []
