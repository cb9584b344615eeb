"""The results of an epoch: the best one, its row and its line of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import METRICS, score_detections
from engine.evaluation.result import EvalResult
from engine.hooks.hook import Epoch
from engine.optim.schedule import StepPlan, build_schedule
from engine.train.checkpoint import Progress
from engine.train.epoch_results import EpochResults
from models.detector import build_detector
from tests.helpers.scoring import evaluation_of, make_ground_truth, make_table
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL
from utils.boxes import xywh_to_xyxy
from utils.config.settings import Hyperparameters
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging

MAIN = DistributedContext.single()
SCORES = [f"metrics/{metric.name}" for metric in METRICS]


def result_of(ap: float, names: Sequence[str] = ("a",)) -> EvalResult:
    """Returns the result of a validation in which the objects of all classes have this AP."""
    classes = np.arange(len(names))
    boxes = np.tile([10.0, 10, 50, 50], (len(names), 1))
    truth = make_ground_truth(
        boxes, classes=classes, area=boxes[:, 2], image=classes, num_images=len(names), num_classes=len(names)
    )
    table = make_table(image=classes, boxes=xywh_to_xyxy(boxes), scores=np.full(len(names), 0.5), classes=classes)
    result = score_detections(truth, table, len(names))
    return replace(
        result,
        metrics=result.metrics | {"AP": ap},
        class_metrics=result.class_metrics | {"AP": np.full(len(names), ap)},
        threshold=0.5,
        plain_confidence=0.25,
        extras={"val/box": 1.0},
    )


def test_the_best_epoch_is_noted_and_its_row_begins_with_time_losses_and_scores():
    step = make_train_step(MAIN, build_detector(TINY_MODEL, 2))
    schedule = build_schedule(Hyperparameters(), StepPlan(accumulate=1, per_epoch=1, epochs=4), cosine=False)
    losses = ["train/box", "train/cls", "train/dfl"]
    rates = list(step.optimizer.rates())
    progress = Progress()
    results = EpochResults(Fitness.parse("AP", ["a"]))
    bests = []
    for progress.epoch, ap in ((1, 0.2), (2, 0.1), (3, None), (4, 0.3)):
        progress.count_losses((4.0, 2.0, 1.0), is_finite=True)
        epoch = Epoch(progress.epoch, results.training_row(step, schedule=schedule, progress=progress))
        if ap is not None:
            epoch.evaluation = evaluation_of(result_of(ap))
        results.fill_in(MAIN, epoch, progress, seconds=5.0)
        bests.append(epoch.is_best)
        scores = [] if ap is None else [*SCORES, "metrics/confidence", "val/box"]
        assert list(epoch.row) == ["time", *losses, *scores, *rates]
        assert (epoch.row["time"], epoch.row["train/box"]) == (5.0, 4.0)
    assert bests == [True, False, False, True]
    assert (progress.best_epoch, progress.confidence, progress.plain_confidence) == (4, 0.5, 0.25)


def test_the_row_of_a_pending_epoch_keeps_its_time():
    epoch = Epoch(1, {"time": 1.5})
    EpochResults(Fitness.parse("AP", ["a"])).fill_in(MAIN, epoch, Progress(epoch=2), seconds=9.0)
    assert epoch.row == {"time": 1.5}


@pytest.mark.parametrize(("fitness", "rest"), [("AP", ""), ("F1:dog", "  F1:dog 1.0000")])
def test_the_line_of_an_epoch_fits_into_80_columns(capsys, fitness, rest):
    """The score that decides comes last, or by name if it is that of a class."""
    configure_logging(True)
    metrics = {metric.name: 0.5 for metric in METRICS}
    result = replace(result_of(0.5), metrics=metrics, class_metrics={"AP": np.ones(2), "f1": np.array([1.0, 0.0])})
    epoch = Epoch(1, evaluation=evaluation_of(result))
    EpochResults(Fitness.parse(fitness, ["dog", "cat"])).fill_in(MAIN, epoch, Progress(epoch=1), seconds=1.0)
    line = "epoch 1: P 0.5000  R 0.5000  F1 0.5000  AP50 0.5000  AP75 0.5000  AP 0.5000"
    assert capsys.readouterr().out == f"{line}{rest}\n"
