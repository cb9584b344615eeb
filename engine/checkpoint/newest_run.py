"""Tells whether a checkpoint is from the newest run in its folder, or from an earlier run that used the same folder
(``--exist-ok``).

Each run has a random id, which all of its checkpoints store. settings.yaml stores the id of the folder's newest run:
the one that has claimed the folder last, by beginning or by continuing there.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import yaml

from utils.config.yaml_files import parse_yaml
from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.files.torch_file import read_checkpoint

_MAX_SETTINGS_BYTES = 1 << 26


def new_run_id() -> str:
    """Returns the id of a new run: 16 hex digits. It neither depends on the seed nor advances any random generator."""
    return secrets.token_hex(8)


def newest_run_id(folder: Path) -> str | None:
    """Returns the id of the newest run in ``folder``; None if there is no settings.yaml, or a damaged one."""
    stored = read_settings_yaml(folder)
    run_id = None if stored is None else stored.get("run_id")
    return run_id if isinstance(run_id, str) else None


def read_settings_yaml(folder: Path) -> dict[str, Any] | None:
    """Returns the content of settings.yaml, unchecked; None if there is none, or a damaged one."""
    try:
        stored = parse_yaml(read_text(folder / "settings.yaml", _MAX_SETTINGS_BYTES))
    except (UserError, yaml.YAMLError, ValueError, RecursionError):
        return None
    return stored if isinstance(stored, dict) else None


def run_id_of(checkpoint: Path) -> str | None:
    """Returns the id of the run that wrote the file ``checkpoint``; "" if no run did (tools.weights also writes such
    files); None if the file is missing or damaged. Reads no tensors."""
    try:
        stored = read_checkpoint(checkpoint, verify=False).get("run_id")
    except UserError:
        return None
    if stored is None:
        return ""
    return stored if isinstance(stored, str) else None


def is_of_earlier_run(checkpoint: Path) -> bool:
    """Returns True if the file ``checkpoint`` is from an earlier run than the newest one in its folder, or from none.
    Returns False if the file or settings.yaml is missing or damaged: reading it later reports why."""
    newest = newest_run_id(checkpoint.parent)
    if newest is None:
        return False
    return run_id_of(checkpoint) not in (None, newest)


def checkpoint_of_newest_run(folder: Path) -> Path | None:
    """Returns the last.pt that the newest run in ``folder`` has saved, or None."""
    return _file_of_newest_run(folder / "last.pt")


def best_of_newest_run(folder: Path) -> Path | None:
    """Returns the best.pt that the newest run in ``folder`` has saved, or None."""
    return _file_of_newest_run(folder / "best.pt")


def _file_of_newest_run(checkpoint: Path) -> Path | None:
    return checkpoint if checkpoint.is_file() and not is_of_earlier_run(checkpoint) else None
