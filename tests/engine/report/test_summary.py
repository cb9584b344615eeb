"""Each sentence of the report speaks on the numbers that it is about, and on no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.index.index import DatasetIndex
from engine.evaluation.analysis import BACKGROUND, CLASS, KINDS, LOCATION, MISSED, ErrorSplit
from engine.evaluation.result import EvalResult
from engine.report.summary import Subject, Validated, advice, error_sentences, small_boxes
from tests.helpers.synthetic_index import index_of
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig


def index(boxes: list[int], side: float, names: tuple[str, ...] = ("a", "b", "c"), tile: int = 0) -> DatasetIndex:
    """Returns an index of one image of 320 pixels with ``boxes`` square boxes of each class."""
    classes = np.repeat(np.arange(len(boxes)), boxes)
    made = index_of(
        names=names[: len(boxes)],
        paths=["0.jpg"],
        image_hw=np.array([[320, 320]]),
        offsets=np.array([0, len(classes)]),
        boxes_xywh_px=np.tile([0.0, 0, side, side], (len(classes), 1)),
        classes=classes,
    )
    return replace(made, tile=tile)


def scored(*targets: int, ap: float = 0.5, f1: float = 0.5) -> EvalResult:
    classes = len(targets)
    curve = np.zeros((classes, 2))
    return EvalResult(
        metrics={"AP": ap, "AP50": ap, "f1": 0.5, "precision": 0.5, "recall": 0.5},
        class_metrics={
            "AP": np.linspace(ap, ap / 2, classes), "recall": np.full(classes, 0.5), "f1": np.full(classes, f1)
        },
        threshold=0.4, shown_confidence=0.4, ap_small=np.nan, ap_medium=np.nan,
        ap_large=np.nan, class_targets=np.array(targets), confusion=np.zeros((classes + 1, classes + 1), np.int64),
        curve_confidence=np.array([0.0, 1]), curve_precision=curve + 0.5,
        curve_recall=curve + 0.5, pr_recall=np.zeros(101), pr_precision=np.zeros((classes, 101)), num_images=2,
    )  # fmt: skip


def errors_of(costs: dict[int, float], counts: dict[tuple[int, int], int], classes: int = 2) -> ErrorSplit:
    """``counts``: by class and kind."""
    cost = np.array([costs.get(kind, 0.0) for kind in range(len(KINDS))])
    number = np.zeros((classes, len(KINDS)), int)
    for cell, count in counts.items():
        number[cell] = count
    return ErrorSplit(0.5, number, np.tile(cost, (classes, 1)), cost, 0.0, 0.0)


def advised(
    *,
    epochs: int = 0,
    train: DatasetIndex | None = None,
    history: dict[str, list[float]] | None = None,
    result: EvalResult | None = None,
    errors: ErrorSplit | None = None,
    names: tuple[str, ...] = ("a", "b", "c"),
    hyp: Hyperparameters | None = None,
    batches: int = 0,
    settings: dict[str, Any] | None = None,
    ap_error: float = np.nan,
    label_errors: int = 0,
) -> str:
    """Returns the advice about a run of ``epochs`` (0: about a validation), of which nothing else is known."""
    columns = {name: np.array(values, float) for name, values in (history or {}).items()}
    if columns:
        columns["epoch"] = np.arange(1.0, len(next(iter(columns.values()))) + 1)
    subject = Subject(
        title="run",
        config=TrainConfig(epochs=epochs, **(settings or {})) if epochs else ValConfig(weights="best.pt"),
        hyp=hyp,
        machine=(),
        imgsz=320,
        stride=32,
        train=train,
        validated=index([1] * len(names), 50.0, names),
        split="val",
        batches=batches,
    )
    last = Path("my runs/last.pt")
    is_validated = result is not None or label_errors > 0 or not np.isnan(ap_error)
    known = Validated(result or scored(9, 9), errors or errors_of({}, {}), ap_error, label_errors)
    return "\n".join(advice(subject, columns, known if is_validated else None, last=last))


def test_errors_are_named_by_their_cost_with_their_number_and_class():
    result = scored(74, 50)
    result.confusion[1, 0] = 2  # a as b
    result.confusion[0, 2] = 12
    counts = {(0, MISSED): 22, (1, MISSED): 3, (1, CLASS): 2, (0, BACKGROUND): 12, (0, LOCATION): 5}
    errors = errors_of({MISSED: 0.2, BACKGROUND: 0.1, CLASS: 0.02, LOCATION: 0.009}, counts)
    missed, false, confused, weakest = error_sentences(result, errors, ["triangle", "ball"])
    assert {"25", "124", "triangle", "(22"} < set(missed.split())
    assert {"12", "triangle"} < set(false.split())
    assert "(12 of 12)" in false  # of its detections, not of its objects
    assert {"triangle", "ball", "(2"} < set(confused.split())
    assert "ball" in weakest
    assert "0.250" in weakest


@pytest.mark.parametrize(
    ("given", "words", "others"),
    [
        ({}, (), ("a",)),
        ({"label_errors": 3}, ("3 labels",), ()),
        # A class whose own threshold is much better than that of all: its F1 there is 0.5.
        ({"result": scored(9, 50, f1=0.3)}, ("of b (F1 0.50", "--classes b --conf-thres 0.000"), ()),
        ({"result": scored(50, f1=0.41)}, (), ("--conf-thres",)),
        ({"result": scored(0, 0), "label_errors": 3}, ("Label the objects",), ("3 labels",)),
        # More epochs, if AP rises by more than chance.
        (
            {"epochs": 6, "history": {"metrics/AP": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}, "ap_error": 0.02},
            ("--resume 'my runs/last.pt' --epochs 12",),
            (),
        ),
        ({"epochs": 6, "history": {"metrics/AP": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}, "ap_error": 0.2}, (), ("--resume",)),
        ({"epochs": 7, "history": {"metrics/AP": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}}, (), ("--resume",)),
        ({"epochs": 6, "history": {"metrics/AP": [0.1, 0.5, 0.6, 0.6, 0.6, 0.6]}}, (), ("--resume",)),
        (
            {"epochs": 6, "batches": 9, "history": {"metrics/AP": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}},
            ("--epochs 28",),
            ("--resume",),
        ),
        ({"epochs": 4, "batches": 9, "settings": {"weights": "a.pt"}}, ("--epochs 12",), ("--batch-size",)),
        ({"epochs": 4, "batches": 1, "settings": {"weights": "a.pt", "batch_size": 512}}, ("--batch-size 16",), ()),
        # Overfitting is a rising validation loss.
        (
            {"epochs": 6, "history": {"train/x": [3, 2.5, 2, 1.5, 1.2, 1], "val/x": [3, 2.5, 2, 2, 2.2, 2.5]}},
            ("smaller model",),
            (),
        ),
        (
            {"epochs": 6, "history": {"train/x": [3, 2.5, 2, 1.5, 1.2, 1], "val/x": [3, 2.5, 2, 1.9, 1.8, 1.7]}},
            (),
            ("smaller model",),
        ),
        ({"epochs": 3, "history": {"speed/data_wait": [0.3, 0.4, 0.3]}}, ("--workers",), ()),
        ({"epochs": 3, "history": {"speed/data_wait": [0.9, 0.1, 0.1]}}, (), ("--workers",)),
        ({"train": index([100, 7], 8.0)}, ("--imgsz 640", "b (7)"), ()),
        ({"train": index([100, 70], 30.0)}, (), ("a", "b")),
        ({"train": index([2000, 0, 60], 30.0)}, ("33 times", "--image-weights"), ("inf",)),
        ({"train": index([500, 0, 60], 30.0)}, (), ("times",)),
        ({"train": index([2000, 0, 60], 30.0), "epochs": 1, "settings": {"cls_pw": 1.0, "time": 1.0}}, (), ("times",)),
    ],
)
def test_advice_follows_from_the_numbers(given, words, others):
    text = advised(**given)
    assert all(word in text for word in words)
    assert not any(
        word in text.split() or (" " not in word and f"{word} " in text and len(word) > 1) for word in others
    )


def test_classes_that_the_data_set_does_not_label_need_no_labels(monkeypatch):
    """The old classes of ``--keep-old`` are ignored in every image."""
    train = index([0, 7, 900], 30.0, ("old", "b", "c"))
    region = index_of(
        names=train.names,
        paths=["0.jpg"],
        image_hw=np.array([[320, 320]]),
        offsets=np.array([0, 908]),
        boxes_xywh_px=np.r_[train.boxes_xywh_px, [[0, 0, 320, 320]]],
        classes=np.r_[train.classes, 0],
    )
    region.crowd[-1] = True
    text = advised(train=region, names=("old", "b", "c"))
    assert "b (7)" in text
    assert "old" not in text


@pytest.mark.parametrize(
    ("side", "tile", "words"),
    [
        (16.0, 0, ()),
        (8.0, 0, ("--imgsz 640 ",)),
        (15.9, 0, ("--imgsz 352 ",)),
        (2.4, 0, ("tile: 640",)),  # a size at which nobody trains is not advised
        (8.0, 320, ("--imgsz 640 ", "tile: 160")),
        (2.4, 320, ("tile: 32",)),
    ],
)
def test_small_boxes_are_named_with_a_size_at_which_they_are_not(side, tile, words):
    text = small_boxes(index([10], side, tile=tile), imgsz=320, stride=32)
    assert bool(text) == bool(words)
    assert all(word in text for word in words)
