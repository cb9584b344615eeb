"""The weights that a checkpoint's training started from, and their license, as far as this can be known."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from models.weights.download import CATALOG, SUFFIXES, catalog_name, known_weights
from models.weights.read import read_weights
from utils.errors import UserError
from utils.files.folders import cache_folder

UNKNOWN = "unknown"


class Ancestry(NamedTuple):
    """As text; `UNKNOWN` where nothing says."""

    weights: str  # that training started from
    license: str  # of the checkpoint's weights


def ancestry_of(info: Mapping[str, Any], path: Path) -> Ancestry:
    """The ancestry of a checkpoint. Checkpoints that it was trained from are followed as long as their files exist.

    Args:
        info: the checkpoint's content.
        path: its file.
    """
    followed: list[Path] = []
    while True:
        config = info.get("config")
        if not config:  # no run of this program wrote it
            weights, license = _public_file(path, str(path))
            break
        start = str(config.get("weights") or "")
        if not start:
            weights, license = "random weights", "yours to choose (trained from random weights)"
            break
        path = _file_of(start)
        content = _own_content(path)
        if content is None:
            weights, license = _public_file(path, start)
            break
        if path.resolve() in followed:  # written over since
            weights, license = UNKNOWN, UNKNOWN
            break
        followed.append(path.resolve())
        info = content
    return Ancestry(", trained from ".join([*(path.name for path in followed), weights]), license)


def _file_of(start: str) -> Path:
    """The file that ``--weights`` named; if there is none, the one that was downloaded under this name."""
    path, downloads = Path(os.path.expanduser(start)), cache_folder() / "weights"
    candidates = [path, *(downloads / f"{catalog_name(start)}{suffix}" for suffix in SUFFIXES)]
    return next((candidate for candidate in candidates if candidate.is_file()), path)


def _own_content(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint of this program; None for any other file."""
    try:
        stored = read_weights(path) if path.is_file() else None
    except UserError:
        return None
    return stored.content if stored is not None and stored.is_ours else None


def _public_file(path: Path, given: str) -> Ancestry:
    """What configs/weights.yaml says of a file, by its checksum, or by its name if it cannot be checked.

    Args:
        path: the file, which may be missing.
        given: its name or path, as the user gave it.
    """
    entries = known_weights(CATALOG)
    digest = ""
    if path.is_file():
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    for name, entry in entries.items():
        if digest and entry.sha256.lower() == digest:
            return Ancestry(f"{name}, a public file", entry.license)
    file_name = Path(given).name
    entry = entries.get(catalog_name(file_name))
    if entry is None or (digest and entry.sha256):  # another file of this name
        return Ancestry(f"{file_name}, a file of unknown origin", UNKNOWN)
    return Ancestry(file_name, f"{entry.license}, if it was the public file of this name")
