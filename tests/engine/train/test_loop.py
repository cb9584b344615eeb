"""The loop with a real step of a tiny model: the order of hooks, saves and validations, and what ends a run where."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.train.checkpoint import Checkpoint, Progress, UnscoredEpoch
from engine.train.hooks import EarlyStopping
from engine.train.ledger import Epoch
from engine.train.loop import Hook, Trainer
from tests.engine.train.watched_run import Scores, Watch, WatchedTrainer, build
from tests.helpers.same_content import assert_same_content
from utils.config.settings import Hyperparameters
from utils.errors import INTERRUPTED, REQUEUE, Stopped, UserError
from utils.files.torch_file import read_checkpoint
from utils.process.signals import StopSignals


def test_hooks_see_every_step_and_epoch_in_order(tmp_path):
    watch = Watch()
    trainer = build(tmp_path, watch)
    trainer.fit()
    steps = [[("after_step", epoch, batch) for batch in (1, 2, 3)] for epoch in (0, 1)]
    ends = [[(point, n, 0, n) for point in ("epoch_trained", "epoch_scored", "epoch_saved")] for n in (1, 2)]
    assert watch.calls == [("start", 0, 0), *steps[0], *ends[0], *steps[1], *ends[1], ("finish", 2, 0)]
    assert trainer.positions == [(0, 0), (1, 0), (2, 0)]
    assert trainer.best == [1, 2]
    assert [row["metrics/AP"] for row in trainer.ledger.table.as_rows()] == [0.1, 0.2]


@pytest.mark.parametrize("val_every", [1, 2])
def test_scores_that_come_an_epoch_late_give_the_same_files(tmp_path, val_every):
    """``--eval-ranks``. Training waits for the scores of the epoch before, and at the last epoch for all."""
    runs = [tmp_path / "alone", tmp_path / "evaluated"]
    for lag, folder in enumerate(runs):
        folder.mkdir()
        watch = Watch()
        trainer = build(folder, watch, epochs=5, scores=Scores({4: 0.95}, lag=lag), val_every=val_every)
        trainer.fit()
        assert [call[-1] for call in watch.of("epoch_saved")] == [1, 2, 3, 4, 5]
        late = {number: epoch - number for _, epoch, _, number in watch.of("epoch_scored")}
        assert [late[number] for number in (2, 4, 5)] == [lag, lag, 0]
        assert max(len(save.unscored) for save in trainer.saver.saves) == lag
        assert not [*folder.glob("unscored*")]
    alone, evaluated = ({path.name: read_checkpoint(path) for path in folder.glob("*.pt")} for folder in runs)
    assert alone["best.pt"]["progress"]["best_epoch"] == 4
    assert_same_content(alone, evaluated)


class Calls(Hook):
    """Calls a function of the trainer at a position."""

    def __init__(self, call: Callable[[Trainer], Any], epoch: int, batch: int = 0) -> None:
        self._call = call
        self._position = (epoch, batch)

    def after_step(self, trainer: Trainer) -> None:
        if (trainer.progress.epoch, trainer.progress.batch) == self._position:
            self._call(trainer)

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        self.after_step(trainer)


def test_checkpoints_have_the_scores_of_their_weights_only(tmp_path):
    save = Calls(lambda trainer: trainer.control.request_save(), 1)
    trainer = build(tmp_path, save, epochs=3, scores=Scores({3: 0}))
    trainer.fit()
    scores = [save[:3] for save in trainer.saver.saves]
    assert scores == [(0, 0, None), (1, 0, 0.1), (1, 2, None), (2, 0, 0.2), (3, 0, 0)]
    assert trainer.best == [1, 2]


def test_of_epochs_with_equal_fitness_the_one_with_the_highest_ap_is_best(tmp_path):
    """ultralytics#21123: AP50 was 1.0 in epochs 3 to 14, and best.pt had AP 0.883 while epoch 9 had 1.000."""
    scores = Scores({1: 0.5, 2: 0.883, 3: 1.0, 4: 0.9, 5: 1.0}, ap50=1.0)
    trainer = build(tmp_path, epochs=5, scores=scores, fitness="AP50")
    trainer.fit()
    assert trainer.best == [1, 2, 3]
    assert (trainer.progress.best_epoch, trainer.progress.best_fitness) == (3, 1.0)


def resume(folder: Path, *hooks: Hook, **options: Any) -> WatchedTrainer:
    trainer = build(folder, *hooks, resumed=Checkpoint.read(folder / "last.pt"), **options)
    trainer.fit()
    return trainer


@pytest.fixture
def whole(tmp_path_factory) -> torch.Tensor:
    """The weights of an undisturbed run of three epochs."""
    trainer = build(tmp_path_factory.mktemp("whole"), epochs=3)
    trainer.fit()
    return trainer.weights


@pytest.mark.parametrize("batch", [0, 1])
def test_a_request_ends_the_run_at_most_two_steps_later_and_the_rest_gives_the_same_weights(tmp_path, whole, batch):
    saves = Calls(lambda trainer: trainer.control.request_save(), 1, 1)  # must not delay it
    trainer = build(tmp_path, saves, Calls(lambda trainer: trainer.control.request_stop(), 1, batch), epochs=3)
    trainer.fit()
    assert trainer.positions[-1] == (1, 3 if batch else 0)
    assert Checkpoint.read(tmp_path / "last.pt").header.ended_by_callback
    assert torch.equal(resume(tmp_path, epochs=3).weights, whole)


@pytest.mark.parametrize(("code", "batch"), [(REQUEUE, 1), (INTERRUPTED, 1), (REQUEUE, 0)])
def test_a_signal_saves_and_ends_without_the_last_calls(tmp_path, code, batch):
    signals = StopSignals()
    watch = Watch()
    trainer = build(
        tmp_path, Calls(lambda _: setattr(signals, "code", code), 1, batch), watch, signals=signals, epochs=9
    )
    with pytest.raises(Stopped) as stopped:
        trainer.fit()
    assert stopped.value.code == code
    assert trainer.positions[-1] == (1, 3 if batch else 0)
    assert not watch.of("finish")


@pytest.mark.parametrize("lag", [0, 1])
def test_an_epoch_whose_validation_a_signal_ends_is_scored_first_when_the_run_resumes(tmp_path, whole, lag):
    signals = StopSignals()
    scores = Scores(during=lambda: setattr(signals, "code", REQUEUE), lag=lag)
    trainer = build(tmp_path, signals=signals, scores=scores, epochs=3, save_period=1)
    with pytest.raises(Stopped):
        trainer.fit()
    assert trainer.saver.saves[-1][:4] == (1 + lag, 0, None, [1, 2][: 1 + lag])
    watch = Watch()
    resumed = resume(tmp_path, watch, epochs=3, save_period=1)
    assert [call[-1] for call in watch.of("epoch_scored")] == [1, 2, 3]
    assert watch.calls[1][0] == "epoch_scored"
    assert torch.equal(resumed.weights, whole)
    kept = {f"epoch{number}.pt": number / 10 for number in (1 + lag, 3)}
    assert {name: read_checkpoint(tmp_path / name)["metrics"]["metrics/AP"] for name in kept} == kept


def test_several_unscored_epochs_of_an_earlier_version_are_scored_in_their_order(tmp_path):
    """It let four epochs wait, also those that ``--val-every`` leaves out. The run has ended: no step is taken."""
    build(tmp_path, epochs=4).fit()
    checkpoint = Checkpoint.read(tmp_path / "last.pt")
    unscored = [UnscoredEpoch(number, {"train/box": 1.0}, is_validated=number != 3) for number in (2, 3, 4)]
    checkpoint = replace(checkpoint, rows=checkpoint.rows[:1], header=replace(checkpoint.header, unscored=unscored))
    watch = Watch()
    scores = Scores()
    trainer = build(tmp_path, watch, resumed=checkpoint, scores=scores, epochs=4, takes_steps=False)
    trainer.fit()
    assert scores.scored == [2, 4]
    assert watch.of("after_step", "epoch_scored", "finish") == [
        *(("epoch_scored", 4, 0, number) for number in (2, 3, 4)),
        ("finish", 4, 0),
    ]
    assert [row["epoch"] for row in trainer.ledger.table.as_rows()] == [1, 2, 3, 4]


@pytest.mark.parametrize(("ap", "last_epoch"), [({9: 0.9}, 11), ({}, 9)])
@pytest.mark.parametrize("lag", [0, 1])
def test_patience_ends_a_run_at_the_same_epoch_with_late_scores(tmp_path, ap, last_epoch, lag):
    progress = Progress(epoch=7, best_epoch=7, best_fitness=0.5)
    scores = Scores(dict.fromkeys(range(1, 20), 0.1) | ap, lag=lag)
    trainer = build(tmp_path, EarlyStopping(), progress=progress, scores=scores, epochs=20, patience=2)
    trainer.fit()
    assert trainer.progress.epoch == last_epoch


def test_non_finite_steps_in_a_row_end_the_run(tmp_path, monkeypatch):
    trainer = build(tmp_path, Calls(lambda trainer: trainer.control.request_save(), 0, 1), epochs=99)
    loss = type(trainer.step.criterion).forward
    bad = lambda *args: loss(*args)._replace(total=loss(*args).total * float("nan"))  # noqa: E731
    monkeypatch.setattr(type(trainer.step.criterion), "forward", bad)
    advice = re.escape(f"--weights {tmp_path}/last.pt, with a lower lr0")  # --resume would refuse another lr0
    with pytest.raises(UserError, match=f"the last 20 steps were not finite.*{advice}"):
        trainer.fit()


def test_the_last_epochs_refine(tmp_path):
    seen: list[bool] = []
    trainer = build(tmp_path, epochs=4, hyp=Hyperparameters(close_mosaic=1))
    trainer.step.criterion.set_no_mosaic = seen.append
    trainer.fit()
    assert seen == [False, False, False, True]
