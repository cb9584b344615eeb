"""When the ranks save and stop, decided without a model. Real signals: tests/scripts/test_run_safety.py."""

from __future__ import annotations

import pytest

from engine.train.control import NO_FLAGS, Action, RunControl, StepFlags
from tests.helpers.messages import refused
from utils.distributed.context import DistributedContext
from utils.errors import INTERRUPTED, REQUEUE, Stopped
from utils.process.signals import StopSignals

CONTINUATION = "continue with: --resume last.pt"


def build(signals: StopSignals | None = None) -> RunControl:
    return RunControl(DistributedContext.single(), signals or StopSignals())


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


@pytest.mark.parametrize("code", [REQUEUE, INTERRUPTED])
@pytest.mark.parametrize("in_step", [True, False])
def test_a_signal_to_one_rank_makes_all_ranks_save_and_stop(code, in_step):
    signals = StopSignals()
    control = build(signals)
    signals.code = code
    assert (after_step(control, control.flags()) if in_step else control.agree()) is Action.STOP
    assert control.agree_on_abort()
    with pytest.raises(Stopped) as stopped:
        control.raise_if_aborted("1 epoch", CONTINUATION)
    assert stopped.value.code == code


def test_a_signal_that_arrives_with_the_newest_step_counts_at_a_save_only():
    control = build()
    assert after_step(control, newest=StepFlags(stop=True)) is Action.CONTINUE
    assert after_step(control, StepFlags(save=True), newest=StepFlags(stop=True)) is Action.STOP


def test_validation_stops_at_a_signal():
    signals = StopSignals()
    control = build(signals)
    assert not control.should_stop()
    assert control.after_validation() is Action.CONTINUE
    signals.code = REQUEUE
    assert control.after_validation() is Action.CONTINUE  # it came after the last batch: the next step reads it
    assert control.should_stop()
    assert control.after_validation() is Action.STOP
    with pytest.raises(Stopped) as stopped:
        control.raise_if_aborted("1 epoch", CONTINUATION)
    assert stopped.value.code == REQUEUE


@pytest.mark.parametrize("in_step", [True, False])
def test_a_request_stops_the_run_without_an_exit_code(in_step):
    control = build()
    control.request_stop()
    assert (after_step(control, control.flags()) if in_step else control.agree()) is Action.STOP
    control.raise_if_aborted("1 epoch", CONTINUATION)
    assert control.exit_code == 0


def test_a_failure_stops_the_run_and_is_its_error():
    control = build()
    control.fail("on_step failed")
    assert after_step(control, control.flags()) is Action.STOP
    with refused("on_step failed; when it is fixed, continue with: --resume last.pt"):
        control.raise_if_aborted("1 epoch", CONTINUATION)
