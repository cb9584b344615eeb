"""Resolves the paths in settings, which depend on the working folder. Needs no torch.

The settings that a run stores are resolved, and so is a command before it is compared with them: a setting has changed
if the two values differ.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, TypeVar

from data.source.dataset_spec import DEMO
from data.source.folder import yaml_of_folder
from data.source.open import known_by_name
from utils.config.settings import TrainConfig, names_with
from utils.files.paths import normal_path
from utils.files.url import is_http

ConfigT = TypeVar("ConfigT", bound=TrainConfig)


def resolve(config: ConfigT) -> ConfigT:
    """Returns the settings with absolute paths of the files that they name; ``data`` becomes the YAML that is opened.
    Raises UserError for a data set's folder in which several YAMLs describe one."""
    paths: dict[str, Any] = {}
    for name in names_with(type(config), is_path=True):
        paths[name] = resolve_path(name, getattr(config, name))
    return dataclasses.replace(config, **paths)


def resolve_path(name: str, value: str) -> str:
    """Returns the absolute path that ``value`` of the setting ``name`` (with ``is_path``) means. Names of models,
    weights and data sets are returned unchanged, as is any value that is not a path, such as a URL.

    A file need not exist: a run that has ended does not need its data.
    """
    if name == "data":
        return _resolve_data(value)
    if name in ("weights", "teacher"):
        value = os.path.expanduser(value)  # as `fetch_weights` does
    is_name = name == "model" and not Path(value).suffix  # even if a file or folder has this name
    if not value or is_name or is_http(value):
        return value
    # Not Path.is_file, which raises for a long regular expression (``groups``).
    is_path = os.path.isfile(value) or (name != "groups" and Path(value).name != value)
    return str(normal_path(value)) if is_path else value


def _resolve_data(data: str) -> str:
    """Returns the YAML that is opened for ``--data``, or the folder if it has none; "demo" as it is."""
    if data in ("", DEMO):
        return data
    data = known_by_name(data)
    if os.path.isdir(data):
        yaml = yaml_of_folder(normal_path(data))
        return str(normal_path(data) if yaml is None else yaml)
    is_path = os.path.exists(data) or Path(data).name != data or Path(data).suffix != ""
    return str(normal_path(data)) if is_path else data


def has_moved(name: str, before: str, now: str) -> bool:
    """Returns whether two resolved values of the setting ``name`` may refer to one file: by two paths, or because the
    file was moved and the earlier path no longer exists. A data set may have been renamed as well; any other file must
    have kept its name."""
    if os.path.exists(before):
        return os.path.exists(now) and os.path.samefile(before, now)
    if not os.path.isabs(before) or not os.path.exists(now):
        return False
    return name == "data" or Path(before).name == Path(now).name
