"""Chooses the folder of the page. It is never in the data set, which a check leaves unchanged."""

from __future__ import annotations

import os
from pathlib import Path

from data.labels.yolo import label_folders
from data.source.dataset_spec import DatasetSpec, FilesSplit, Split
from engine.run.new_folder import increment_path
from utils.errors import UserError, os_reason
from utils.files.paths import is_inside
from utils.program_folders import cache_folder

PROJECT = "runs/check"


def make_out(spec: DatasetSpec, out: Path) -> None:
    """Creates the folder ``--out``. Raises UserError if it cannot be created, or is in the data set."""
    folder = _inside(out, spec)
    if folder:
        raise UserError(f"--out {out}: is in the data set ({folder}), which is never written to; name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be created ({os_reason(error)})") from None


def new_folder(spec: DatasetSpec) -> Path:
    """Creates runs/check/exp, exp2, ... in the working folder, or in the cache folder if the former is in the data
    set."""
    return increment_path(cache_folder() / "check" if _inside(Path(PROJECT), spec) else PROJECT, "exp")


def _inside(path: Path, spec: DatasetSpec) -> str:
    """Returns the folder of the data set that contains ``path``; "" if there is none."""
    return next((folder for folder in _data_folders(spec) if is_inside(path, folder)), "")


def _data_folders(spec: DatasetSpec) -> list[str]:
    """Returns the smallest folder that contains everything the YAML names below its root, and each folder that it names
    elsewhere."""
    named: list[str] = []
    for split in spec.splits:
        for part in spec.parts_of(split):
            named += _named_folders(part.split(split))
    named = list(dict.fromkeys(named))
    below = [folder for folder in named if os.path.commonpath([folder, spec.root]) == str(spec.root)]
    elsewhere = [folder for folder in named if folder not in below]
    return [os.path.commonpath(below), *elsewhere] if below else elsewhere


def _named_folders(source: Split) -> list[str]:
    """Returns the folders of the images and the labels of a split."""
    folders = [str(path if path.is_dir() else path.parent) for path in source.paths]
    if isinstance(source, FilesSplit) and source.annotations is None:
        for path in source.images:
            if path.is_dir():
                folders += [folder for folder in label_folders(str(path)) if os.path.isdir(folder)]
    return folders
