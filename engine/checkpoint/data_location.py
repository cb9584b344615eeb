"""Stores the location of a checkpoint's data set, and finds it again after one or both have been moved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.files.paths import normal_path, path_of, relative_name


def describe_location(source: str | Path, root: str, folder: str | Path) -> dict[str, str]:
    """Describes a data set's location for a checkpoint: absolute paths, and paths relative to the run's ``folder``.

    ``source`` is the YAML. ``root`` is the folder that its entries are relative to, or "".
    """
    paths = {"source": str(normal_path(source))}
    if root:
        paths["root"] = str(normal_path(root))
    return paths | {f"{name}_from_run": relative_name(path, folder) for name, path in paths.items()}


def stored_location(stored: Mapping[str, Any]) -> dict[str, str]:
    """Returns the entries of `describe_location` that are in ``stored``, a checkpoint's description of its data."""
    names = ("source", "root", "source_from_run", "root_from_run")
    return {name: str(stored[name]) for name in names if name in stored}


def find_location(stored: Mapping[str, Any], checkpoint: str | Path) -> tuple[str, str]:
    """Finds the data set's YAML, and the folder that its entries are relative to, as ``stored`` in ``checkpoint``; ""
    if not stored. A path is looked up as it was stored, then relative to the checkpoint's folder."""
    folder = normal_path(checkpoint).parent
    return _stored_path(stored, "source", folder), _stored_path(stored, "root", folder)


def _stored_path(stored: Mapping[str, Any], name: str, folder: Path) -> str:
    """Returns the stored absolute path, or the one relative to the run's ``folder`` if only that exists."""
    path = str(stored.get(name, ""))
    from_run = str(stored.get(f"{name}_from_run", ""))
    moved = path_of(from_run, folder)
    if path and from_run and not Path(path).exists() and os.path.exists(moved):
        return moved
    return path
