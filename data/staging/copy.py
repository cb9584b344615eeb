"""A node's copy of a data set: finds which files are complete, and writes the others.

The folder contains ``tree/``, the copied files, and ``<splits>.yaml``, which describes the copy. A file is written in
``incoming/`` and moved to the tree when its bytes are known to be on the disk, so a file in the tree that has the
original's size and modification time is complete, also after a crash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data.image_io.decode import image_suffixes
from data.labels.label_format import FileStamp
from data.staging.plan import StagePlan
from utils.errors import UserError
from utils.files.folders import USABLE_FRACTION
from utils.files.locks import FileLock
from utils.files.safe_io import write_whole
from utils.machine.limits import DISK_FULL
from utils.strings import counted, format_bytes

_SYNC_EVERY_S = 10.0  # what a killed process loses
_BLOCK = 4096  # disk usage of a file is a multiple of this


class StageCopy:
    """The copy in ``folder``, which is created if necessary. Raises UserError if that is impossible."""

    def __init__(self, folder: Path, plan: StagePlan) -> None:
        self.folder = folder
        self.plan = plan
        self.yaml = folder / plan.yaml_name
        self._root = folder / "tree" / plan.root_in_tree
        self._incoming = folder / "incoming"
        self._stamps = [FileStamp(int(s), int(t)) for s, t in zip(plan.sizes, plan.mtimes_ns)]
        self._written: list[int] = []  # whole files in ``incoming``
        self._synced_at = time.monotonic()
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self, *, wait: bool) -> Iterator[None]:
        """Locks the copy. If another run, or another node of this one, has locked it, waits (``wait``) or raises
        UserError."""
        lock = FileLock(self.folder / "lock")
        if wait:
            lock.wait(f"another run that copies into {self.folder}")
        elif holder := lock.acquire():
            remedy = "name a folder on a local disk of each node, or use {node_rank} in the name; or wait for that run"
            raise UserError(f"--stage: another node or run is copying into {self.folder} ({holder}); {remedy}")
        try:
            with self._explained():
                shutil.rmtree(self._incoming, ignore_errors=True)
                self._incoming.mkdir()
            try:
                yield
            finally:  # also if another node has failed
                self._move_written()
        finally:
            lock.release()

    def path(self, name: str) -> str:
        """Path of a file in the copy."""
        return os.path.normpath(os.path.join(self._root, name))

    def complete_files(self) -> np.ndarray:
        """Which files of the plan are complete, bool (F,)."""

        def is_complete(name: str, stamp: FileStamp) -> bool:
            with contextlib.suppress(OSError):
                status = os.stat(self.path(name))
                return (status.st_size, status.st_mtime_ns) == stamp
            return False

        return np.array(list(map(is_complete, self.plan.names, self._stamps)), bool)

    def check_space(self, missing: np.ndarray) -> None:
        """Raises UserError unless the disk has space for the files ``missing``, bool (F,)."""
        needed = int((-(-self.plan.sizes[missing] // _BLOCK) * _BLOCK).sum()) + 512 * int(missing.sum())
        free = shutil.disk_usage(self.folder).free
        if needed > USABLE_FRACTION * free:
            raise UserError(
                f"--stage: copying {counted(missing.sum(), 'file')} to {self.folder} needs {format_bytes(needed)}, "
                f"but only {format_bytes(free)} is free; free some space or name another disk"
            )

    def loader(self, local: np.ndarray) -> Callable[[int], bytes]:
        """Returns a function that reads a file of the plan: from this copy if it is ``local``, bool (F,), else from the
        original."""

        def load(item: int) -> bytes:
            name = self.plan.names[item]
            original = os.path.normpath(os.path.join(self.plan.spec.root, name))
            return _read_checked(self.path(name) if local[item] else original, self._stamps[item])

        return load

    def write(self, item: int, data: memoryview) -> None:
        """Writes a missing file."""
        with self._explained():
            path = self._incoming / str(item)
            path.write_bytes(data)
            os.utime(path, ns=(self._stamps[item].mtime_ns,) * 2)
            self._written.append(item)
        if time.monotonic() - self._synced_at > _SYNC_EVERY_S:
            self._move_written()

    def _move_written(self) -> None:
        with self._explained():
            if self._written:
                os.sync()
            while self._written:
                item = self._written.pop()
                target = self.path(self.plan.names[item])
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(self._incoming / str(item), target)
            self._synced_at = time.monotonic()

    def finish(self) -> None:
        """Removes images and labels that the original no longer has, and writes lists and YAML."""
        self._move_written()
        with self._explained():
            for name in self.plan.absent:
                Path(self.path(name)).unlink(missing_ok=True)
            wanted = set(map(self.path, self.plan.names))
            for folder in map(self.path, self.plan.folders):
                os.makedirs(folder, exist_ok=True)
                for parent, _, files in os.walk(folder):
                    for path in (os.path.join(parent, name) for name in files if self._is_image(name)):
                        if path not in wanted:
                            os.unlink(path)
            for name, text in self.plan.lists.items():
                os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
                write_whole(self.path(name), text.encode("utf-8", "surrogateescape"))
            write_whole(self.yaml, self.plan.yaml_text("tree").encode("utf-8", "surrogateescape"))

    def _is_image(self, name: str) -> bool:
        return os.path.splitext(name)[1].lower() in image_suffixes(self.plan.spec.pixels)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "free some space or name another disk" if error.errno in DISK_FULL else "name a writable folder"
            raise UserError(f"--stage: {error.filename or self.folder}: {error.strerror}; {remedy}") from None


def _read_checked(path: str, stamp: FileStamp) -> bytes:
    """The content of a file. Raises UserError if it has changed since it was listed."""
    try:
        with open(path, "rb", buffering=0) as file:
            status, data = os.fstat(file.fileno()), file.readall()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if (status.st_size, status.st_mtime_ns) != stamp or len(data) != stamp.size:
        raise UserError(f"{path}: changed while the data set was being copied; start again")
    return data
