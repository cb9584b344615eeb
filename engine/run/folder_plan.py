"""Decides how the run in a folder continues, with ``--resume auto`` or after a restart by torchrun.

Programs that start trainings (tools/kfold, tools/search, the files in launch/) run ``train.py --resume auto`` and leave
the decision to this module. Rank 0 decides for all ranks:

| in the folder | the run |
| --- | --- |
| no last.pt, and results of one epoch at most | starts |
| no last.pt, results of more epochs, and no report | is refused: the user restores last.pt or chooses another folder |
| last.pt, and epochs are left with the current settings (also the scores of the newest epoch) | continues |
| last.pt at the end of the run, report missing | writes the report; first validates the last epoch again |
| last.pt at the end of the run, and its report | has ended; the files of ``--export`` that are missing are written |
| no last.pt, and a report | the same; it is refused if the current settings may add epochs |

A run ends after the last epoch of the current settings, where ``--patience`` ends it, or where a callback has ended it,
unless the current settings add epochs. For a run that has ended, settings that would change its results are refused. If
the newest run in the folder has saved nothing (``--exist-ok``), the last.pt and the results of an earlier run are
ignored.

A start that only writes the report leaves last.pt as it is, unless it has to score the newest epoch: it then saves the
run, with its own settings. A start that trains on from where a callback had ended the run saves last.pt before its
first step (engine/hooks/checkpointing.py), so that last.pt no longer says that the run has ended.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.checkpoint.description import read_description
from engine.checkpoint.newest_run import best_of_newest_run, checkpoint_of_newest_run
from engine.run.checkpoint_plan import plan_from_checkpoint
from engine.run.complete_record import read_reported_epochs
from engine.run.ended_run import adds_epochs, check_unchanged
from engine.run.merge_settings import describe_changes, merge_settings
from engine.run.results_csv import ResultsTable
from engine.run.run import ContinuedRun, EndedRun, TrainCommand
from engine.run.settings_yaml import StoredRun, read_stored_run
from utils.errors import UserError
from utils.program import resume_flag
from utils.strings import counted


def plan_continued(command: TrainCommand, folder: Path) -> ContinuedRun | EndedRun | None:
    """Returns the plan of the run in ``folder``; None if it has saved nothing yet.

    Raises UserError if the checkpoint is damaged (its tensors are checked when they are read), for a setting that the
    run cannot change or, if the run has ended, for one that would have changed its results.
    """
    newest = read_stored_run(folder)
    reported_epochs = None if newest is None else read_reported_epochs(folder, newest.run_id)
    last = checkpoint_of_newest_run(folder)
    if last is not None:
        return _plan_from_last(command, last, reported_epochs)
    if newest is not None and reported_epochs is not None:
        return _plan_without_last(command, folder, newest, reported_epochs)
    return None


def _plan_from_last(command: TrainCommand, last: Path, reported_epochs: int | None) -> ContinuedRun | EndedRun:
    """Returns the plan of the run that wrote the checkpoint ``last``, and its report after ``reported_epochs`` (None:
    it has none)."""
    plan = plan_from_checkpoint(command, last)
    started_from = plan.started_from
    end_reason = plan.end_reason or _reason_of_callback(plan)
    if not end_reason:
        return plan
    check_unchanged(
        last.parent,
        stored=plan.stored,
        settings=plan.settings,
        end_reason=end_reason,
        description=started_from.description,
    )
    # False without a record, and for the record of another copy of the folder.
    is_reported = reported_epochs == started_from.progress.epoch
    if not is_reported or plan.lacks_scores:
        return replace(plan, end_reason=end_reason)
    return EndedRun(
        folder=last.parent, settings=plan.settings, end_reason=end_reason, startup_messages=plan.change_messages
    )


def _reason_of_callback(plan: ContinuedRun) -> str:
    """Returns the end reason of a run that a callback has ended; "" of other runs, and if the command adds epochs."""
    started_from = plan.started_from
    if not started_from.ended_by_callback:
        return ""
    progress = started_from.progress
    if adds_epochs(plan.stored.config, plan.settings.config, progress.epoch, progress=progress):
        return ""
    return f"a callback has ended it after {started_from.position}; to continue: {resume_flag(started_from.path)}"


def _plan_without_last(command: TrainCommand, folder: Path, newest: StoredRun, epochs: int) -> EndedRun:
    """Returns the plan of the run ``newest`` in ``folder``, which has written its report after ``epochs``, but no
    longer has a last.pt. Raises UserError if the command may add epochs."""
    merged = merge_settings(newest.settings, command)
    done = counted(epochs, "epoch")
    reason = "there is no last.pt to continue from; restore it to continue"
    end_reason = f"its report after {done} is written, and {reason}"
    config = merged.settings.config
    if adds_epochs(merged.stored.config, config, epochs, progress=None):
        raise UserError(
            f"{folder}: the run has ended after {done}, and {reason}, or repeat the command with the earlier --epochs, "
            "--time and --patience"
        )
    settings = merged.settings.with_epochs(max(epochs, config.epochs))
    best = best_of_newest_run(folder)
    check_unchanged(
        folder,
        stored=merged.stored,
        settings=settings,
        end_reason=end_reason,
        description=None if best is None else read_description(best),
    )
    return EndedRun(
        folder=folder,
        settings=settings,
        end_reason=end_reason,
        startup_messages=[*merged.messages, *describe_changes(newest.settings, settings)],
    )


def check_not_lost(folder: Path) -> None:
    """Raises UserError if ``folder`` has results of several epochs, but no last.pt: a run that starts there would
    replace them. Results of one epoch may be from a run that was killed before it saved."""
    if (folder / "last.pt").is_file():
        return
    num_epochs = len(ResultsTable.read_if_exists(folder / "results.csv").rows)
    if num_epochs > 1:
        raise UserError(
            f"{folder}: has results of {num_epochs} epochs, but no last.pt to continue from; restore it, or "
            "move this folder elsewhere to start again"
        )
