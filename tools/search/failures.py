"""Decides whether a trial fails if its training, or the scoring of a fold, does not succeed."""

from __future__ import annotations

from collections.abc import Callable

from utils.machine.limits import Cause
from utils.process.child import RunResult
from utils.process.outcome import Outcome


def trial_fails(
    result: RunResult, *, has_begun_before: bool, is_lost_again: Callable[[], bool], can_base_begin: Callable[[], bool]
) -> bool:
    """Returns whether a trial fails. Otherwise it stays unfinished, because what has ended it would end the others,
    too; another process of the search continues it.

    | outcome | cause | begun now | begun before | the trial fails |
    | --- | --- | --- | --- | --- |
    | FAILED | | | | yes |
    | LOST | MEMORY | yes | | yes |
    | LOST | LOST_PROCESS | yes | | if ``is_lost_again()`` |
    | REFUSED | MACHINE | | | no |
    | REFUSED, LOST | any other | no | yes | no |
    | REFUSED, LOST | any other | no | no | if ``can_base_begin()`` |

    Args:
        result: result of the training or scoring ("begun now": `RunResult.has_begun`). A lost one was tried twice.
        has_begun_before: whether any training of the trial has ever begun, also in another process of the search.
        is_lost_again: records that this process has lost the trial, and returns whether another one has, too, after the
            same step.
        can_base_begin: tries whether a training with the base recipe can begin at this moment.
    """
    if result.outcome == Outcome.FAILED:
        return True
    if result.outcome == Outcome.LOST and result.has_begun:
        return result.cause == Cause.MEMORY or is_lost_again()
    if result.cause == Cause.MACHINE or has_begun_before:
        return False
    return can_base_begin()
