"""The results of an epoch: the best one, its row and its line of the log."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from engine.checkpoint.progress import Progress
from engine.evaluation.metrics import METRICS, Fitness
from engine.hooks.hook import Epoch
from engine.train.epoch_results import EpochResults
from utils.distributed.context import DistributedContext
from utils.logger import configure_logging

MAIN = DistributedContext.single()


def result_of(ap: float) -> SimpleNamespace:
    return SimpleNamespace(
        metrics={"AP": ap},
        class_ap=np.array([ap]),
        threshold=0.5,
        extras={"val/box": 1.0},
        plain_confidence=0.25,
        scored_confidence=None,
    )


def test_the_best_epoch_is_noted_and_its_row_begins_with_time_losses_and_scores():
    optimizer = SimpleNamespace(set_rates=lambda *_: None, rates=lambda: {"lr/bias": 0.1})
    step = SimpleNamespace(criterion=SimpleNamespace(names=("box",)), optimizer=optimizer)
    progress = Progress()
    results = EpochResults(Fitness.parse("AP", ["a"]))
    bests = []
    for progress.epoch, ap in ((1, 0.2), (2, 0.1), (3, None), (4, 0.3)):
        progress.count_losses((4.0,), is_finite=True)
        epoch = Epoch(progress.epoch, results.training_row(step, schedule=None, progress=progress))
        if ap is not None:
            epoch.result = result_of(ap)
        results.complete(MAIN, epoch, progress, seconds=5.0)
        bests.append(epoch.is_best)
        scores = [] if ap is None else ["metrics/AP", "metrics/confidence", "val/box"]
        assert list(epoch.row) == ["time", "train/box", *scores, "lr/bias"]
        assert (epoch.row["time"], epoch.row["train/box"]) == (5.0, 4.0)
    assert bests == [True, False, False, True]
    assert (progress.best_epoch, progress.confidence, progress.plain_confidence) == (4, 0.5, 0.25)


def test_the_row_of_a_pending_epoch_keeps_its_time():
    epoch = Epoch(1, {"time": 1.5})
    EpochResults(Fitness.parse("AP", ["a"])).complete(MAIN, epoch, Progress(epoch=2), seconds=9.0)
    assert epoch.row == {"time": 1.5}


@pytest.mark.parametrize(("fitness", "rest"), [("AP", ""), ("F1:dog", "  F1:dog 1.0000")])
def test_the_line_of_an_epoch_fits_into_80_columns(capsys, fitness, rest):
    """The score that decides comes last, or by name if it is that of a class."""
    configure_logging(True)
    result = result_of(0.5)
    result.metrics = {metric.name: 0.5 for metric in METRICS}
    result.class_metrics = {"f1": np.array([1.0, 0.0])}
    epoch = Epoch(1, result=result)
    EpochResults(Fitness.parse(fitness, ["dog", "cat"])).complete(MAIN, epoch, Progress(epoch=1), seconds=1.0)
    line = "epoch 1: P 0.5000  R 0.5000  F1 0.5000  AP50 0.5000  AP75 0.5000  AP 0.5000"
    assert capsys.readouterr().out == f"{line}{rest}\n"
