"""Decides how the run in a folder continues: for ``--resume auto`` and for what torchrun restarts.

Whoever starts trainings (tools/kfold, tools/search, the files in launch/) starts ``train.py --resume auto`` and decides
nothing itself, so there is one answer, which rank 0 gives for all ranks:

| in the folder | the run |
| --- | --- |
| neither last.pt nor results | starts |
| results of two epochs or more, but no last.pt | is refused: the user restores last.pt or chooses another folder |
| last.pt, and epochs are left with the current settings (also the scores of the newest epoch) | continues |
| last.pt after the last epoch, and the report is missing | validates the last epoch again and writes the report |
| the report of the last epoch is written, with last.pt or without | writes the files of ``--export`` that are missing |

A run that has ended is not asked for other results: settings that would change them are refused, unless epochs are left
with the current settings. A last.pt that an earlier run has left in the folder (``--exist-ok``) does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.newest_run import checkpoint_of_newest_run
from engine.run.folder import read_reported_epochs, read_stored_run
from engine.run.results_csv import ResultsTable
from engine.run.resume import plan_from_checkpoint, reason_to_end, stored_settings
from engine.run.resume_settings import check_unchanged, merge_settings
from engine.run.run import Command, EndedRun, RunPlan, RunSettings
from utils.distributed.context import DistributedContext, broadcast_object, result_of_main
from utils.errors import UserError
from utils.strings import counted


@dataclass(frozen=True)
class _FolderState:
    """What the newest run of a folder has left there."""

    last: Path | None  # its last.pt
    reported: EndedRun | None  # as it was when its report was written; None: that is missing


def plan_continued(ctx: DistributedContext, command: Command, folder: Path) -> RunPlan | EndedRun | None:
    """Returns the plan of the run in ``folder``; None if it has saved nothing yet. Every rank must call this.

    Raises UserError if the checkpoint is damaged, for a setting that the run cannot change, or if the run has ended,
    for one with which it would have had other results.
    """
    state = result_of_main(ctx, lambda: _read_state(folder))
    if state.last is not None:
        return _plan_from_last(ctx, command, state.last, state.reported)
    if state.reported is not None:
        return _plan_reported(command, state.reported)
    return None


def _read_state(folder: Path) -> _FolderState:
    """Returns what the newest run in ``folder`` has left there."""
    stored = read_stored_run(folder)
    epochs = None if stored is None else read_reported_epochs(folder, stored.run_id)
    reported = None
    if stored is not None and epochs is not None:
        reported = EndedRun(
            folder=folder, run_id=stored.run_id, settings=stored.settings, epochs=epochs, startup_messages=[]
        )
    return _FolderState(last=checkpoint_of_newest_run(folder), reported=reported)


def _plan_from_last(
    ctx: DistributedContext, command: Command, last: Path, reported: EndedRun | None
) -> RunPlan | EndedRun:
    """Returns the plan of the run that wrote the checkpoint ``last``: to train, to report, or of a run that has ended
    (``reported``)."""
    plan = plan_from_checkpoint(ctx, command, last)
    checkpoint = plan.checkpoint
    assert checkpoint is not None
    has_ended = bool(reason_to_end(checkpoint, plan.settings.config, command.explicit_flags))
    if not broadcast_object(ctx, has_ended):
        return plan
    check_unchanged(last.parent, stored_settings(checkpoint), plan.settings)
    epochs = checkpoint.header.progress.epoch
    settings = _with_trained_epochs(plan.settings, epochs)
    messages = plan.startup_messages
    if reported is not None:
        return replace(reported, settings=settings, epochs=epochs, startup_messages=messages)
    messages = [*messages, "all epochs are done; what follows the last one is done again"]
    return replace(plan, settings=settings, only_reports=True, startup_messages=messages)


def _plan_reported(command: Command, reported: EndedRun) -> EndedRun:
    """Returns the plan of a run that has ended, and whose last.pt has been removed. Raises UserError if the command
    asks for more epochs."""
    stored = reported.settings
    settings, messages = merge_settings(stored, command.config, command.explicit_flags)
    config = settings.config
    is_same_length = all(
        getattr(config, name) == getattr(stored.config, name) for name in ("epochs", "time", "patience")
    )
    if not is_same_length and config.epochs > reported.epochs:
        raise UserError(
            f"{reported.folder}: the run has ended after {counted(reported.epochs, 'epoch')}, and there is no last.pt "
            "from which it could train on; restore it, or leave --epochs, --time and --patience as they were"
        )
    check_unchanged(reported.folder, stored, settings)
    settings = _with_trained_epochs(settings, reported.epochs)
    return replace(reported, settings=settings, startup_messages=messages)


def _with_trained_epochs(settings: RunSettings, epochs: int) -> RunSettings:
    """Returns the settings of a run that has trained for ``epochs``: it has no fewer."""
    config = settings.config
    return replace(settings, config=replace(config, epochs=max(epochs, config.epochs)))


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
