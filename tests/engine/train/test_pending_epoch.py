"""Epochs that other processes validate, and runs that only report: each is completed, saved and reported once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.hooks.hook import Action, Hook, Training
from engine.hooks.stopping import EarlyStopping
from engine.train.checkpoint import PendingEpoch, Progress
from engine.train.resume import Remaining, TrainingRun
from models.detector import build_detector
from tests.engine.train.watched_trainer import FakeEvaluator, Results, Watch, build, local, remote, trainer_of
from tests.helpers.messages import refused
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.steps import make_train_step
from tests.helpers.tiny import TINY_MODEL
from utils.config.settings import Hyperparameters, RunSettings, TrainConfig
from utils.distributed.context import DistributedContext


def test_an_epoch_that_others_validate_is_completed_by_the_end_of_the_next_one():
    watch = Watch()
    validator = remote()
    trainer = build(watch, validator=validator, best_epoch=1)
    trainer.fit()
    end = ["after_last_step", "before_validation", "record", "report", "after_epoch"]
    assert [(name, epoch) for name, epoch, _ in watch.of(*end)] == [
        ("after_last_step", 0), ("after_epoch", 1),
        ("after_last_step", 1),
        ("before_validation", 1), ("record", 1), ("report", 1),
        ("before_validation", 1), ("record", 2), ("report", 2), ("after_epoch", 2),
    ]  # fmt: skip
    saves = trainer.checkpointer
    assert [(epoch, header.pending is not None) for epoch, _, header in saves.saved] == [(1, True), (2, False)]
    assert saves.scored == [(1, True)]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_pending_epoch_of_an_earlier_start_is_completed_and_saved_at_once(epochs):
    """This needs neither ``--eval-ranks`` nor another epoch afterwards."""
    pending = PendingEpoch(row={"time": 1.5}, is_closing=False, progress=Progress(epoch=1), ema={})
    watch = Watch()
    trainer = build(watch, progress=Progress(epoch=1), pending=pending, epochs=epochs, best_epoch=1)
    pending.ema.update(trainer.step.ema.module.state_dict())
    trainer.fit()
    calls = [("record", 1, 0), ("before_epoch", 1, 0), ("record", 2, 0)]
    assert watch.of("record", "before_epoch") == calls[: 2 * epochs - 1]
    saved = [(epoch, batch, header.pending) for epoch, batch, header in trainer.checkpointer.saved]
    assert saved == [(1, 0, None), (2, 0, None)][:epochs]
    assert trainer.checkpointer.scored == [(1, True)]


@pytest.mark.parametrize(("fitness", "last_epoch"), [(0.9, 9), (0.1, 7)])
def test_patience_waits_for_the_scores_of_a_pending_epoch(fitness, last_epoch):
    """A resumed run, with less patience than before."""

    class Scores(Results):
        def fill_in(self, ctx, epoch, progress, *, seconds) -> None:
            super().fill_in(ctx, epoch, progress, seconds=seconds)
            epoch.is_best = progress.record_fitness(fitness)

    progress = Progress(epoch=7, best_epoch=4, best_fitness=0.5)
    pending = PendingEpoch(row={}, is_closing=False, progress=replace(progress), ema={})
    stopping = EarlyStopping(2, "AP", val_every=1)
    trainer = build(stopping, progress=progress, pending=pending, epochs=20, patience=2)
    pending.ema.update(trainer.step.ema.module.state_dict())
    trainer.results = Scores()
    trainer.fit()
    assert trainer.progress.epoch == last_epoch


@pytest.mark.parametrize(("close_mosaic", "is_closing"), [(1, True), (0, False)])
def test_a_report_is_repeated_with_the_loss_of_its_epoch(close_mosaic, is_closing):
    watch = Watch()
    settings = RunSettings(TrainConfig(epochs=2), Hyperparameters(close_mosaic=close_mosaic))
    origin = checkpoint_of(progress=Progress(epoch=2)).record()
    run = TrainingRun(folder=Path(), run_id="", settings=settings, started_from=origin, remaining=Remaining.REPORT)
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, 2, seed=1))
    closing: list[bool] = []
    step.criterion.set_closing = closing.append
    trainer_of(run, step, Progress(epoch=2), watch).fit()
    assert closing == [is_closing]
    reported = watch.of("before_epoch", "record", "before_validation", "report")
    assert reported == [("before_validation", 2, 0), ("report", 2, 0)]


def test_the_pending_epoch_of_a_run_that_a_callback_ends_is_completed_and_saved():
    validator = remote()
    watch = Watch(after_epoch=(1, 0, Action.END))
    trainer = build(watch, validator=validator, epochs=3, best_epoch=1)
    trainer.fit()
    assert watch.of("record") == [("record", 1, 0)]
    saved = [(epoch, batch, header.pending is None) for epoch, batch, header in trainer.checkpointer.saved]
    assert saved == [(1, 0, False), (1, 0, True)]
    assert trainer.checkpointer.scored == [(1, True)]


@pytest.mark.parametrize(
    ("progress", "metrics"),
    [
        (Progress(epoch=3), {"AP": 0.5}),
        (Progress(epoch=3, batch=1), {}),  # stopped in epoch 4 of more, and resumed with 3 epochs
        (Progress(epoch=2), {"AP": 0.5}),
        (Progress(epoch=2), {}),  # --val-every has left it out
        (Progress(), {}),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_only_reports_takes_no_step(tmp_path, progress, metrics, fails):
    """It validates the last epoch again if the weights are those that were scored."""

    class FailsAtStart(Hook):
        def start(self, trainer: Training) -> None:
            trainer.control.fail("on_start failed")

    evaluator = FakeEvaluator()
    watch = Watch()
    checkpoint = checkpoint_of(progress=progress, metrics=metrics, ended_by_callback=True)
    hooks = [FailsAtStart()] if fails else []
    plain = build(epochs=3)
    origin = checkpoint.record()
    run = replace(plain.run, folder=tmp_path, run_id="run", remaining=Remaining.REPORT, started_from=origin)
    trainer = trainer_of(run, plain.step, progress, watch, *hooks, validator=local(evaluator))
    if fails:
        with refused("on_start failed; when it is fixed, write the report with: --resume auto --project ..."):
            trainer.fit()
        assert trainer.checkpointer.saved == []  # the next start also writes the report
        return
    trainer.fit()
    assert trainer.checkpointer.saved == []
    assert evaluator.runs == len(metrics)
    assert watch.of("before_epoch", "after_step") == []
    assert watch.of("report") == [("report", progress.epoch, progress.batch)]
    assert len(watch.of("after_training", "finish")) == 2


def test_an_epoch_that_begins_again_is_not_reported_with_the_weights_of_its_steps(tmp_path):
    """The number of images has changed since a callback ended the run within epoch 3."""
    evaluator = FakeEvaluator()
    origin = checkpoint_of(progress=Progress(epoch=2, batch=1), metrics={}, ended_by_callback=True).record()
    plain = build(epochs=3)
    run = replace(plain.run, folder=tmp_path, run_id="run", remaining=Remaining.REPORT, started_from=origin)
    trainer_of(run, plain.step, Progress(epoch=2), validator=local(evaluator)).fit()
    assert evaluator.runs == 0
