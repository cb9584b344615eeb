"""Finds the checkpoint from which a run continues."""

from __future__ import annotations

import os
from pathlib import Path

from engine.checkpoint.newest_run import is_of_earlier_run, newest_run_id, run_id_of
from engine.checkpoint.progress import read_progress
from engine.run.run import StartedFrom
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.program import resume_flag


def find_checkpoint(config: TrainConfig) -> Path:
    """Returns the checkpoint that ``--resume`` selects: the file that it names, the last.pt of the folder that it
    names, or without a name the newest last.pt of the project. A symbolic link to a checkpoint in the folder of its run
    stands for that checkpoint.

    The file need not exist, if a name is given. Raises UserError if the project has no last.pt, or if that of a folder
    is from an earlier run than the folder's newest one: to continue the earlier run, the file itself must be named.
    """
    if config.resume:
        path = Path(config.resume)
        if not path.is_dir():
            return _follow_link(path)
        folder = path
    else:
        newest = newest_checkpoint(Path(config.project))
        if newest is None:
            raise UserError(f"--resume: no last.pt under {config.project}; name one: --resume PATH/last.pt")
        folder = newest.parent
    last = folder / "last.pt"
    if is_of_earlier_run(last):
        raise UserError(
            f"{folder}: the newest run in this folder has saved nothing yet; to continue the one before it: "
            f"{resume_flag(last)}"
        )
    return _follow_link(last)


def _follow_link(path: Path) -> Path:
    """Returns the checkpoint to which a symbolic link leads, if that is in the folder of its run and the link is not:
    the run continues in its own folder. The link may also be in a copy of that folder, or lead to a store of files."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))  # Path.resolve raises for a link to itself
    run_id = newest_run_id(target.parent)
    is_in_folder_of_run = run_id is not None and run_id_of(target) == run_id
    return target if is_in_folder_of_run and newest_run_id(path.parent) != run_id else path


def newest_checkpoint(project: Path) -> Path | None:
    """Returns the newest last.pt in the folders of runs in ``project``, or None. Checkpoints of runs that are not the
    newest in their folders come last."""
    paths = set(project.glob("*/last.pt"))
    for path in project.glob("**/last.pt"):  # a name may contain folders
        if (path.parent / "settings.yaml").is_file():  # else it was moved out of its run's folder
            paths.add(path)
    newest_first = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    continued = (path for path in newest_first if not is_of_earlier_run(path))
    return next(continued, next(iter(newest_first), None))


def check_is_newest(started_from: StartedFrom) -> None:
    """Raises UserError if a run that continues from this checkpoint would overwrite a newer run in its folder, or later
    epochs of its own."""
    path = started_from.path
    last = path.parent / "last.pt"
    if os.path.realpath(path) == os.path.realpath(last):
        return
    if is_of_earlier_run(path):
        raise UserError(
            f"{path}: is from an earlier run than the newest one in {path.parent}, which resuming here would "
            f"overwrite; to continue the earlier run, copy {path.name} into a new folder, and resume it there: "
            f"{resume_flag(Path('FOLDER', path.name))}"
        )
    newest = read_progress(last)
    if newest is None or is_of_earlier_run(last):  # damaged, or the newest run has not saved its own yet
        return
    progress = started_from.progress
    if (newest.epoch, newest.batch) > (progress.epoch, progress.batch):
        raise UserError(
            f"{path}: the run has gone on to epoch {newest.epoch} ({last}), and resuming here would "
            "overwrite it; to go back anyway, move last.pt elsewhere first"
        )
