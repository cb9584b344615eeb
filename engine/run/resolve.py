"""Resolves the paths in settings, which depend on the working folder.

The paths that a run stores are resolved once, so that a later change of the disk does not change their meaning. A
command is resolved before it is compared with them (`compare_file`).
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from data.source.dataset_spec import DEMO
from data.source.folder import yaml_of_folder
from data.source.open import known_by_name
from engine.checkpoint.description import NamedFiles
from engine.run.run import PATH_SETTINGS, RunSettings, TrainCommand
from models.spec import built_in_models
from models.weights.catalog import catalog_name, known_weights
from utils.config.flags import flag_name
from utils.config.settings import WEIGHTS_SUFFIXES, TrainConfig, names_with
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.checksum import sha256_of
from utils.files.paths import normal_path
from utils.files.url import is_http

ConfigT = TypeVar("ConfigT", bound=TrainConfig)


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


def resolve_command(
    ctx: DistributedContext, typed: TrainConfig, explicit_flags: Collection[str], launchers: list[str]
) -> TrainCommand:
    """Returns the command line whose settings are ``typed``, with absolute paths. The other arguments are those of
    `TrainCommand`."""
    return TrainCommand(
        config=resolve(typed),
        explicit_flags=explicit_flags,
        files=NamedFiles(typed=typed_paths(typed)),
        launchers=launchers,
        world_size=ctx.world_size,
        device_type=ctx.device.type,
    )


def typed_paths(typed: TrainConfig) -> dict[str, str]:
    """Returns, by setting, the absolute paths of what a command line says, whether there are such files or not. "demo",
    which is the built-in data set in each folder, and URLs stay as they are."""
    paths = {}
    for name in sorted(PATH_SETTINGS):
        value = os.path.expanduser(getattr(typed, name))
        if value:
            paths[name] = value if value == DEMO or is_http(value) else str(normal_path(value))
    return paths


def with_checksums(files: NamedFiles, config: TrainConfig, names: Collection[str] = PATH_SETTINGS) -> NamedFiles:
    """Returns ``files`` with the checksums of those that the settings ``names`` of ``config`` (resolved) have now.
    Raises UserError for a file that cannot be read."""
    sha256 = {name: checksum for name, checksum in files.sha256.items() if name not in names}
    for name in sorted(names):
        path = getattr(config, name)
        if name != "data" and os.path.isabs(path) and os.path.isfile(path):
            try:
                sha256[name] = sha256_of(Path(path))
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise UserError(f"{flag_name(name)} {path}: cannot be read ({reason})") from None
    return replace(files, sha256=sha256)


class FileMatch(enum.Enum):
    """How the file that a command names is related to the one that a run has stored for the same setting."""

    SAME = "same"  # the same path, or typed in the same way in the same working folder
    CHANGED = "changed"  # the same file, perhaps by another path, but it has another content now
    MOVED = "moved"  # another path to the same file, or to one of the same content
    BOTH_GONE = "both gone"  # neither exists, so they cannot be compared
    OTHER = "other"


def compare_file(name: str, stored: RunSettings, config: TrainConfig, files: NamedFiles) -> FileMatch:
    """Compares the file that the setting ``name`` of ``config`` means with the one that a run has ``stored``. Does not
    compare the labels of data sets; ended_run.py does.

    ``files``: what was typed for ``config``.
    """
    stored_path = getattr(stored.config, name)
    path = getattr(config, name)
    typed = files.typed.get(name, "")
    is_typed_alike = typed != "" and typed == stored.files.typed.get(name)
    # A folder may have another YAML now, in place of the one that the run has read: another data set, perhaps.
    is_replaced = _is_missing(stored_path) and _is_there(path)
    if path == stored_path or (is_typed_alike and not is_replaced):
        return FileMatch.CHANGED if _has_content(name, stored_path, stored) is False else FileMatch.SAME
    if _is_missing(stored_path) and _is_missing(path):
        return FileMatch.BOTH_GONE
    has_same_content = _has_content(name, path, stored)
    if _is_there(stored_path) and _is_there(path) and os.path.samefile(stored_path, path):
        return FileMatch.CHANGED if has_same_content is False else FileMatch.MOVED
    return FileMatch.MOVED if has_same_content else FileMatch.OTHER


@dataclass(frozen=True, kw_only=True)
class MatchedPaths:
    """The settings of a run, and of a command that continues it, with equal paths where they mean the same file."""

    stored: RunSettings  # of the run; files that have moved have their new paths
    command: TrainCommand  # with the stored paths of the run's other files
    local_paths: frozenset[str]  # settings whose paths are those of the command, which each process resolves itself
    messages: list[str]  # about each file that has changed or can no longer be compared


def match_paths(stored: RunSettings, command: TrainCommand) -> MatchedPaths:
    """Makes the paths of a run and of a command that continues it equal where they mean the same file."""
    moved = []
    kept: dict[str, Any] = {}  # stored paths, by setting
    messages = []
    named = PATH_SETTINGS.intersection(command.explicit_flags)
    for name in sorted(named):
        stored_path = getattr(stored.config, name)
        flag = f"{flag_name(name)} {getattr(command.config, name)}"
        match = compare_file(name, stored, command.config, command.files)
        if match is FileMatch.MOVED:
            moved.append(name)
        elif match is not FileMatch.OTHER:
            kept[name] = stored_path
        if match is FileMatch.CHANGED:
            # Not that this has no effect: a teacher that has changed is refused when it is opened.
            messages.append(
                f"{flag}: has changed since the run began; to use the file as it is now, start a new run with another "
                "--name"
            )
        elif match is FileMatch.BOTH_GONE:
            messages.append(f"{flag}: no such file; the run has {stored_path}, which no longer exists either")
    config = replace(command.config, **kept)
    return MatchedPaths(
        stored=with_paths(stored, moved, command),
        command=replace(command, config=config),
        local_paths=frozenset(name for name in named if getattr(config, name) == getattr(command.config, name)),
        messages=messages,
    )


def with_paths(settings: RunSettings, names: Iterable[str], command: TrainCommand) -> RunSettings:
    """Returns ``settings`` with the paths that the command names for the settings ``names``, and the stored
    checksums."""
    paths = {name: getattr(command.config, name) for name in names}
    typed = {name: command.files.typed.get(name, "") for name in paths}
    files = replace(settings.files, typed=settings.files.typed | typed)
    return replace(settings, config=replace(settings.config, **paths), files=files)


def _has_content(name: str, path: str, stored: RunSettings) -> bool | None:
    """Returns whether the file ``path`` has the content that a run has stored for the setting ``name``; None if that
    is not known."""
    sha256 = stored.files.sha256.get(name)
    if sha256 is None or not os.path.isabs(path) or not os.path.isfile(path):
        return None
    try:
        return sha256_of(Path(path)) == sha256
    except OSError:  # the run may not need the file any more
        return None


def _is_there(value: str) -> bool:
    return os.path.isabs(value) and os.path.exists(value)


def _is_missing(value: str) -> bool:
    return os.path.isabs(value) and not os.path.exists(value)
