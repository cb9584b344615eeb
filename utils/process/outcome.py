"""The outcome of a command, for the process that started it: `outcome_of` decides from the cause alone.

An error has a cause (`utils.machine.limits.cause_of`), which `run_main` writes to the result file; so has a signal that
ends a process (`utils.process.child_signals.cause_of_signal`). child.py asks `outcome_of`.
"""

from __future__ import annotations

from enum import StrEnum

from utils.machine.limits import Cause


class Outcome(StrEnum):
    """The outcome of a command, and the reaction of a program that started it for training or scoring.

    | outcome | `tools.kfold`, `tools.search` | Ray |
    | --- | --- | --- |
    | DONE | go on | ends |
    | PRUNED | the search goes on with the next trial | |
    | STOPPED | end; the same command continues | tries again |
    | REFUSED | end, and keep the results so far: the next training would be refused, too | ends |
    | LOST | try once more, then end and keep the results so far; the same command continues | tries again |
    | FAILED | cross-validation ends; a search counts the trial as failed | tries again |

    Search and Ray distinguish further. If a training is refused or lost, the hyper-parameters of a trial may be the
    reason: a search counts the trial as failed if `tools.search.failures` finds that they are. Ray tries again after a
    bug or a crash, even if the training has not begun.
    """

    DONE = "done"
    PRUNED = "pruned"  # ended early by the process that started it
    STOPPED = "stopped"  # ended by a signal; a run that had begun can be resumed
    REFUSED = "refused"  # ended before its work began, or by a limit of the machine
    LOST = "lost"  # ended by a cause that the next try may not meet
    FAILED = "failed"  # ended by something that may be its own, such as its hyper-parameters


def outcome_of(cause: Cause, *, has_begun: bool) -> Outcome:
    """Returns the outcome of a command that is not done. ``has_begun``: its work had (`report_begun`).

    | cause | before the work has begun | after |
    | --- | --- | --- |
    | COMMAND | REFUSED | FAILED |
    | MACHINE | REFUSED | REFUSED |
    | MEMORY, LOST_PROCESS | LOST | LOST |

    Nothing fails before it has begun: whatever ends each training on a broken machine would use up all trials of a
    search.
    """
    if cause in (Cause.MEMORY, Cause.LOST_PROCESS):
        return Outcome.LOST
    if cause == Cause.MACHINE or not has_begun:
        return Outcome.REFUSED
    return Outcome.FAILED
