"""The classes of the file formats, by name, and the format of a path. Needs no torch, except to load a class."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.export_formats import EXPORT_FORMATS

if TYPE_CHECKING:
    from engine.formats.model_format import ModelFormat


def load_format(name: str) -> ModelFormat:
    """Imports and returns the format ``name``, a key of `EXPORT_FORMATS`."""
    module, _, class_name = EXPORT_FORMATS[name].implementation.rpartition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), class_name)()


def format_of(path: str | Path) -> str | None:
    """Returns the format of an exported file or folder, by its name, or for a folder by the files in it; None for other
    paths, such as checkpoints."""
    path = Path(os.path.expanduser(path))
    is_folder = os.path.isdir(path)  # also False for a name that is too long for the system
    for name, entry in EXPORT_FORMATS.items():
        if is_folder:
            matches = entry.member and (path.name.endswith(entry.suffix) or _holds_model(path, entry.member))
        else:
            matches = path.name.lower().endswith(entry.member or entry.suffix)
        if matches:
            return name
    return None


def _holds_model(folder: Path, member: str) -> bool:
    """Returns whether a file whose name ends with ``member`` has weights beside it: other programs also write .xml
    files, such as annotations."""
    return any(file.with_suffix(".bin").is_file() for file in folder.glob(f"*{member}"))


def folder_of(path: Path) -> Path:
    """Returns the folder that export.py wrote if ``path`` is a file in it, otherwise ``path``."""
    name = format_of(path)
    is_member = name is not None and EXPORT_FORMATS[name].member and not path.is_dir()
    return path.parent if is_member and (path.parent / "metadata.yaml").is_file() else path
