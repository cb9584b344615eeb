"""Chooses the folder of the page, which is never among the images of the data set."""

from __future__ import annotations

from pathlib import Path

from data.source.dataset_spec import DatasetSpec
from data.source.searched_folders import problem_of_output
from engine.run.new_folder import increment_path
from utils.errors import UserError, os_reason
from utils.program_folders import cache_folder

PROJECT = "runs/check"


def make_out(spec: DatasetSpec, out: Path) -> None:
    """Creates the folder ``--out``. Raises UserError if it cannot be created, or ``spec`` searches it for images."""
    problem = problem_of_output(out, spec)
    if problem:
        raise UserError(f"--out {out}: {problem}; name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be created ({os_reason(error)})") from None


def new_folder(spec: DatasetSpec) -> Path:
    """Creates runs/check/exp, exp2, ... in the working folder, or in the cache folder if ``spec`` searches the former
    for images."""
    is_searched = problem_of_output(Path(PROJECT), spec) != ""
    return increment_path(cache_folder() / "check" if is_searched else PROJECT, "exp")
