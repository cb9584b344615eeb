"""Maintains a node's copy of a data set: finds the files that are complete, and writes the others.

The copy mirrors the data set's part of the file tree. Every file keeps its name relative to the data set's folder and
its modification time. Each split keeps the listing of the original: a copy is verified by its files' sizes and times,
not listed itself. It is therefore used, refused and reported like the original, and they share the cache of the index.

The folder contains ``tree/``, the copied files; ``<splits>.yaml``, which describes the copy; ``<splits>.json``, which
names the original; and ``<splits>.<split>.json``, the listing of a split. A file is written to ``incoming/`` and moved
to the tree once its bytes are on the disk, so that a file in the tree with the original's size and modification time is
complete even after a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.images.kinds import image_suffixes, is_image
from data.source.dataset_spec import DatasetSpec
from data.source.dataset_yaml import load_dataset_spec
from data.source.listing.stored import listing_text
from data.source.staging.plan import StagePlan
from data.split_files import FileStamp
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.files.paths import path_of
from utils.files.safe_io import open_below, read_text
from utils.machine.resources import check_space
from utils.strings import counted

_SYNC_EVERY_S = 10.0  # a killed process loses at most the files written in this time
_BLOCK = 4096  # bytes; a file's disk usage is a multiple of this
_INODE = 512  # bytes that a file takes up besides its content


class StageCopy:
    """Finds the planned files in the copy ``folder``, which is created if necessary. Only `lock` allows writing.

    A file is given by its number in the plan (``item``), and masks have one value for each file.
    """

    def __init__(self, folder: Path, plan: StagePlan) -> None:
        self.folder = folder
        self.plan = plan
        self.yaml = folder / f"{'-'.join(plan.splits)}.yaml"
        self.stamps = [FileStamp(int(size), mtime_ns) for size, mtime_ns in zip(plan.sizes, plan.mtimes_ns)]
        self._root = os.path.join("tree", plan.root_in_tree)  # the data set's folder, relative to ``folder``
        folder.parent.mkdir(parents=True, exist_ok=True)
        with self.opened(""):  # creates it
            pass

    @contextlib.contextmanager
    def opened(self, folder: str) -> Iterator[int]:
        """Yields a descriptor of a folder in the copy, which is created if necessary. Symbolic links are not followed,
        because another user could guess the copy's name and plant one. Raises PermissionError for a link."""
        descriptor = open_below(self.folder.parent, os.path.join(self.folder.name, folder), make=True)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def lock(self, *, wait: bool) -> Iterator[CopyWriter]:
        """Locks the copy and yields its writer. If another run or node holds the lock, waits for it (``wait``) or
        raises UserError."""
        with FileLock(self.folder / "lock") as lock:
            if wait:
                lock.wait(f"another run that copies into {self.folder}")
            else:
                holder = lock.acquire()
                if holder:
                    raise UserError(
                        f"--stage: another node or run is copying into {self.folder} ({holder}); name a folder on a "
                        "local disk of each node, or use {node_rank} in the name; or wait for that run"
                    )
            shutil.rmtree(self.folder / "incoming", ignore_errors=True)
            with self.opened("incoming") as incoming:
                writer = CopyWriter(self, incoming)
                try:
                    yield writer
                finally:  # even if another node has failed
                    writer.move_written()

    def path_in_copy(self, name: str) -> str:
        """Returns the path of a planned file or folder relative to the copy's folder."""
        return os.path.normpath(os.path.join(self._root, name))

    def _path(self, name: str) -> str:
        """Returns the path of a planned file in the copy."""
        return os.path.join(self.folder, self.path_in_copy(name))

    def complete_files(self) -> np.ndarray:
        """Returns a mask of the planned files that are complete, bool (F,)."""
        complete = np.zeros(len(self.stamps), bool)
        for i, (name, stamp) in enumerate(zip(self.plan.names, self.stamps)):
            with contextlib.suppress(OSError):
                status = os.lstat(self._path(name))
                complete[i] = stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == stamp
        return complete

    def check_space(self, missing: np.ndarray) -> None:
        """Raises UserError unless the disk has space for the files in the mask ``missing``, bool (F,)."""
        blocks = -(-self.plan.sizes[missing] // _BLOCK)  # rounded up
        needed = int(blocks.sum()) * _BLOCK + _INODE * int(missing.sum())
        free = shutil.disk_usage(self.folder).free
        title = f"--stage, {counted(missing.sum(), 'file')} to copy"
        check_space(title, needed, free=free, place=self.folder, remedy="free some space or name another disk")

    def loader(self, complete: np.ndarray) -> Callable[[int], bytes]:
        """Returns a function that reads a planned file, from this copy where the mask ``complete``, bool (F,), is set,
        else from the original."""

        def load(item: int) -> bytes:
            name = self.plan.names[item]
            original = path_of(name, self.plan.spec.root)
            return _read_checked(self._path(name) if complete[item] else original, self.stamps[item])

        return load


class CopyWriter:
    """Writes files to a locked copy. ``incoming``: descriptor of the folder of files that are being written."""

    def __init__(self, copy: StageCopy, incoming: int) -> None:
        self._copy = copy
        self._plan = copy.plan
        self._incoming = incoming
        self._written: set[int] = set()  # whole files in ``incoming``
        self._synced_at = time.monotonic()

    def write(self, item: int, data: memoryview) -> None:
        """Writes a planned file."""
        self._write_incoming(str(item), data, self._copy.stamps[item].mtime_ns)
        self._written.add(item)
        if time.monotonic() - self._synced_at > _SYNC_EVERY_S:
            self.move_written()

    def move_written(self) -> None:
        """Moves the written files to the tree once their bytes are on the disk."""
        if self._written:
            os.sync()
        by_folder: dict[str, list[tuple[int, str]]] = {}
        for item in self._written:
            folder, name = os.path.split(self._copy.path_in_copy(self._plan.names[item]))
            by_folder.setdefault(folder, []).append((item, name))
        for folder, files in by_folder.items():
            with self._copy.opened(folder) as descriptor:
                for item, name in files:
                    self._move(str(item), os.path.join(folder, name), descriptor)
                    self._written.remove(item)
        self._synced_at = time.monotonic()

    def finish(self) -> None:
        """Removes images that the original no longer contains, and writes the listings and the YAML."""
        self.move_written()
        wanted = set(map(self._copy.path_in_copy, self._plan.names))
        for folder in map(self._copy.path_in_copy, self._plan.folders):
            self._remove_other_images(folder, wanted)
        yaml = self._copy.yaml
        for split, listing in self._plan.listings.items():
            self._write_text(_listing_file(yaml, split).name, listing_text(listing))
        self._write_text(_original_file(yaml).name, json.dumps({"source": self._plan.spec.source}))
        self._write_text(yaml.name, self._plan.yaml_text("tree"))

    def _remove_other_images(self, top: str, wanted: Collection[str]) -> None:
        """Removes the images in and below the folder ``top`` that are not ``wanted``. Both are relative to the copy's
        folder."""
        suffixes = image_suffixes(self._plan.spec.pixels)
        with self._copy.opened(top) as top_descriptor:
            for parent, _, names, descriptor in os.fwalk(".", dir_fd=top_descriptor):
                folder = os.path.normpath(os.path.join(top, parent))
                images = [name for name in names if is_image(name, suffixes)]
                for name in (image for image in images if os.path.join(folder, image) not in wanted):
                    os.unlink(name, dir_fd=descriptor)

    def _write_incoming(self, name: str, data: memoryview | bytes, mtime_ns: int | None = None) -> None:
        """Writes a new file in ``incoming``. An OSError (a full disk) names the copy."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(name, flags, 0o666, dir_fd=self._incoming), "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                if mtime_ns is not None:
                    os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
        except OSError as error:
            error.filename = str(self._copy.folder)
            raise

    def _move(self, incoming: str, name: str, folder: int) -> None:
        """Moves a file of ``incoming`` to ``name``, relative to the copy's folder, in place of an older file.

        ``folder``: descriptor of the folder of ``name``. Raises UserError if ``name`` is itself a folder.
        """
        try:
            os.replace(incoming, os.path.basename(name), src_dir_fd=self._incoming, dst_dir_fd=folder)
        except IsADirectoryError:  # names only the file in ``incoming``
            path = self._copy.folder / name
            raise UserError(f"--stage: {path}: a folder in place of a file of the copy; remove it") from None

    def _write_text(self, name: str, text: str) -> None:
        """Writes or replaces a text file in the copy's folder."""
        self._write_incoming("text", text.encode("utf-8", "surrogateescape"))
        with self._copy.opened("") as folder:
            self._move("text", name, folder)


def open_copy(path: Path) -> DatasetSpec:
    """Opens the copy of a data set that the YAML ``path`` describes."""
    spec = load_dataset_spec(path)
    listings = {split: _listing_file(path, split) for split in spec.splits}
    original = json.loads(read_text(_original_file(path)))
    return replace(spec, source=original["source"], listings=listings)


def _original_file(yaml: Path) -> Path:
    return yaml.with_suffix(".json")


def _listing_file(yaml: Path, split: str) -> Path:
    return yaml.with_suffix(f".{split}.json")


def _read_checked(path: str, stamp: FileStamp) -> bytes:
    """Reads a file. Raises UserError if it has changed since it was listed."""
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            data = file.readall()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if (status.st_size, status.st_mtime_ns) != stamp or len(data) != stamp.size:
        raise UserError(f"{path}: changed while the data set was being copied; start again")
    return data
