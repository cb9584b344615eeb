"""Finds out which split an image of an export is in, from the names of folders and files."""

from __future__ import annotations

import re
from pathlib import Path

from data.dataset.folder import split_of


def split_of_folders(path: Path, root: Path) -> str:
    """Returns the split that a folder of ``path``, below ``root``, is named after; "" if there is none."""
    if not path.is_relative_to(root):
        return ""
    folders = path.relative_to(root).parent.parts
    return next(filter(None, map(split_of, folders)), "")


def split_of_file(file: Path, root: Path) -> str:
    """Returns the split that a folder of a file of annotations is named after, or the file itself, such as
    ``instances/val.json`` or ``_train-00001.parquet``; "" if neither is."""
    return split_of_folders(file, root) or split_of(re.split(r"[-_.]", file.name.lstrip("_"))[0])
