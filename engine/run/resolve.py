"""Resolves the paths in settings, which depend on the working folder.

The paths that a run stores are resolved once, so that a later change of the disk does not change their meaning. A
command is resolved before it is compared with them. It names the same file as the run (`follow`)

- if it was typed in the same way in the same working folder, or if the paths are equal, even if the file is missing,
- if both paths lead to one file, or to files of the same content (the run has stored its checksum),
- if neither file exists any more, so that nothing can be compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from data.source.dataset_spec import DEMO
from data.source.folder import yaml_of_folder
from data.source.open import known_by_name
from engine.checkpoint.description import NamedFiles
from engine.run.run import RunSettings, TrainCommand
from models.spec import built_in_models
from models.weights.catalog import catalog_name, known_weights
from utils.config.flags import flag_name
from utils.config.settings import WEIGHTS_SUFFIXES, Hyperparameters, TrainConfig, names_with
from utils.errors import UserError
from utils.files.checksum import sha256_of
from utils.files.paths import normal_path
from utils.files.url import is_http

ConfigT = TypeVar("ConfigT", bound=TrainConfig)

_RUN_PATHS = names_with(TrainConfig, is_path=True)


def resolve(config: ConfigT) -> ConfigT:
    """Returns the settings with absolute paths of the files that they name; ``data`` becomes the YAML that is opened.

    A file need not exist: a run that has ended does not need its data.
    """
    paths: dict[str, Any] = {}
    for name in names_with(type(config), is_path=True):
        paths[name] = resolve_path(name, getattr(config, name))
    return replace(config, **paths)


def resolve_path(name: str, value: str) -> str:
    """Returns the absolute path that ``value`` of the setting ``name`` (with ``is_path``) means. Names of models,
    weights and data sets are returned unchanged, as is any value that is not a path, such as a URL."""
    if name == "data":
        return _resolve_data(value)
    if name in ("weights", "teacher"):
        value = os.path.expanduser(value)  # as `fetch_weights` does
    is_name = name == "model" and not Path(value).suffix  # even if a file or folder has this name
    if not value or is_name or is_http(value):
        return value
    # Not Path.is_file, which raises for a long regular expression (``groups``).
    is_path = os.path.isfile(value) or (name != "groups" and (Path(value).name != value or _is_file_name(name, value)))
    return str(normal_path(value)) if is_path else value


def _is_file_name(name: str, value: str) -> bool:
    """Returns whether a name without a folder can only mean a file of the working folder, which may have gone."""
    suffix = Path(value).suffix.lower()
    if name == "model":
        return suffix in (".yaml", ".yml") and re.sub("[-_]", "", Path(value).stem) not in built_in_models()
    return suffix in WEIGHTS_SUFFIXES and catalog_name(value) not in known_weights()


def _resolve_data(data: str) -> str:
    """Returns the YAML that is opened for ``--data``, or the folder if it has none; "demo" and URLs, which are refused
    later, as they are."""
    if data in ("", DEMO) or is_http(data):
        return data
    path = normal_path(known_by_name(data))
    yaml = None
    if os.path.isdir(path):  # Path.is_dir raises without permission
        try:
            yaml = yaml_of_folder(path)
        except UserError:  # several YAMLs, or a damaged one: whoever opens the folder says so
            yaml = None
    return str(path if yaml is None else yaml)


def settings_as_stored(config: TrainConfig, hyp: Hyperparameters, files: NamedFiles) -> RunSettings:
    """Returns stored settings, whose paths stay as they are. Only those of an earlier version, which has stored what
    was typed, are resolved."""
    if not files.typed:
        config = resolve(config)
        files = NamedFiles(typed=typed_paths(config))
    return RunSettings(config, hyp, files)


def typed_paths(typed: TrainConfig) -> dict[str, str]:
    """Returns, by setting, the absolute paths of what a command line says, whether there are such files or not. "demo",
    which is the built-in data set in each folder, and URLs stay as they are."""
    paths = {}
    for name in sorted(_RUN_PATHS):
        value = os.path.expanduser(getattr(typed, name))
        if value:
            paths[name] = value if value == DEMO or is_http(value) else str(normal_path(value))
    return paths


def with_checksums(files: NamedFiles, config: TrainConfig, names: Collection[str] = _RUN_PATHS) -> NamedFiles:
    """Returns ``files`` with the checksums of those that the settings ``names`` of ``config`` (resolved) have now."""
    sha256 = {name: checksum for name, checksum in files.sha256.items() if name not in names}
    for name in sorted(names):
        path = getattr(config, name)
        if name != "data" and os.path.isabs(path) and os.path.isfile(path):
            sha256[name] = sha256_of(Path(path))
    return replace(files, sha256=sha256)


def follow(stored: RunSettings, command: TrainCommand) -> tuple[RunSettings, TrainCommand, list[str]]:
    """Makes the paths of a run and of a command that continues it equal where they mean the same file.

    Returns the settings ``stored`` with files that have moved at their new paths, the command with the stored paths of
    the others, and a warning for each file that can no longer be compared.
    """
    warnings = []
    for name in sorted(_RUN_PATHS.intersection(command.explicit_flags)):
        before = getattr(stored.config, name)
        now = getattr(command.config, name)
        has_gone = _is_missing(before)
        if has_gone and _is_missing(now) and not _is_repeated(name, stored, command.files) and before != now:
            warnings.append(f"{flag_name(name)} {now}: no such file; the run has {before}, which has gone, too")
            is_same = True
        else:
            is_same = means_same_file(name, stored, command.config, command.files)
        if not is_same:
            continue
        has_moved = now != before and (has_gone or not _is_repeated(name, stored, command.files))
        if has_moved and _is_there(now):
            stored = with_path(stored, name, command)
        else:
            command = replace(command, config=replace(command.config, **{name: before}))
    return stored, command, warnings


def with_path(settings: RunSettings, name: str, command: TrainCommand) -> RunSettings:
    """Returns ``settings`` with the file that the command names for the setting ``name``."""
    config = replace(settings.config, **{name: getattr(command.config, name)})
    typed = {**settings.files.typed, name: command.files.typed.get(name, "")}
    files = with_checksums(replace(settings.files, typed=typed), config, (name,))
    return replace(settings, config=config, files=files)


def means_same_file(name: str, stored: RunSettings, config: TrainConfig, files: NamedFiles) -> bool:
    """Returns whether the setting ``name`` of ``config``, of which ``files`` says what was typed, means the file that a
    run has ``stored``. The labels of a data set at another path are not compared here (same_labels.py)."""
    before = getattr(stored.config, name)
    now = getattr(config, name)
    if now == before or _is_repeated(name, stored, files):
        return True
    if not _is_there(now):
        return False
    if _is_there(before) and os.path.samefile(before, now):
        return True
    sha256 = stored.files.sha256.get(name)
    return sha256 is not None and os.path.isfile(now) and sha256_of(Path(now)) == sha256


def _is_repeated(name: str, stored: RunSettings, files: NamedFiles) -> bool:
    """Returns whether the setting was typed in the same way, in the same working folder."""
    before = getattr(stored.config, name)
    typed = files.typed.get(name, "")
    return typed != "" and typed == stored.files.typed.get(name, before)


def _is_there(value: str) -> bool:
    return os.path.isabs(value) and os.path.exists(value)


def _is_missing(value: str) -> bool:
    return os.path.isabs(value) and not os.path.exists(value)
