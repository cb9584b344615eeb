"""Settings that name files: the same file has other names in another working folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.settings import names_with
from utils.files.paths import normal_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def absolute_paths(config: DataclassInstance) -> dict[str, Any]:
    """Returns the absolute path of each existing file that a setting with ``is_path`` names, by setting. ``data`` may
    also be a folder. Another word without a suffix, such as yolov8n, is left out: it is a name."""
    paths: dict[str, Any] = {}
    for name in names_with(type(config), is_path=True):
        value = getattr(config, name)
        # Not Path.is_file, which raises for a long regular expression.
        is_file = Path(value).suffix != "" and os.path.isfile(value)
        if is_file or (name == "data" and os.path.isdir(value)):
            paths[name] = str(normal_path(value))
    return paths


def is_same_path(first: str, second: str) -> bool:
    """Returns whether two values of a setting name the same file, or are the same name."""
    return first == second or (bool(first and second) and normal_path(first) == normal_path(second))
