"""Where a checkpoint's data set is: stored so that it is found from any working folder, and after run and data have
moved together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe_location(source: str | Path, root: str, folder: str | Path) -> dict[str, str]:
    """What a checkpoint keeps: absolute paths, and the same as seen from the run's folder.

    Args:
        source: the data set's YAML.
        root: the folder that its entries are relative to; "" to leave it out.
        folder: of the run.
    """
    places = {"source": os.path.abspath(source)} | ({"root": os.path.abspath(root)} if root else {})
    return places | {f"{name}_from_run": os.path.relpath(path, folder) for name, path in places.items()}


def find_location(stored: Mapping[str, Any], checkpoint: str | Path) -> tuple[str, str]:
    """The data set's YAML and the folder that its entries are relative to, as far as the checkpoint tells ("" if not).

    A path is looked up as it was stored, then from the checkpoint's folder. Earlier checkpoints hold the YAML as the
    command line named it: relative paths are looked up from here, then from the folders above the checkpoint.

    Args:
        stored: a checkpoint's ``data``.
        checkpoint: its path.
    """
    folder = Path(checkpoint).absolute().parent
    return _find(stored, "source", folder), _find(stored, "root", folder)


def _find(stored: Mapping[str, Any], name: str, folder: Path) -> str:
    path, from_run = str(stored.get(name, "")), str(stored.get(f"{name}_from_run", ""))
    if not path or Path(path).exists():
        return path
    candidates = [folder / from_run] if from_run else []
    if not Path(path).is_absolute():
        candidates += [above / path for above in folder.parents]
    return next((os.path.normpath(candidate) for candidate in candidates if candidate.exists()), path)
