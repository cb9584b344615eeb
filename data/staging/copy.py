"""A node's copy of a data set: which of its files are whole, and how they are written.

Layout of the folder: ``tree/`` the mirrored files; ``<splits>.yaml`` to open it with; ``manifest.jsonl`` a line for
each file that was written whole, with its stamp and digest; ``synced``, present while everything in the manifest is
known to have reached the disk. Without it (an interrupted copy) the digests decide which files are whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from data.labels.label_format import FileStamp
from data.staging.plan import StagePlan, from_line, is_under, to_line
from utils.distributed.file_exchange import Piece, digest_of
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.logger import progress
from utils.threads import map_ahead

NODE_NOTE = ".node-"  # beginning of the names of notes by which nodes find out that they share the folder
_READ_BYTES = 4 << 20
_BLOCK = 4096  # what a file occupies is rounded up to this


class StageCopy:
    """The copy in ``folder``, made if it is not there. Raises UserError when it cannot be."""

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
        self._log: IO[str] | None = None
        with self._failures():
            self._incoming.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self, *, patient: bool) -> Iterator[None]:
        """Keeps other runs on this node out of the copy; waits for one that is at it if ``patient``, else UserError."""
        lock = FileLock(self.folder / "lock")
        if patient:
            lock.wait(f"another run that copies into {self.folder}")
        elif holder := lock.acquire():
            raise UserError(f"--stage: another run is copying into {self.folder} ({holder}); wait for it")
        try:
            for note in self.folder.glob(f"{NODE_NOTE}*"):  # of processes that were killed
                note.unlink(missing_ok=True)
            yield
        finally:
            lock.release()

    def path(self, name: str) -> str:
        """Where the file of that name is in the copy."""
        return os.path.normpath(os.path.join(self._root, name))

    def held(self, *, show_progress: bool) -> np.ndarray:
        """Which of the plan's files are here and whole, bool (F,): by stamps, after an interruption by digests too."""
        self._read_manifest()
        held = np.array([self._looks_whole(name, stamp) for name, stamp in zip(self.plan.names, self._stamps)], bool)
        doubtful = np.flatnonzero(held) if not self._synced.exists() else np.empty(0, np.int64)
        if len(doubtful):
            whole = map_ahead(self._is_whole, [self.plan.names[i] for i in doubtful], threads=8)
            title = "checking what an interrupted copy left"
            held[doubtful] = list(progress(whole, desc=title, total=len(doubtful), enabled=show_progress))
        return held

    def _read_manifest(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._manifest_path, encoding="ascii") as file:
            for line in file:
                entry = from_line(line)
                if entry is not None:
                    self._manifest[entry[0]] = entry[1:]

    def _looks_whole(self, name: str, stamp: FileStamp) -> bool:
        if name not in self._manifest or self._manifest[name][0] != stamp:
            return False
        with contextlib.suppress(OSError):
            status = os.stat(self.path(name))
            return (status.st_size, status.st_mtime_ns) == stamp
        return False

    def _is_whole(self, name: str) -> bool:
        try:
            return digest_of(_read_parts(self.path(name))) == self._manifest[name][1]
        except OSError:
            return False

    def check_space(self, missing: np.ndarray) -> None:
        """Raises UserError unless the disk takes the files ``missing`` (F,)."""
        needed = int((-(-self.plan.sizes[missing] // _BLOCK) * _BLOCK).sum()) + 512 * int(missing.sum())
        free = shutil.disk_usage(self.folder).free
        if needed > 0.98 * free:
            raise UserError(
                f"--stage: {int(missing.sum())} files of {_size(needed)} are to be copied to {self.folder}, where "
                f"{_size(free)} are free; free some space or name another disk"
            )

    def loader(self, held: np.ndarray) -> Callable[[int], Iterator[bytes]]:
        """Reads a file of the plan: from this copy where ``held`` (F,), else from the original."""

        def load(item: int) -> Iterator[bytes]:
            name = self.plan.names[item]
            original = os.path.normpath(os.path.join(self.plan.spec.root, name))
            return _read_checked(self.path(name) if held[item] else original, self._stamps[item])

        return load

    def begin(self) -> None:
        """Before anything is written: from here on, until `finish`, the copy counts as interrupted."""
        with self._failures():
            self._synced.unlink(missing_ok=True)
            shutil.rmtree(self._incoming)
            self._incoming.mkdir()
            lines = [to_line(name, *entry) for name, entry in self._manifest.items()]
            _write_whole(self._manifest_path, "".join(lines))  # without lines cut short or overtaken
            self._log = self._manifest_path.open("a", encoding="ascii", buffering=1)

    def write(self, piece: Piece) -> bool:
        """Takes a piece of a file that is missing here; True when it was the last one, and the file is in its place."""
        with self._failures():
            temporary = self._incoming / str(piece.item)
            if piece.item not in self._writing:
                self._writing[piece.item] = temporary.open("wb", buffering=0)
            file = self._writing[piece.item]
            view = piece.data
            while len(view):
                view = view[file.write(view) :]
            if not piece.digest:
                return False
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
            assert self._log is not None
            self._log.write(to_line(name, stamp, piece.digest))
            return True

    def finish(self) -> None:
        """Removes what the original no longer has, writes lists and YAML, and marks the copy as on disk."""
        with self._failures():
            self._prune()
            for name in self.plan.folders:
                os.makedirs(self.path(name), exist_ok=True)
            for name, text in self.plan.lists.items():
                os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
                _write_whole(Path(self.path(name)), text)
            _write_whole(self.yaml, self.plan.yaml_text("tree"))
            if self._log is not None:
                self._log.close()
            if not self._synced.exists():
                os.sync()
                self._synced.touch()

    def _prune(self) -> None:
        wanted = set(self.plan.names)
        for name in [n for n in self._manifest if n not in wanted]:
            if name in self.plan.absent or is_under(name, self.plan.folders):
                Path(self.path(name)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space or name another disk" if full else "name a folder that can be written"
            raise UserError(f"--stage: {error.filename or self.folder}: {error.strerror}; {remedy}") from None


def _read_parts(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            yield part


def _read_checked(path: str, stamp: FileStamp) -> Iterator[bytes]:
    """The file's bytes, a small file's read at once. Raises UserError unless it is the file that was listed."""
    try:
        file = Path(path).open("rb", buffering=0)  # noqa: SIM115 (a large one is read while it is sent)
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


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
    os.replace(temporary, path)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
