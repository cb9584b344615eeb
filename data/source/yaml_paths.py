"""Resolves the paths in a data set's YAML: its folder, and the entries of its splits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files.paths import normal_path
from utils.program_folders import CONFIGS
from utils.schema import check

YAML_FOLDER = CONFIGS / "data"  # YAMLs of public data sets
_MAX_PATH_BYTES = 4000  # of the 4096 of Linux, which also include the name of a file in the folder
_MAX_NAME_BYTES = 255


def is_yaml(path: str | Path) -> bool:
    """Returns whether a path has the suffix of a YAML."""
    return str(path).lower().endswith((".yaml", ".yml"))


def checked_path(value: Any, location: str) -> Path:
    """Returns the path that a YAML entry names. Raises UserError, beginning with ``location``, if it is not a path. A
    Path, as `read_folder` found it, is returned unchanged: its name may end with a space."""
    if isinstance(value, Path):
        return value
    text = check(value, str, location).strip()
    if not text:
        raise UserError(f"{location}: an entry is empty; name a folder, or remove it")
    path = Path(os.path.expanduser(text))
    check_length(path, location)
    return path


def check_length(path: Path, location: str) -> None:
    """Raises UserError, beginning with ``location``, if file systems cannot have ``path``."""
    longest_name = max((_num_bytes(part) for part in path.parts), default=0)
    if _num_bytes(str(path)) > _MAX_PATH_BYTES or longest_name > _MAX_NAME_BYTES:
        raise UserError(f"{location}: a path or a name in it is longer than file systems allow: {str(path)[:100]}...")


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def resolve_root(value: Any, yaml_path: Path, known_root: str) -> Path:
    """Returns the data set's folder for the value of the key ``path``. ``known_root``: see `DataSource`."""
    yaml_folder = yaml_path.absolute().parent
    if value is None or (isinstance(value, str) and not value.strip()):
        return normal_path(yaml_folder)
    path = checked_path(value, f"{yaml_path}: path")
    candidates: list[Path] = []
    for reading in _readings(path):
        candidates += [reading] if reading.is_absolute() else [yaml_folder / reading, Path.cwd() / reading]
    if known_root and not path.is_absolute():
        candidates.append(Path(known_root))
    for candidate in candidates:
        if os.path.isdir(candidate):  # False without permission, which opening the splits reports
            return normal_path(candidate)
    # The YAMLs of public data sets name folders below the current one.
    is_below_current_folder = yaml_folder == YAML_FOLDER and not path.is_absolute()
    return normal_path(candidates[1] if is_below_current_folder else candidates[0])


def resolve_entry(value: Any, root: Path, location: str) -> Path:
    """Returns the absolute path of a split's entry. ``../train/images``, as exported by Roboflow, may mean
    ``train/images``. Raises UserError, beginning with ``location``, if the entry is not a path or is too long."""
    entry = checked_path(value, location)
    for reading in _readings(entry):
        candidates = [reading]
        if reading.parts[:1] == ("..",):
            candidates.append(Path(*reading.parts[1:]))
        for candidate in candidates:
            if os.path.exists(root / candidate):
                return normal_path(root / candidate)
    path = normal_path(root / entry)
    check_length(path, location)
    return path


def _readings(path: Path) -> list[Path]:
    """Returns the possible readings of a path: as written, and with Windows separators replaced."""
    return [path, Path(str(path).replace("\\", "/"))]


def replaced_separators(written: Sequence[str | Path], resolved: Sequence[Path], location: str) -> list[str]:
    """Returns log lines about the entries ``written`` whose Windows separators have been replaced."""
    return [
        f"{location}: {entry} is read as {path}"
        for entry, path in zip(written, resolved)
        if "\\" in str(entry) and "\\" not in str(path)
    ]
