"""The outcome of a trial for each way in which its training can end."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from tools.search.failures import trial_fails
from utils.process.child import RunResult

# Whether a trial fails that is not, or is, lost again (first two, last two), if the base recipe cannot, or can, begin.
FAILS = [True, True, True, True]
IF_LOST_AGAIN = [False, False, True, True]
IF_BASE_CAN_BEGIN = [False, True, False, True]
UNFINISHED = [False, False, False, False]


def verdicts_on(result: RunResult, *, has_begun_before: bool) -> list[bool]:
    return [
        trial_fails(
            result,
            has_begun_before=has_begun_before,
            is_lost_again=partial(bool, is_lost_again),
            can_base_begin=partial(bool, can_base_begin),
        )
        for is_lost_again in (False, True)
        for can_base_begin in (False, True)
    ]


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
    assert verdicts_on(not_now, has_begun_before=False) == never_began
    assert verdicts_on(not_now, has_begun_before=True) == began_before
    assert verdicts_on(now, has_begun_before=True) == began_now
