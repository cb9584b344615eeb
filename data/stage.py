"""``--stage DIR``: copies the data set to a local disk of each node, reading the shared file system only once.

The first process of the run lists the data set. The first process of each node (its leader) copies the files that its
disk lacks: the leaders take turns in reading one and broadcasting it to the others. A file gets its name and time once
it is whole, so a file with the original's size and time is complete, and the next run continues an interrupted copy.

A copy's folder contains ``tree/``, the copied files, which keep their names relative to the data set's folder, and
``<split>.json``, the listing of a split, so that a copy is used, refused and reported like the original.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.listing import UNREADABLE, Listing, listing_text
from data.pairing import list_split
from data.spec import DEMO, DatasetSpec, DataSource, FilesSplit, Split
from utils.distributed.context import DistributedContext, StoreBarrier, once_per_node
from utils.distributed.groups import one_per_node_group
from utils.errors import UserError, os_reason
from utils.files.locks import FileLock
from utils.files.paths import is_inside, normal_path, path_of
from utils.files.safe_io import folder_below, write_whole
from utils.logger import get_logger, progress
from utils.machine.limits import require_posix
from utils.machine.resources import check_space
from utils.machine.threads import map_ahead
from utils.program_folders import check_owner, private_folder
from utils.strings import counted, format_bytes

_READING_THREADS = 8
_BLOCK = 4096  # bytes; a file's disk usage is a multiple of this


def stage_dataset(
    source: DataSource, ctx: DistributedContext, open_original: Callable[[], tuple[DatasetSpec, Collection[str]]]
) -> DatasetSpec:
    """Copies the files that are missing from the data set's copy in ``source.stage``, and opens the copy.

    Every process of the run must call this. The first process calls ``open_original``, which returns the data set in
    its own folder and the splits to copy. ``source.stage`` is on this node's disk and may differ between nodes;
    ``{node_rank}`` in it is replaced with the node's number. The result keeps the ``source`` of the original. Raises
    UserError if the data set cannot be read or has no labels, if the disk is too small or cannot be written, or if two
    nodes use the same folder.
    """
    require_posix("--stage")
    if source.data == DEMO:
        raise UserError("--stage: the demo set cannot be staged, since each node renders it; omit --stage")
    leaders = one_per_node_group(ctx)
    return once_per_node(ctx, lambda: _copy_as_leader(source, ctx, leaders, open_original))


def _copy_as_leader(
    source: DataSource,
    ctx: DistributedContext,
    leaders: dist.ProcessGroup | None,
    open_original: Callable[[], tuple[DatasetSpec, Collection[str]]],
) -> DatasetSpec:
    """Receives the list of files, which the first leader makes for all, completes this node's copy, and opens it.
    ``leaders``: None in a run of one process."""
    place = Path(os.path.expanduser(source.stage.replace("{node_rank}", str(ctx.node_rank)))).absolute()
    num_nodes = 1 if leaders is None else leaders.size()
    title = "" if leaders is None else f"stage/{leaders.group_name}"
    with StoreBarrier(ctx.store, title, num_nodes) as barrier:
        listed: list[Any] = [None]
        if ctx.is_main:
            original, splits = open_original()
            listed = [(original, {split: list_split(original, split) for split in splits})]
        barrier.wait()
        if leaders is not None:
            dist.broadcast_object_list(listed, src=0, group=leaders)
        copy = StageCopy(place, *listed[0])
        with copy.locked(wait=num_nodes == 1):
            is_complete = copy.complete_files()
            barrier.wait()
            complete_by_node = [is_complete] * num_nodes
            if leaders is not None:
                dist.all_gather_object(complete_by_node, is_complete, group=leaders)
            copy.receive(np.stack(complete_by_node), leaders, is_main=ctx.is_main)
            return copy.spec()


class StageCopy:
    """A node's copy of the listed splits of a data set, in a folder of ``place``, which is created if necessary. Masks
    have one value for each of the F files. Names are relative to the data set's folder, and may begin with ``..``.

    Another user could guess the folder's name and make it first, so it must be private, and no link.
    """

    def __init__(self, place: Path, original: DatasetSpec, listings: dict[str, Listing]) -> None:
        self.original = original
        self.listings = listings  # by split
        stamp_of: dict[str, list[int]] = {}
        for listing in listings.values():
            files = [*zip(listing.images, listing.image_stamps.tolist())]
            files += zip(listing.labels, listing.label_stamps.tolist())
            stamp_of |= {name: stamp for name, stamp in files if stamp[0] >= 0 and tuple(stamp) != UNREADABLE}
        self.names = sorted(stamp_of)
        self.stamps = [stamp_of[name] for name in self.names]  # F: size in bytes, modification time in ns
        root = original.root
        source = normal_path(original.source)
        digest = hashlib.blake2b(f"{source}\0{root}".encode("utf-8", "surrogateescape"), digest_size=6)
        self.folder = place / f"{source.stem}-{digest.hexdigest()}"
        folders: set[str | Path] = {path_of(folder, root) for folder in {*map(os.path.dirname, self.names)}}
        folders.update(path for split in listings for path in original.split(split).paths if path.is_dir())
        if any(is_inside(self.folder, folder) for folder in folders):
            raise UserError(f"--stage: {place} is inside the data set; name a folder outside it")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(place, "--stage")
        private_folder(self.folder, "--stage")
        # The tree begins as many levels above the data set's folder as any name leads.
        levels = max((name.split("/").count("..") for name in self.names), default=0)
        in_tree = Path("tree", *root.parts[-levels:]) if levels else Path("tree")
        self.root = folder_below(place, Path(self.folder.name, in_tree))

    @contextlib.contextmanager
    def locked(self, *, wait: bool) -> Iterator[None]:
        """Locks the copy for writing. If another run or node holds the lock, waits for it (``wait``) or raises
        UserError."""
        with FileLock(self.folder / "lock") as lock:
            if wait:
                lock.wait(f"another run that copies into {self.folder}")
            elif holder := lock.acquire():
                raise UserError(
                    f"--stage: another node or run is copying into {self.folder} ({holder}); name a folder on a local "
                    "disk of each node, or use {node_rank} in the name; or wait for that run"
                )
            yield

    def complete_files(self) -> np.ndarray:
        """Returns a mask of the files that are complete, bool (F,). Raises UserError unless the disk has space for the
        others."""
        complete = np.zeros(len(self.names), bool)
        missing_bytes = 0
        for i, (name, stamp) in enumerate(zip(self.names, self.stamps)):
            with contextlib.suppress(OSError):
                status = os.lstat(path_of(name, self.root))
                complete[i] = stat.S_ISREG(status.st_mode) and [status.st_size, status.st_mtime_ns] == stamp
            if not complete[i]:
                missing_bytes += -(-stamp[0] // _BLOCK) * _BLOCK  # rounded up
        title = f"--stage, {counted((~complete).sum(), 'file')} to copy"
        free = shutil.disk_usage(self.folder).free
        check_space(title, missing_bytes, free=free, place=self.folder, remedy="free some space or name another disk")
        return complete

    def receive(self, complete: np.ndarray, leaders: dist.ProcessGroup | None, *, is_main: bool) -> None:
        """Copies the files that this node lacks, and sends those that other nodes lack. All leaders call this at the
        same time. ``complete``: the masks of all nodes, bool (N, F)."""
        missing = np.flatnonzero(~complete.all(axis=0))
        if is_main and len(missing):
            size = format_bytes(sum(self.stamps[item][0] for item in missing))
            nodes = counted(len(complete), "node")
            message = "--stage: copying %d of %d files (%s) to %s, on this node to %s"
            get_logger().info(message, len(missing), len(self.names), size, nodes, self.folder)
        elif is_main:
            get_logger().info("--stage: complete in %s (%s)", self.folder, counted(len(self.names), "file"))
        # The first node that has a file reads it there; of the others, each node reads every N-th.
        has_copy = complete[:, missing]
        readers = np.where(has_copy.any(axis=0), has_copy.argmax(axis=0), np.arange(len(missing)) % len(complete))
        node = 0 if leaders is None else leaders.rank()
        own_items = missing[readers == node].tolist()
        is_complete = complete[node].tolist()
        temporary = self.folder / "incoming.tmp"  # the lock makes this the only writer
        with contextlib.closing(
            map_ahead(lambda item: self._load(item, is_complete[item]), own_items, threads=_READING_THREADS)
        ) as contents:
            items = zip(missing.tolist(), readers.tolist())
            is_shown = is_main and len(missing) > 0
            for item, reader in progress(items, desc="staging", total=len(missing), unit="file", enabled=is_shown):
                num_bytes, mtime_ns = self.stamps[item]
                data = next(contents) if reader == node else np.empty(num_bytes, np.uint8)
                if leaders is not None and num_bytes:
                    sender = dist.get_global_rank(leaders, reader)
                    dist.broadcast(torch.from_numpy(data), src=sender, group=leaders)
                if not is_complete[item]:
                    path = path_of(self.names[item], self.root)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    data.tofile(temporary)
                    os.utime(temporary, ns=(mtime_ns, mtime_ns))
                    os.replace(temporary, path)
        for split, listing in self.listings.items():
            write_whole(self._listing_file(split), listing_text(listing))

    def spec(self) -> DatasetSpec:
        """Returns the data set as its copy."""
        splits: dict[str, Split] = {
            name: replace(split, listing_file=self._listing_file(name))
            for name, split in self.original.splits.items()
            if name in self.listings and isinstance(split, FilesSplit)
        }
        return replace(self.original, root=self.root, splits=splits)

    def _listing_file(self, split: str) -> Path:
        return self.folder / f"{split}.json"

    def _load(self, item: int, is_complete: bool) -> np.ndarray:
        """Reads a file, uint8 (size,), from this copy if it is complete there, else from the original."""
        path = path_of(self.names[item], self.root if is_complete else self.original.root)
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                data = np.fromfile(file, np.uint8)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None
        stamp = self.stamps[item]
        if [status.st_size, status.st_mtime_ns] != stamp or len(data) != stamp[0]:
            raise UserError(f"{path}: changed while the data set was being copied; start again")
        return data
