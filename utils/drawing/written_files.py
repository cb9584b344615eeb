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
        self._own: dict[str, tuple[int, int]] = {}

    def add(self, path: Path) -> None:
        """Records a file that was just written. The record is complete also if the process is killed."""
        name, status = path.relative_to(self._folder).as_posix(), path.stat()
        self._own[name] = status.st_size, status.st_mtime_ns
        with open(self._folder / RECORD, "a", encoding="utf-8", opener=open_direct) as record:
            record.write(_line(name, self._own[name]))

    def remove_earlier(self, sources: Iterable[str]) -> None:
        """Removes the files of earlier calls that this call, which must be complete, has not written again.

        All files of an image are kept if one of them was edited since or is one of the ``sources`` of this call.
        """
        if not self._own:
            return
        stale = {name: state for name, state in self._earlier.items() if name not in self._own}
        read = {Path(source).resolve() for source in sources}
        kept = {
            _image(name) for name, state in stale.items() if self._is_edited(name, state) or self._path(name) in read
        }
        removed = [name for name in stale if _image(name) not in kept]
        for name in removed:
            self._path(name).unlink(missing_ok=True)
        for folder in {self._path(name).parent for name in removed} - {self._folder.resolve()}:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        left = {name: state for name, state in stale.items() if _image(name) in kept}
        write_whole(self._folder / RECORD, "".join(_line(*row) for row in (left | self._own).items()))
        if removed:
            get_logger().info("%s: removed %s of earlier calls", self._folder, counted(len(removed), "annotation file"))
        if left:
            get_logger().warning(
                "%s: annotation files of earlier calls that were edited since are kept (first: %s)",
                self._folder,
                next(iter(left)),
            )

    def _path(self, name: str) -> Path:
        return self._folder.resolve() / name

    def _is_edited(self, name: str, state: tuple[int, int]) -> bool:
        """Also of what is behind a link or cannot be looked at."""
        path = self._path(name)
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        is_ours = path.resolve() == path and path.is_file()
        return not is_ours or (status.st_size, status.st_mtime_ns) != state


def _image(name: str) -> str:
    """What the files of one image have in common; a file that describes all images stands for itself."""
    return Path(name).stem if "/" in name else f"/{name}"


def _line(name: str, state: tuple[int, int]) -> str:
    return json.dumps([name, *state]) + "\n"


def _read(record: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times by name; empty without a record. Damaged lines, as of a process that was killed, are skipped."""
    found: dict[str, tuple[int, int]] = {}
    try:
        text = read_text(record) if record.exists() else ""
    except UserError:
        return found
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            name, size, time = json.loads(line)
            parts = Path(name).parts
            if parts and ".." not in parts and not Path(name).is_absolute() and "\0" not in name:
                found[name] = int(size), int(time)
    return found
