"""Decides whether a trial fails if its training, or the scoring of a fold, does not succeed."""

from __future__ import annotations

from enum import Enum, auto

from utils.child import RunResult
from utils.process.outcome import Cause, Outcome


class Verdict(Enum):
    """The verdict on a trial: it fails, or stays unfinished, so that another process of the search continues it."""

    FAILS = auto()
    FAILS_IF_LOST_AGAIN = auto()  # after the same step, by another process of the search
    FAILS_IF_BASE_CAN_BEGIN = auto()  # a training with the base recipe, at this moment
    STAYS_UNFINISHED = auto()  # what has ended the trial would end the others, too


def verdict_on(result: RunResult, *, has_begun_before: bool) -> Verdict:
    """Decides by outcome and cause whether a trial fails.

    | outcome | cause | begun now | begun before | verdict |
    | --- | --- | --- | --- | --- |
    | FAILED | | | | FAILS |
    | LOST | MEMORY | yes | | FAILS |
    | LOST | LOST_PROCESS | yes | | FAILS_IF_LOST_AGAIN |
    | REFUSED | MACHINE | | | STAYS_UNFINISHED |
    | REFUSED, LOST | any other | no | yes | STAYS_UNFINISHED |
    | REFUSED, LOST | any other | no | no | FAILS_IF_BASE_CAN_BEGIN |

    Args:
        result: result of the training or scoring ("begun now": `RunResult.has_begun`). A lost one was tried twice.
        has_begun_before: whether any training of the trial has ever begun, also in another process of the search.
    """
    if result.outcome == Outcome.FAILED:
        return Verdict.FAILS
    if result.outcome == Outcome.LOST and result.has_begun:
        return Verdict.FAILS if result.cause == Cause.MEMORY else Verdict.FAILS_IF_LOST_AGAIN
    if result.cause == Cause.MACHINE or has_begun_before:
        return Verdict.STAYS_UNFINISHED
    return Verdict.FAILS_IF_BASE_CAN_BEGIN
