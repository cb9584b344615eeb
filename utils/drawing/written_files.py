"""The annotation files that calls of detect.py have written into a folder.

A call with --exist-ok removes those of earlier calls, which would otherwise be mixed with its own, and nothing else: no
file that something else wrote, and no image whose annotations were edited since.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from utils.errors import UserError
from utils.files.checked_open import open_direct
from utils.files.safe_io import read_text, write_whole
from utils.logger import get_logger
from utils.strings import counted

RECORD = ".annotation_files.jsonl"  # in the folder: a line a file, with its path, size and time of modification


class WrittenFiles:
    """The annotation files in ``folder``: those of earlier calls, and those of this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._earlier = _read(folder / RECORD)
        self._own: dict[str, list[int] | None] = {}

    def add(self, path: Path) -> None:
        """Records a file that was just written. The record is complete also if the process is killed."""
        name = path.relative_to(self._folder).as_posix()
        self._own[name] = _state(path.resolve())
        with open(self._folder / RECORD, "a", encoding="utf-8", opener=open_direct) as record:
            record.write(_line(name, self._own[name]))

    def remove_earlier(self, sources: Iterable[str]) -> None:
        """Removes the files of earlier calls that this call, which must be complete, has not written again.

        All files of an image are kept if one of them was edited since or is one of the ``sources`` of this call.
        """
        if not self._own:
            return
        folder, read = self._folder.resolve(), {Path(source).resolve() for source in sources}
        stale = {name: state for name, state in self._earlier.items() if name not in self._own}
        edited = (n for n, state in stale.items() if folder / n in read or _state(folder / n) not in (None, state))
        kept = set(map(_image, edited))
        left = {name: state for name, state in stale.items() if _image(name) in kept}
        for name in stale.keys() - left:
            (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or the folder itself
                (folder / name).parent.rmdir()
        write_whole(self._folder / RECORD, "".join(_line(*row) for row in (left | self._own).items()))
        if removed := len(stale) - len(left):
            get_logger().info("%s: removed %s of earlier calls", self._folder, counted(removed, "annotation file"))
        if left:
            text = "%s: annotation files of earlier calls that were edited since are kept (first: %s)"
            get_logger().warning(text, self._folder, next(iter(left)))


def _image(name: str) -> str:
    """What the files of one image have in common; a file that describes all images stands for itself."""
    return Path(name).stem if "/" in name else f"/{name}"


def _state(path: Path) -> list[int] | None:
    """Size and time of modification of a file; None if there is none, empty for what is behind a link or cannot be
    looked at."""
    try:
        status = path.stat()
        is_plain = path.is_file() and path.resolve() == path
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return []
    return [status.st_size, status.st_mtime_ns] if is_plain else []


def _line(name: str, state: list[int] | None) -> str:
    return json.dumps([name, *(state or ())]) + "\n"


def _read(record: Path) -> dict[str, list[int] | None]:
    """Sizes and times by name; empty without a record. Damaged lines, as of a process that was killed, are skipped."""
    found: dict[str, list[int] | None] = {}
    try:
        text = read_text(record) if record.exists() else ""
    except UserError:
        return found
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            name, size, time = json.loads(line)
            if not Path(name).is_absolute() and ".." not in Path(name).parts:
                found[name] = [size, time]
    return found
