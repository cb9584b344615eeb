"""Compares the files that a command names with those that the run which it continues has stored."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.description import NamedFiles
from engine.run.run import PATH_SETTINGS, RunSettings, TrainCommand
from utils.config.flags import flag_name
from utils.config.settings import TrainConfig
from utils.files.checksum import sha256_of


class FileMatch(enum.Enum):
    """The relation of the file that a command names to the one that a run has stored for the same setting."""

    SAME = "same"  # the same path, or typed in the same way in the same working folder
    CHANGED = "changed"  # the same file, perhaps by another path, with changed content
    MOVED = "moved"  # another path to the same file, or to one of the same content
    BOTH_GONE = "both gone"  # neither exists, so they cannot be compared
    OTHER = "other"

    @property
    def is_same_file(self) -> bool:
        """True if the file is the stored one, and has not changed."""
        return self in (FileMatch.SAME, FileMatch.MOVED)


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
    is_replaced = _has_gone(stored_path) and _exists(path)
    if path == stored_path or (is_typed_alike and not is_replaced):
        return FileMatch.CHANGED if _has_content(name, stored_path, stored) is False else FileMatch.SAME
    if _has_gone(stored_path) and _has_gone(path):
        return FileMatch.BOTH_GONE
    has_same_content = _has_content(name, path, stored)
    if _exists(stored_path) and _exists(path) and os.path.samefile(stored_path, path):
        return FileMatch.CHANGED if has_same_content is False else FileMatch.MOVED
    return FileMatch.MOVED if has_same_content else FileMatch.OTHER


@dataclass(frozen=True, kw_only=True)
class MatchedPaths:
    """The settings of a run, and of a command that continues it, with equal paths where they mean the same file."""

    stored: RunSettings  # settings of the run; files that have moved have their new paths
    command: TrainCommand  # with the stored paths of the run's other files
    local_paths: frozenset[str]  # settings whose paths are those of the command, which each process resolves itself
    messages: list[str]  # a message for each file that has changed or can no longer be compared


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
            # The message does not say that the change has no effect: a changed teacher is refused when it is opened.
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


def _exists(value: str) -> bool:
    """Returns whether ``value`` is the path of a file that exists; False for a name, such as "demo"."""
    return os.path.isabs(value) and os.path.exists(value)


def _has_gone(value: str) -> bool:
    """Returns whether ``value`` is a path at which no file exists; False for a name, such as "demo"."""
    return os.path.isabs(value) and not os.path.exists(value)
