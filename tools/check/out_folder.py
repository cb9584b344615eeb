"""Chooses the folder of the page, which is never among the images or labels of the data set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from data.dataset.spec import DatasetSpec, FilesSplit, JoinedSplit
from data.listing.folders import Folders
from data.listing.labels import places_of_labels
from data.open import problem_of_output
from engine.run.new_folder import increment_path
from utils.errors import UserError
from utils.files.paths import check_output_folder
from utils.program_folders import cache_folder

PROJECT = "runs/check"


def check_out(spec: DatasetSpec, out: Path) -> None:
    """Raises UserError if the folder ``--out`` cannot be created or written, or is among the images or labels of
    ``spec``. Creates nothing, since the check may fail."""
    problem = problem_of_output(out, spec) or _problem_of_labels(out, spec)
    if problem:
        raise UserError(f"--out {out}: {problem}; name another folder")
    check_output_folder(out)


def new_folder(spec: DatasetSpec) -> Path:
    """Creates runs/check/exp, exp2, ... in the working folder, or in the cache folder if ``spec`` searches the former
    for images."""
    is_searched = problem_of_output(Path(PROJECT), spec) != ""
    return increment_path(cache_folder() / "check" if is_searched else PROJECT, "exp")


def _problem_of_labels(out: Path, spec: DatasetSpec) -> str:
    """Returns why the page must not be in ``out``, for messages, or "" if ``spec`` has no labels around it."""
    real = Path(os.path.realpath(out))
    for folder in _label_folders(spec):
        if real.is_relative_to(os.path.realpath(folder)):
            return f"is in {folder}, which has labels of {spec.source}"
    return ""


def _label_folders(spec: DatasetSpec) -> Iterator[Path]:
    """Yields the usual folders of the label files, with those of joined data sets. They need not exist."""
    splits = [*spec.splits.values(), *spec.left_out.values()]
    for split in splits:
        if isinstance(split, FilesSplit) and split.annotations is not None:
            yield split.annotations
        elif isinstance(split, FilesSplit):
            folders = Folders(spec.root)
            for path in split.images:
                if path.is_dir():
                    yield Path(places_of_labels(str(path), None, folders)[0])
        elif isinstance(split, JoinedSplit):
            for part in split.parts:
                yield from _label_folders(part)
