"""The files that a source names: an image, a video, a folder, a glob or a list of files.

Webcams and streams, which have no files, are recognized by their names alone.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from data.images.kinds import ARRAY_SUFFIX, IMAGE_SUFFIXES, unread_reason
from utils.errors import UserError, os_reason
from utils.files.safe_io import read_text
from utils.strings import counted

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".ts", ".gif"})
STREAM_SCHEMES = frozenset({"rtsp", "rtsps", "rtmp", "http", "https", "udp", "tcp", "srt"})


def check_source(source: str) -> None:
    """Raises UserError for files that `open_source` refuses for any pixel format. Opens no webcams and streams."""
    source_files(source)


def source_files(source: str) -> list[Path]:
    """Lists the files that `open_source` reads, for any pixel format; none of a webcam or a stream. Raises
    UserError."""
    if is_stream(source):
        return []
    files, _ = list_files(source, IMAGE_SUFFIXES | {ARRAY_SUFFIX})
    return files


def is_stream(source: str) -> bool:
    scheme, separator, _ = source.partition("://")
    return is_webcam(source) or (bool(separator) and scheme.lower() in STREAM_SCHEMES)


def is_webcam(source: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,9}", source))


def list_files(
    source: str, image_suffixes: frozenset[str], order: Callable[[Path], Any] | None = None
) -> tuple[list[Path], list[str]]:
    """Lists the images and videos that ``source`` names, at least one; and other images, as `unread_summary` takes
    them. ``order``: key for sorting the files of folders and globs; None: by name. Raises UserError."""
    if not source.strip():
        raise UserError("--source: is empty; name an image, folder, glob, video, list, webcam or URL")
    path = Path(os.path.expanduser(source))
    suffixes = image_suffixes | VIDEO_SUFFIXES
    try:
        is_file = path.is_file()
    except OSError as error:
        raise UserError(f"{source}: {os_reason(error)}") from None
    if is_file:
        return _file_or_list(path, source, suffixes), []
    if path.is_dir():
        entries = list(path.iterdir())
        reason_if_empty = "no image or video in this folder"
        if any(entry.is_dir() for entry in entries):
            reason_if_empty += f" (use a glob for its subfolders: {source}/**/*)"
    elif any(sign in source for sign in "*?["):
        entries = _matches(path)
        reason_if_empty = "the pattern matches no image or video"
    else:
        raise _missing_source(path, source)
    files, unread = _select_files(entries, suffixes, order)
    if not files:
        if unread:
            reason_if_empty += f"; {unread_summary(unread)}"
        raise UserError(f"{source}: {reason_if_empty}")
    return files, unread


def _file_or_list(path: Path, source: str, suffixes: frozenset[str]) -> list[Path]:
    """Returns the file ``path``, or the files that it lists."""
    if path.suffix.lower() == ".txt":
        return _read_list(path, suffixes)
    _check_suffix(path, source, suffixes)
    return [path]


def _missing_source(path: Path, source: str) -> UserError:
    """Returns the error for a source that is neither a file nor a folder nor a glob."""
    if path.exists():
        return UserError(f"{source}: is a pipe or device, not a file; cameras are named by their numbers: 0, 1, ...")
    expected = "a source is an image, folder, glob, video, list, webcam or URL"
    return UserError(f"{source}: no such file or folder; {expected}")


def _select_files(
    paths: Iterable[Path], suffixes: frozenset[str], order: Callable[[Path], Any] | None
) -> tuple[list[Path], list[str]]:
    """Selects the files with one of ``suffixes``, sorted; and other images, as `unread_summary` takes them."""
    files: list[Path] = []
    unread: list[str] = []
    for path in sorted((path for path in paths if not path.is_dir()), key=order):
        if path.suffix.lower() in suffixes:
            files.append(path)  # a broken link is reported later, like any file that cannot be read
            continue
        reason = unread_reason(path)
        if reason:
            unread.append(f"{path}: {reason}")
    return files, unread


def unread_summary(unread: Sequence[str]) -> str:
    """Returns a line about images that are not read. ``unread``: path and reason of each."""
    return f"{counted(len(unread), 'file')} left out, first {unread[0]}"


def _matches(pattern: Path) -> list[Path]:
    """Lists the files that a glob matches.

    Brackets may belong to names, as in ``videos [2024]/*.mp4``: leading folders that exist as written are taken
    literally, and so are all brackets if nothing matches.
    """
    folder = next(path for path in pattern.parents if path.is_dir())
    relative = str(pattern.relative_to(folder))
    for candidate in (relative, relative.replace("[", "[[]")):
        matches = glob.glob(os.path.join(glob.escape(str(folder)), candidate), recursive=True)
        if matches:
            return [Path(match) for match in matches]
    return []


def _read_list(path: Path, suffixes: frozenset[str]) -> list[Path]:
    """Reads a .txt list of files. Raises UserError, with the line."""
    files: dict[Path, None] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name = line.strip()
        if name:
            file = path.parent / os.path.expanduser(name)
            if not os.path.isfile(file):  # also False for a name that is too long for the system
                raise UserError(f"{path}:{number}: {name}: no such file")
            _check_suffix(file, f"{path}:{number}: {name}", suffixes)
            files[file] = None
    if not files:
        raise UserError(f"{path}: the list names no file")
    return list(files)


def _check_suffix(path: Path, location: str, suffixes: frozenset[str]) -> None:
    """Raises UserError, which begins with ``location``, unless ``path`` has one of the ``suffixes``."""
    if path.suffix.lower() not in suffixes:
        reason = unread_reason(path) or f"'{path.suffix}' is not the suffix of an image or a video"
        raise UserError(f"{location}: {reason}")


def by_number(path: Path) -> list[tuple[str, int]]:
    """Returns a key for sorting: the text before each number of the path, and the number."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(text, int(number)) for text, number in zip(parts[::2], [*parts[1::2], "0"])]


def sequence_of(path: Path) -> str:
    """Returns the sequence of a file: each video is a sequence, and so are the images of each folder."""
    return str(path) if path.suffix.lower() in VIDEO_SUFFIXES else os.path.abspath(path.parent)


def by_sequence(files: Sequence[Path]) -> list[Path]:
    """Puts the files of each sequence together, at the place of the first of them."""
    groups: dict[str, list[Path]] = {}
    for path in files:
        groups.setdefault(sequence_of(path), []).append(path)
    return [path for group in groups.values() for path in group]
