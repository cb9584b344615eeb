"""A signal or a failure ends a run where its checkpoint can be resumed, and the message says how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.checkpoint.progress import PendingEpoch, Progress
from engine.hooks.hook import Action, Epoch, Hook, Training
from engine.run.complete_record import read_reported_epochs
from engine.run.run import Remaining
from tests.engine.train.watched_trainer import (
    BATCHES,
    FailingHook,
    FakeEvaluator,
    Watch,
    build,
    local,
    remote,
    trainer_of,
    weights,
)
from tests.helpers.messages import refused
from utils.errors import REQUEUE, Stopped
from utils.process.signals import StopSignals


def test_an_epoch_whose_validation_a_signal_ends_is_saved_with_its_steps():
    watch = Watch()
    signals = StopSignals()
    validator = local(FakeEvaluator(signals, stopped_run=2))
    trainer = build(watch, validator=validator, signals=signals, epochs=3)
    with pytest.raises(Stopped):
        trainer.fit()
    assert [(epoch, batch) for epoch, batch, _ in trainer.checkpointer.saved] == [(1, 0), (1, 3)]
    assert watch.of("record", "after_epoch") == [("record", 1, 0), ("after_epoch", 1, 0)]


def test_a_pending_epoch_stays_pending_if_a_signal_ends_its_validation():
    signals = StopSignals()
    validator = remote(FakeEvaluator(signals, stopped_run=1))
    trainer = build(validator=validator, signals=signals, epochs=3)
    with pytest.raises(Stopped):
        trainer.fit()
    epoch, batch, header = trainer.checkpointer.saved[-1]
    assert (epoch, batch, header.pending.progress.epoch) == (1, 3, 1)
    assert trainer.checkpointer.scored == []


def test_a_request_stops_the_run_two_steps_later_and_the_rest_gives_the_same_weights():
    whole = build()
    whole.fit()

    class Requests(Hook):
        def after_step(self, trainer: Training) -> Action:
            if trainer.progress.updates == 1:
                trainer.control.request_stop()

    trainer = build(Requests())
    trainer.fit()
    assert (trainer.progress.epoch, trainer.progress.batch) == (0, 3)
    resumed = trainer_of(trainer.run, trainer.step, trainer.progress)
    resumed.fit()
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("updates", "continuation"),
    [
        (1, "continue with: --resume last.pt"),
        (2 * BATCHES, "write the report with: --resume auto --project 'a b' --name exp"),
    ],
)
def test_a_failure_names_a_command_that_does_the_rest_of_the_run(updates, continuation):
    """``--resume last.pt`` refuses a run that has no epoch left, even if its report is missing."""
    trainer = build(FailingHook(updates))
    trainer.run = replace(trainer.run, folder=Path("a b/exp"))
    with refused(f"on_step failed; when it is fixed, {continuation}"):
        trainer.fit()


def test_a_failure_ends_the_run_before_its_final_work():
    """Ctrl-C during that work would hide the error."""
    watch = Watch()
    trainer = build(FailingHook(1), watch)
    with refused("on_step failed; when it is fixed, continue with: --resume last.pt"):
        trainer.fit()
    assert watch.of("after_steps", "after_training", "finish") == [("after_steps", 0, 3)]


@pytest.mark.parametrize("has_pending", [False, True], ids=["report alone", "pending epoch"])
def test_a_callback_that_fails_in_on_start_leaves_all_work_to_a_resumed_run(has_pending):
    class FailsAtStart(Hook):
        def start(self, trainer: Training) -> None:
            trainer.control.fail("on_start failed")

    pending = PendingEpoch(row={}, is_closing=False, progress=Progress(epoch=2), ema={}) if has_pending else None
    evaluator = FakeEvaluator()
    watch = Watch()
    plain = build()
    run = replace(plain.run, remaining=Remaining.SCORES if has_pending else Remaining.REPORT)
    hooks = [FailsAtStart(), watch]
    trainer = trainer_of(run, plain.step, Progress(epoch=2), *hooks, pending=pending, validator=local(evaluator))
    way = "continue with: --resume last.pt" if has_pending else "write the report with: --resume auto --project ..."
    with refused(f"on_start failed; when it is fixed, {way}"):
        trainer.fit()
    assert evaluator.runs == 0
    assert {name for name, *_ in watch.calls} == ({"start", "after_save"} if has_pending else {"start"})
    assert [header.pending for _, _, header in trainer.checkpointer.saved] == [pending] * has_pending


def test_a_callback_that_fails_last_is_an_error_that_says_how_to_repeat_it(tmp_path, caplog):
    class FailsAtEnd(Hook):
        def finish(self, trainer: Training) -> None:
            trainer.control.fail("on_end failed")

    trainer = build(FailsAtEnd(), epochs=1)
    trainer.run = replace(trainer.run, folder=tmp_path, run_id="run")
    finished = trainer.fit()
    way = f"write the report with: --resume auto --project {tmp_path.parent} --name {tmp_path.name}"
    assert str(finished.failure) == f"on_end failed; when it is fixed, {way}"
    assert not any("on_end failed" in message for message in caplog.messages)  # the command ends with it
    assert read_reported_epochs(tmp_path, "run") is None


def test_a_request_to_stop_after_the_last_epoch_is_not_what_ends_the_run(caplog):
    caplog.set_level("INFO", logger="lockstep")

    class Requests(Hook):
        def after_epoch(self, trainer: Training, epoch: Epoch) -> None:
            if epoch.number == trainer.epochs:
                trainer.control.request_stop()

    build(Requests(), epochs=1).fit()
    assert not any("ended by a callback" in message for message in caplog.messages)


def test_a_signal_saves_and_ends_without_the_last_calls():
    signals = StopSignals()

    class Signals(Hook):
        def after_step(self, trainer: Training) -> Action:
            if trainer.progress.updates == 1:
                signals.code = REQUEUE

    watch = Watch()
    trainer = build(Signals(), watch, signals=signals, epochs=9)
    with pytest.raises(Stopped) as stopped:
        trainer.fit()
    assert stopped.value.code == REQUEUE
    assert [(epoch, batch) for epoch, batch, _ in trainer.checkpointer.saved] == [(0, 3)]
    assert not watch.of("after_training", "finish")
