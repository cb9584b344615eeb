"""The outcome of a trial for each way in which its training can end."""

from __future__ import annotations

import signal

import pytest

from tools.search.failures import Verdict, verdict_on
from utils.child import RunResult

FAILS = Verdict.FAILS
IF_LOST_AGAIN = Verdict.FAILS_IF_LOST_AGAIN
IF_BASE_CAN_BEGIN = Verdict.FAILS_IF_BASE_CAN_BEGIN
UNFINISHED = Verdict.STAYS_UNFINISHED


@pytest.mark.parametrize(
    ("code", "cause", "never_began", "began_before", "began_now"),
    [
        pytest.param(2, "command", IF_BASE_CAN_BEGIN, UNFINISHED, FAILS, id="refused, or not finite"),
        pytest.param(70, "command", IF_BASE_CAN_BEGIN, UNFINISHED, FAILS, id="bug"),
        pytest.param(1, None, IF_BASE_CAN_BEGIN, UNFINISHED, FAILS, id="a callback exits"),
        pytest.param(-signal.SIGSEGV, None, IF_BASE_CAN_BEGIN, UNFINISHED, FAILS, id="crash"),
        pytest.param(2, "memory", IF_BASE_CAN_BEGIN, UNFINISHED, FAILS, id="out of memory"),
        pytest.param(2, "lost process", IF_BASE_CAN_BEGIN, UNFINISHED, IF_LOST_AGAIN, id="a rank was killed"),
        pytest.param(-signal.SIGKILL, None, IF_BASE_CAN_BEGIN, UNFINISHED, IF_LOST_AGAIN, id="killed"),
        # The disk may be full, which would end the other trials, too.
        pytest.param(-signal.SIGBUS, None, IF_BASE_CAN_BEGIN, UNFINISHED, IF_LOST_AGAIN, id="no space for a page"),
        pytest.param(2, "machine", UNFINISHED, UNFINISHED, UNFINISHED, id="the disk is full"),
    ],
)
def test_a_trial_fails_only_by_what_may_be_its_own_fault(code, cause, never_began, began_before, began_now):
    values = {} if cause is None else {"error": "line", "cause": cause}
    not_now = RunResult.of(code, values)
    now = RunResult.of(code, values | {"begun": True})
    assert verdict_on(not_now, has_begun_before=False) == never_began
    assert verdict_on(not_now, has_begun_before=True) == began_before
    assert verdict_on(now, has_begun_before=True) == began_now
