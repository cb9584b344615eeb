"""A node's copy of a data set: finds which files are complete, and writes the others.

The folder contains ``tree/``, the copied files; ``<splits>.yaml``, which describes the copy; ``manifest.jsonl``, a line
with stamp and digest for each complete file; and ``synced``, which exists while all files of the manifest are known to
be on the disk. If it is missing, after an interruption, the digests decide which files are complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from data.labels.label_format import FileStamp
from data.staging.file_exchange import Piece, digest_of
from data.staging.plan import StagePlan, from_line, is_under, to_line
from utils.errors import UserError
from utils.files.caches import USABLE_FRACTION, format_bytes
from utils.files.checked_open import check_owner
from utils.files.locks import FileLock
from utils.files.safe_io import write_whole
from utils.logger import progress
from utils.machine.limits import DISK_FULL
from utils.machine.threads import map_ahead
from utils.strings import counted

NODE_NOTE = ".node-"  # prefix of the files by which nodes detect that they use one folder
_READ_BYTES = 4 << 20
_BLOCK = 4096  # disk usage of a file is a multiple of this


class StageCopy:
    """The copy in ``folder``, which is created if necessary. Raises UserError if that is impossible."""

    def __init__(self, folder: Path, plan: StagePlan) -> None:
        self.folder = folder
        self.plan = plan
        self.yaml = folder / plan.yaml_name
        self._root = folder / "tree" / plan.root_in_tree
        self._incoming = folder / "incoming"
        self._synced = folder / "synced"
        self._manifest_path = folder / "manifest.jsonl"
        self._manifest: dict[str, tuple[FileStamp, bytes]] = {}
        self._stamps = [FileStamp(int(s), int(t)) for s, t in zip(plan.sizes, plan.mtimes_ns)]
        self._writing: dict[int, IO[bytes]] = {}
        self._manifest_file: IO[str] | None = None
        with self._explained():
            self._incoming.mkdir(parents=True, exist_ok=True)
            check_owner(folder, os.lstat(folder))

    @contextlib.contextmanager
    def lock(self, *, wait: bool) -> Iterator[None]:
        """Locks the copy. If another run on this node has locked it, waits (``wait``) or raises UserError."""
        lock = FileLock(self.folder / "lock")
        if wait:
            lock.wait(f"another run that copies into {self.folder}")
        elif holder := lock.acquire():
            raise UserError(f"--stage: another run is copying into {self.folder} ({holder}); wait for it")
        try:
            for note in self.folder.glob(f"{NODE_NOTE}*"):  # left by killed processes
                note.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def path(self, name: str) -> str:
        """Path of a file in the copy."""
        return os.path.normpath(os.path.join(self._root, name))

    def complete_files(self, *, show_progress: bool) -> np.ndarray:
        """Which files of the plan are complete, bool (F,), by stamp, and after an interruption by digest, too."""
        self._read_manifest()
        complete = np.array([self._has_stamp(name, stamp) for name, stamp in zip(self.plan.names, self._stamps)], bool)
        doubtful = np.flatnonzero(complete) if not self._synced.exists() else np.empty(0, np.int64)
        if len(doubtful):
            correct = map_ahead(self._has_digest, [self.plan.names[i] for i in doubtful], threads=8)
            title = "checking an interrupted copy"
            complete[doubtful] = list(progress(correct, desc=title, total=len(doubtful), enabled=show_progress))
        return complete

    def _read_manifest(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._manifest_path, encoding="ascii") as file:
            for line in file:
                entry = from_line(line)
                if entry is not None:
                    self._manifest[entry[0]] = entry[1:]

    def _has_stamp(self, name: str, stamp: FileStamp) -> bool:
        if name not in self._manifest or self._manifest[name][0] != stamp:
            return False
        with contextlib.suppress(OSError):
            status = os.stat(self.path(name))
            return (status.st_size, status.st_mtime_ns) == stamp
        return False

    def _has_digest(self, name: str) -> bool:
        try:
            return digest_of(_read_parts(self.path(name))) == self._manifest[name][1]
        except OSError:
            return False

    def check_space(self, missing: np.ndarray) -> None:
        """Raises UserError unless the disk has space for the files ``missing``, bool (F,)."""
        needed = int((-(-self.plan.sizes[missing] // _BLOCK) * _BLOCK).sum()) + 512 * int(missing.sum())
        free = shutil.disk_usage(self.folder).free
        if needed > USABLE_FRACTION * free:
            raise UserError(
                f"--stage: {counted(missing.sum(), 'file')}, {format_bytes(needed)}, to be copied to {self.folder}, "
                f"where {format_bytes(free)} are free; free some space or name another disk"
            )

    def loader(self, local: np.ndarray) -> Callable[[int], Iterator[bytes]]:
        """Returns a function that reads a file of the plan: from this copy if it is ``local``, bool (F,), else from the
        original."""

        def load(item: int) -> Iterator[bytes]:
            name = self.plan.names[item]
            original = os.path.normpath(os.path.join(self.plan.spec.root, name))
            return _read_checked(self.path(name) if local[item] else original, self._stamps[item])

        return load

    def begin(self) -> None:
        """Must be called before `write`. Until `finish` the copy counts as interrupted."""
        with self._explained():
            self._synced.unlink(missing_ok=True)
            shutil.rmtree(self._incoming)
            self._incoming.mkdir()
            lines = [to_line(name, *entry) for name, entry in self._manifest.items()]
            write_whole(self._manifest_path, "".join(lines))  # without incomplete or outdated lines
            self._manifest_file = self._manifest_path.open("a", encoding="ascii", buffering=1)

    def write(self, piece: Piece) -> None:
        """Writes a piece of a missing file. After the last one, the file is moved to its final path."""
        with self._explained():
            temporary = self._incoming / str(piece.item)
            if piece.item not in self._writing:
                self._writing[piece.item] = temporary.open("wb", buffering=0)
            file = self._writing[piece.item]
            view = piece.data
            while len(view):
                view = view[file.write(view) :]
            if not piece.digest:
                return
            file.close()
            del self._writing[piece.item]
            name, stamp = self.plan.names[piece.item], self._stamps[piece.item]
            target = self.path(name)
            os.utime(temporary, ns=(stamp.mtime_ns, stamp.mtime_ns))
            try:
                os.replace(temporary, target)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(temporary, target)
            self._manifest[name] = stamp, piece.digest
            assert self._manifest_file is not None
            self._manifest_file.write(to_line(name, stamp, piece.digest))

    def finish(self) -> None:
        """Removes files that the original no longer has, writes lists and YAML, and marks the copy as synced."""
        with self._explained():
            self._prune()
            for name in self.plan.folders:
                os.makedirs(self.path(name), exist_ok=True)
            for name, text in self.plan.lists.items():
                os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
                write_whole(self.path(name), text.encode("utf-8", "surrogateescape"))
            write_whole(self.yaml, self.plan.yaml_text("tree").encode("utf-8", "surrogateescape"))
            if self._manifest_file is not None:
                self._manifest_file.close()
            if not self._synced.exists():
                os.sync()
                self._synced.touch()

    def _prune(self) -> None:
        wanted = set(self.plan.names)
        for name in [n for n in self._manifest if n not in wanted]:
            if name in self.plan.absent or is_under(name, self.plan.folders):
                Path(self.path(name)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "free some space or name another disk" if error.errno in DISK_FULL else "name a writable folder"
            raise UserError(f"--stage: {error.filename or self.folder}: {error.strerror}; {remedy}") from None


def _read_parts(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            yield part


def _read_checked(path: str, stamp: FileStamp) -> Iterator[bytes]:
    """The bytes of a file; a small file is read at once. Raises UserError if it has changed since it was listed."""
    try:
        file = Path(path).open("rb", buffering=0)  # noqa: SIM115 (a large file is read while it is sent)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    parts = _parts_of(file, path, stamp)
    return iter(list(parts)) if stamp.size <= _READ_BYTES else parts


def _parts_of(file: IO[bytes], path: str, stamp: FileStamp) -> Iterator[bytes]:
    with file:
        try:
            status = os.fstat(file.fileno())
            left = stamp.size if (status.st_size, status.st_mtime_ns) == stamp else -1
            while left > 0:
                part = file.read(min(left, _READ_BYTES))
                if not part:
                    break
                left -= len(part)
                yield part
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if left:
        raise UserError(f"{path}: changed while the data set was being copied; start again")
