"""When the ranks save, validate and stop, decided without a model. Real signals: tests/scripts/test_run_safety.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint.checkpoint import Progress
from engine.checkpoint.run import Run
from engine.parallel.watchdog import Watchdog
from engine.train.control import Action, RunControl
from engine.train.step import NO_FLAGS, StepFlags
from utils.config.settings import Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import INTERRUPTED, REQUEUE, PeerFailure, Stopped, UserError
from utils.machine.stop_signals import StopSignals

MAIN = DistributedContext.single()
OTHER = DistributedContext(1, 1, 2, 2, 0, torch.device("cpu"), "gloo", (torch.device("cpu"),))


class Checkpointer(SimpleNamespace):
    last = Path("last.pt")

    def check(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def set_epochs(self, epochs: int) -> None:
        self.epochs = epochs


class Hooks(SimpleNamespace):
    """Of a rank: none but what a test sets."""

    def __init__(self) -> None:
        super().__init__(hooks={}, failure="", stop_requested=False, state=SimpleNamespace(), called=[])

    def call(self, name: str) -> None:
        self.called.append(name)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [100.0]
    monkeypatch.setattr("engine.train.control.time.monotonic", lambda: seconds[0])
    return seconds


def build(ctx: DistributedContext = MAIN, **settings) -> RunControl:
    run = Run(Path(), TrainConfig(**settings), Hyperparameters(), None, [])
    return RunControl(ctx, run, Progress(), Checkpointer(), Hooks(), Watchdog(StopSignals()))


def after_step(control: RunControl, flags: StepFlags = NO_FLAGS, newest: StepFlags = NO_FLAGS) -> Action:
    return control.after_step(flags, lambda: newest)


def test_checkpoints_are_saved_by_steps_and_by_time(now):
    control, due = build(save_minutes=1, save_steps=3), []
    for control.progress.updates in range(1, 10):
        due.append(after_step(control))
    assert due == [Action.CONTINUE, Action.CONTINUE, Action.SAVE] * 3
    assert not control.flags().save
    now[0] += 61
    assert [control.flags().save for _ in range(3)] == [True, False, False]  # once, until the checkpoint is saved
    control.saved()
    assert not control.flags().save
    now[0] += 61
    assert control.flags().save
    other = build(OTHER, save_minutes=1, save_steps=0)
    now[0] += 1000
    assert not other.flags().save  # the clock of rank 0 alone decides
    assert after_step(other) is Action.CONTINUE
    assert after_step(other, StepFlags(save=True)) is Action.SAVE


@pytest.mark.parametrize(("save_minutes", "least_s"), [(10, 60), (0.5, 30), (0, None)])
def test_an_epoch_is_saved_before_its_validation_if_much_would_be_lost(now, save_minutes, least_s):
    control, due = build(save_minutes=save_minutes), []
    for seconds in (0, 29, 30, 59, 60, 1e5):
        now[0] = 100.0 + seconds
        due.append(control.before_validation() is Action.SAVE)
    assert due == [least_s is not None and seconds >= least_s for seconds in (0, 29, 30, 59, 60, 1e5)]
    control.saved()
    assert control.before_validation() is Action.CONTINUE


@pytest.mark.parametrize(
    ("stop", "interrupt", "code"), [(True, False, REQUEUE), (False, True, INTERRUPTED), (True, True, INTERRUPTED)]
)
def test_a_signal_to_one_rank_makes_all_ranks_save_and_stop(stop, interrupt, code):
    """Ctrl-C counts before a batch system's signal."""
    control = build()
    assert control.flags() == NO_FLAGS
    control._signals.stop, control._signals.interrupt = stop, interrupt
    assert after_step(control, control.flags()) is Action.STOP
    assert control.is_over("AP")
    with pytest.raises(Stopped) as stopped:
        control.finish(10)
    assert stopped.value.code == code


def test_a_signal_that_arrives_with_the_newest_step_counts_at_a_save_only():
    control = build()
    assert after_step(control, newest=StepFlags(stop=True)) is Action.CONTINUE
    assert after_step(control, StepFlags(save=True), newest=StepFlags(stop=True)) is Action.STOP


def test_validation_stops_at_a_signal():
    control = build()
    assert not control.stops_validation()
    assert control.after_validation() is Action.CONTINUE
    control._signals.stop = True
    assert control.after_validation() is Action.CONTINUE  # it came after the last batch: the next step reads it
    assert control.stops_validation()
    assert control.after_validation() is Action.STOP
    with pytest.raises(Stopped) as stopped:
        control.finish(10)
    assert stopped.value.code == REQUEUE


@pytest.mark.parametrize("when", ["started", "step", "epoch"])
def test_a_hook_ends_the_run_without_an_exit_code(when, caplog):
    control = build()
    control._callbacks.hooks, control._callbacks.stop_requested = {"on_step": print}, True
    if when == "step":
        assert after_step(control, control.flags()) is Action.STOP
    else:
        assert (control.started() if when == "started" else control.after_epoch({})) is Action.STOP
    assert control.is_over("AP")
    control.finish(10)
    control._callbacks.failure = "on_step failed"
    with pytest.raises(UserError, match="on_step failed"):
        control.finish(10)


def test_a_failure_on_another_rank_is_not_reported_twice(monkeypatch):
    monkeypatch.setattr("engine.train.control.max_over_ranks", lambda ctx, value: 1)
    with pytest.raises(PeerFailure):
        build().finish(10)


@pytest.mark.parametrize(("val_every", "wanted"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (0, [5])])
def test_the_last_epoch_is_always_validated(val_every, wanted):
    control = build(epochs=5, val_every=val_every)
    assert [epoch for epoch in range(1, 6) if control.validates_after(epoch)] == wanted


def test_patience_counts_validated_epochs_and_only_between_epochs():
    control = build(epochs=9, patience=2, val_every=2)
    progress = control.progress
    progress.best_epoch = progress.patience_epoch = 2
    over = []
    for progress.epoch in range(2, 10):
        over.append(control.is_over("AP"))
    assert over == [False, False, True, False, True, False, True, True]
    progress.epoch, progress.batch = 4, 1
    assert not control.is_over("AP")


def test_the_time_limit_changes_the_number_of_epochs_everywhere(now):
    control = build(epochs=100, time=1.0)
    now[0] += 600  # the first epoch's steps
    assert control.fit_into_time(epoch_end_s=120)
    assert control.epochs == control.checkpointer.epochs == control._callbacks.state.epochs == 5
    assert not control.fit_into_time(epoch_end_s=120)
    assert not build(epochs=100).fit_into_time(epoch_end_s=120)


def test_a_run_that_skips_step_after_step_ends(tmp_path):
    control = build(max_bad_steps=2)
    control.run = SimpleNamespace(folder=tmp_path, config=control.run.config)
    control.checkpointer.wait = lambda: None
    bad = SimpleNamespace(finite=False, local_finite=False, paths=("a.jpg", "b.jpg"), grad_norm=1.0)
    control.check_finite(bad)
    control.check_finite(SimpleNamespace(finite=True))
    control.check_finite(bad)
    with pytest.raises(UserError, match=r"2 steps in a row not finite; stopped\. No checkpoint yet"):
        control.check_finite(bad)
    assert (tmp_path / "nonfinite_rank0.txt").read_text() == "epoch 0: a.jpg b.jpg\n" * 3
