"""Compares the files that a command names with those that the run which it continues has stored."""

from __future__ import annotations

import enum
import os
from pathlib import Path

from engine.checkpoint.description import NamedFiles
from engine.run.run import RunSettings
from utils.config.settings import TrainConfig
from utils.files.checksum import sha256_of


class FileMatch(enum.Enum):
    """How the file that a command names relates to the one that the run has stored for the same setting."""

    SAME = "same"  # the same path, or typed in the same way in the same working folder
    CHANGED = "changed"  # the same file, perhaps by another path, with changed content
    MOVED = "moved"  # another path to the same file, or to one of the same content
    BOTH_MISSING = "both missing"  # neither exists, so they cannot be compared
    OTHER = "other"

    @property
    def is_same_file(self) -> bool:
        """True if the file is the stored one, and has not changed."""
        return self in (FileMatch.SAME, FileMatch.MOVED)

    @property
    def keeps_stored_path(self) -> bool:
        """True if the run keeps the path that it has stored, whatever the command names."""
        return self in (FileMatch.SAME, FileMatch.CHANGED, FileMatch.BOTH_MISSING)


class _Content(enum.Enum):
    """The content of a file, compared with what a run has stored."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"  # no checksum is stored, or the file cannot be read


def compare_file(name: str, stored: RunSettings, config: TrainConfig, files: NamedFiles) -> FileMatch:
    """Compares the file that the setting ``name`` of ``config`` means with the one that a run has ``stored``. Does not
    compare the labels of data sets; ended_run.py does.

    ========================================= ============ ============ ============
    the path of the command, and its content: same         unknown      other
    ========================================= ============ ============ ============
    the stored path, or typed in the same way SAME         SAME         CHANGED
    no file, and none at the stored path      BOTH_MISSING BOTH_MISSING BOTH_MISSING
    another path to the stored file           MOVED        MOVED        CHANGED
    another file                              MOVED        OTHER        OTHER
    ========================================= ============ ============ ============

    ``files``: what was typed for ``config``.
    """
    stored_path = getattr(stored.config, name)
    path = getattr(config, name)
    typed = files.typed.get(name, "")
    is_typed_alike = typed != "" and typed == stored.files.typed.get(name)
    # A folder may have another YAML now, in place of the one that the run has read: another data set, perhaps.
    is_replaced = _is_missing(stored_path) and _exists(path)
    if path == stored_path or (is_typed_alike and not is_replaced):
        is_changed = _compare_content(name, stored_path, stored) is _Content.OTHER
        return FileMatch.CHANGED if is_changed else FileMatch.SAME
    if _is_missing(stored_path) and _is_missing(path):
        return FileMatch.BOTH_MISSING
    content = _compare_content(name, path, stored)
    if _exists(stored_path) and _exists(path) and os.path.samefile(stored_path, path):
        return FileMatch.CHANGED if content is _Content.OTHER else FileMatch.MOVED
    return FileMatch.MOVED if content is _Content.SAME else FileMatch.OTHER


def _compare_content(name: str, path: str, stored: RunSettings) -> _Content:
    """Compares the content of the file ``path`` with what a run has stored for the setting ``name``."""
    sha256 = stored.files.sha256.get(name)
    if sha256 is None or not os.path.isabs(path) or not os.path.isfile(path):
        return _Content.UNKNOWN
    try:
        return _Content.SAME if sha256_of(Path(path)) == sha256 else _Content.OTHER
    except OSError:  # the run may not need the file any more
        return _Content.UNKNOWN


def _exists(value: str) -> bool:
    """Returns whether ``value`` is the path of a file that exists; False for a name, such as "demo"."""
    return os.path.isabs(value) and os.path.exists(value)


def _is_missing(value: str) -> bool:
    """Returns whether ``value`` is a path at which no file exists; False for a name, such as "demo"."""
    return os.path.isabs(value) and not os.path.exists(value)
