"""The hooks of the core, without the loop that calls them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.hooks.checkpointing import Checkpoints
from engine.hooks.class_weights import ClassWeights
from engine.hooks.hook import Action, Epoch, Hook, Hooks
from engine.hooks.nonfinite import NonFiniteSteps
from engine.hooks.stopping import EarlyStopping, TimeLimit
from engine.optim.schedule import StepPlan
from engine.parallel.step_values import NO_FLAGS, StepValues
from engine.train.checkpoint import Progress
from tests.helpers.training import hook_training
from utils.distributed.context import DistributedContext

OTHER = replace(DistributedContext.single(), rank=1, local_rank=1, world_size=2, local_world_size=2, backend="gloo")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [100.0]
    monkeypatch.setattr("engine.hooks.checkpointing.time.monotonic", lambda: seconds[0])
    return seconds


def test_hooks_are_called_in_order_up_to_one_that_stops_the_run():
    calls: list[str] = []

    class Named(Hook):
        def __init__(self, name: str, action: Action) -> None:
            self.name = name
            self.action = action

        def start(self, trainer) -> Action:
            calls.append(self.name)
            return self.action

    def called(*actions: Action) -> tuple[Action, str]:
        calls.clear()
        hooks = [Named("abc"[number], action) for number, action in enumerate(actions)]
        return Hooks(hooks).call("start", hook_training()), "".join(calls)

    assert called() == (Action.CONTINUE, "")
    assert called(Action.SAVE, Action.CONTINUE, Action.CONTINUE) == (Action.SAVE, "abc")
    assert called(Action.END, Action.SAVE, Action.CONTINUE) == (Action.END | Action.SAVE, "abc")
    assert called(Action.CONTINUE, Action.STOP, Action.CONTINUE) == (Action.STOP, "ab")


def test_checkpoints_are_saved_by_the_clock_of_rank_0(now):
    trainer = hook_training()
    hook = Checkpoints(60)

    def is_save_requested() -> bool:
        hook.after_step(trainer)
        return trainer.control.flags().save

    assert not is_save_requested()
    now[0] += 61
    assert [is_save_requested() for _ in range(3)] == [True, False, False]  # once, until the checkpoint is saved
    hook.after_save()
    assert not is_save_requested()
    now[0] += 61
    assert is_save_requested()


def test_other_ranks_request_no_saves(now):
    trainer = hook_training(ctx=OTHER)
    hook = Checkpoints(60)
    now[0] += 1000
    hook.after_step(trainer)
    assert not trainer.control.flags().save


@pytest.mark.parametrize(("every_s", "min_unsaved_s"), [(600, 60), (30, 30), (0, None)])
def test_an_epoch_is_saved_before_its_validation_if_much_would_be_lost(now, every_s, min_unsaved_s):
    trainer = hook_training()
    hook = Checkpoints(every_s)
    due = []
    times = (0, 29, 30, 59, 60, 1e5)
    for seconds in times:
        now[0] = 100.0 + seconds
        due.append(hook.before_validation(trainer) is Action.SAVE)
    assert due == [min_unsaved_s is not None and seconds >= min_unsaved_s for seconds in times]
    hook.after_save()
    assert hook.before_validation(trainer) is None


def test_patience_counts_validated_epochs_and_only_between_epochs():
    hook = EarlyStopping(2, "AP", val_every=2)
    trainer = hook_training(steps=StepPlan(accumulate=1, per_epoch=1, epochs=9))
    progress = trainer.progress
    over = []
    progress.best_epoch = 2
    for progress.epoch in range(2, 10):
        over.append(hook.report(trainer, Epoch(progress.epoch)) is Action.END)
    assert over == [False, False, True, False, True, False, True, False]  # after the last epoch there is none to spare
    progress.epoch = 4
    progress.batch = 1
    assert hook.report(trainer, Epoch(4)) is None  # scored while the next epoch was trained


def test_patience_waits_for_the_first_score():
    """An epoch without a score is not the best one, so no epoch can be worse."""
    progress = Progress(epoch=5)
    assert not progress.has_stalled(2)
    assert not progress.has_stalled(2, epoch=9)
    progress.record_fitness(0.1)
    assert progress.has_stalled(2, epoch=7)


def test_the_time_limit_changes_the_number_of_epochs(now):
    hook = TimeLimit(1.0)
    trainer = hook_training(steps=StepPlan(accumulate=1, per_epoch=1, epochs=100))
    hook.before_epoch(trainer)
    now[0] += 600  # the first epoch's steps
    hook.after_last_step(trainer, Epoch(1))
    assert trainer.epochs == 6
    now[0] += 240  # its validation; without it, five epochs would fit
    hook.before_epoch(trainer)
    now[0] += 600
    hook.after_last_step(trainer, Epoch(2))
    assert trainer.epochs == 4


@pytest.mark.parametrize(
    ("scales", "in_a_row", "level"), [(True, 16, "INFO"), (True, 17, "WARNING"), (False, 1, "WARNING")]
)
def test_float16_that_looks_for_its_loss_scale_is_no_warning(caplog, scales, in_a_row, level):
    caplog.set_level("INFO", logger="lockstep")
    step = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", enabled=scales))
    trainer = hook_training(step=step, progress=Progress(bad_steps=in_a_row))
    values = StepValues(
        finite=False, local_finite=True, grad_norm=math.inf, flags=NO_FLAGS, losses=(1.0,), paths=("a.jpg",)
    )
    NonFiniteSteps().after_read(trainer, values)
    assert [record.levelname for record in caplog.records] == [level]


def test_a_low_ap_raises_the_weight_of_a_class():
    given: list[list[float]] = []
    loader = SimpleNamespace(class_weights=np.array([1.0, 2.0]), set_class_weights=lambda w: given.append(w.tolist()))
    trainer = hook_training(loader=loader)
    hook = ClassWeights(loader)
    hook.start(trainer)
    hook.record(trainer, Epoch(1))  # not validated
    assert not given
    hook.record(trainer, Epoch(2, class_ap=np.array([0.5, np.nan])))
    assert given == [[0.25, 2.0]] == [trainer.progress.class_weights]
    ClassWeights(loader).start(trainer)  # resumed
    assert given == [[0.25, 2.0]] * 2
