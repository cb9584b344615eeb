"""Decides how the run in a folder continues: for ``--resume auto`` and for what torchrun restarts.

Whoever starts trainings (tools/kfold, tools/search, the files in launch/) starts ``train.py --resume auto`` and asks
nothing itself, so there is one answer:

| in the folder | the run |
| --- | --- |
| neither last.pt nor results | starts |
| results of two epochs or more, but no last.pt | is refused: the user restores last.pt or chooses another folder |
| last.pt, and epochs are left with the settings of now (also the scores of the newest epoch) | continues |
| last.pt after the last epoch | writes what is missing of the report, the plots and the exports |

A last.pt that an earlier run has left in the folder (``--exist-ok``) does not count.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.checkpoint.newest_run import checkpoint_of_newest_run
from engine.run.results_csv import ResultsTable
from engine.run.resume import plan_from_checkpoint, reason_to_end
from engine.run.run import Command, Remaining, RunPlan, StartedFrom
from utils.distributed.context import DistributedContext, broadcast_object
from utils.errors import UserError

COMPLETE = ".complete"  # in the run's folder: what follows the last epoch has been done, but for exports


def plan_continued(ctx: DistributedContext, command: Command, folder: Path) -> RunPlan | None:
    """Returns the plan of the run in ``folder``; None if it has saved nothing yet. Every rank must call this.

    Raises UserError if the checkpoint is damaged, or for a setting that the run cannot change.
    """
    path = checkpoint_of_newest_run(folder)
    if path is None:
        return None
    plan = plan_from_checkpoint(ctx, command, path)
    assert plan.checkpoint is not None
    if not reason_to_end(plan.checkpoint, plan.settings.config, command.explicit_flags):
        return plan
    is_complete = broadcast_object(ctx, (folder / COMPLETE).is_file() if ctx.is_main else False)
    remaining = Remaining.EXPORTS if is_complete else Remaining.REPORT
    return replace(
        plan,
        started_from=replace(StartedFrom.of(plan.checkpoint), remaining=remaining),
        startup_messages=[*plan.startup_messages, "all epochs are done; what follows the last one is done again"],
    )


def check_not_lost(folder: Path) -> None:
    """Raises UserError if ``folder`` has results of several epochs, but no last.pt: a run that starts there would
    replace them. Those of the first epoch may be of a run that was killed before it saved."""
    if (folder / "last.pt").is_file():
        return
    num_epochs = len(ResultsTable.read_if_exists(folder / "results.csv").rows)
    if num_epochs > 1:
        raise UserError(
            f"{folder}: has results of {num_epochs} epochs, but no last.pt from which they continue; restore it, or "
            "move this folder elsewhere to train anew"
        )


def note_complete(folder: Path) -> None:
    """Records that what follows the last epoch of the run in ``folder`` has been done, but for exports."""
    (folder / COMPLETE).touch()


def forget_complete(folder: Path) -> None:
    """Removes the record of `note_complete`: the run in ``folder`` goes on, or another one starts there."""
    (folder / COMPLETE).unlink(missing_ok=True)
