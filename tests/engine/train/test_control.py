"""Requests to save and to stop between the steps. A trainer follows them in test_trainer.py, ranks in
tests/scripts/test_run_safety.py."""

from __future__ import annotations

from engine.train.control import NO_FLAGS, Action, RunControl, StepFlags
from utils.distributed.context import DistributedContext
from utils.process.signals import StopSignals


def build() -> RunControl:
    return RunControl(DistributedContext.single(), StopSignals())


def after_step(
    control: RunControl, flags: StepFlags = NO_FLAGS, newest: StepFlags = NO_FLAGS, action: Action = Action.CONTINUE
) -> Action:
    return control.after_step(flags, action, lambda: newest)


def test_a_save_is_requested_once_and_a_stop_until_it_is_agreed():
    control = build()
    assert control.flags() == NO_FLAGS
    control.request_save()
    assert [control.flags().save for _ in range(2)] == [True, False]
    control.request_stop()
    assert [control.flags().stop for _ in range(2)] == [True, True]
    control.request_save()
    assert control.flags() == StepFlags(save=True, stop=True)
    assert after_step(control, StepFlags(save=True)) is Action.SAVE
    assert after_step(control, action=Action.SAVE) is Action.SAVE
    assert after_step(control) is Action.CONTINUE


def test_a_signal_that_arrives_with_the_newest_step_counts_at_a_save_only():
    control = build()
    assert after_step(control, newest=StepFlags(stop=True)) is Action.CONTINUE
    assert after_step(control, StepFlags(save=True), newest=StepFlags(stop=True)) is Action.STOP
