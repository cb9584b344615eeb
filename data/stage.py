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
from dataclasses import dataclass, replace
from pathlib import Path

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
from utils.files.paths import is_inside, normal_path, path_of, relative_name
from utils.files.safe_io import folder_below
from utils.logger import get_logger, progress
from utils.machine.limits import require_posix
from utils.machine.resources import check_space
from utils.machine.threads import map_ahead
from utils.program_folders import check_owner, private_folder
from utils.strings import counted, format_bytes

_READING_THREADS = 8
_BLOCK = 4096  # bytes; a file's disk usage is a multiple of this


def stage_dataset(source: DataSource, ctx: DistributedContext, plan: Callable[[], StagePlan]) -> DatasetSpec:
    """Copies the files that are missing from the data set's copy in ``source.stage``, and opens the copy.

    Every process of the run must call this. The first process calls ``plan``, which lists the data set in its own
    folder. ``source.stage`` is on this node's disk and may differ between nodes; ``{node_rank}`` in it is replaced with
    the node's number. The result keeps the ``source`` of the original. Raises UserError if the data set cannot be read
    or has no labels, if the disk is too small or cannot be written, or if two nodes use the same folder.
    """
    require_posix("--stage")
    if source.data == DEMO:
        raise UserError("--stage: the demo set cannot be staged, since each node renders it; omit --stage")
    leaders = one_per_node_group(ctx)
    return once_per_node(ctx, lambda: _copy_as_leader(source, ctx, leaders, plan))


@dataclass(frozen=True)
class StagePlan:
    """The files to copy for some splits. Names are relative to the data set's folder, with ``/``, and may begin with
    ``..``."""

    spec: DatasetSpec
    listings: dict[str, Listing]  # by split
    names: list[str]  # sorted
    stamps: np.ndarray  # int64 (F, 2): size in bytes, modification time in ns

    @classmethod
    def of(cls, spec: DatasetSpec, splits: Collection[str]) -> StagePlan:
        """Lists the splits. Raises UserError as `list_split` does."""
        stamps: dict[str, list[int]] = {}
        listings: dict[str, Listing] = {}
        for split in splits:
            listing = listings[split] = list_split(spec, split)
            files = [*zip(listing.images, listing.image_stamps.tolist())]
            files += zip(listing.labels, listing.label_stamps.tolist())
            stamps |= {name: stamp for name, stamp in files if stamp[0] >= 0 and tuple(stamp) != UNREADABLE}
        names = sorted(stamps)
        return cls(spec, listings, names, np.array([stamps[name] for name in names], np.int64).reshape(-1, 2))


def _copy_as_leader(
    source: DataSource, ctx: DistributedContext, leaders: dist.ProcessGroup | None, make_plan: Callable[[], StagePlan]
) -> DatasetSpec:
    """Receives the plan, which the first leader makes for all, completes this node's copy, and opens it. ``leaders``:
    None in a run of one process."""
    place = Path(os.path.expanduser(source.stage.replace("{node_rank}", str(ctx.node_rank)))).absolute()
    num_nodes = 1 if leaders is None else leaders.size()
    title = "" if leaders is None else f"stage/{leaders.group_name}"
    with StoreBarrier(ctx.store, title, num_nodes) as barrier:
        plans = [make_plan() if ctx.is_main else None]
        barrier.wait()
        if leaders is not None:
            dist.broadcast_object_list(plans, src=0, group=leaders)
        plan = plans[0]
        assert plan is not None
        copy = StageCopy(place, plan)
        with copy.locked(wait=num_nodes == 1):
            is_complete = copy.complete_files()
            copy.check_space(~is_complete)
            barrier.wait()
            complete_by_node = [is_complete] * num_nodes
            if leaders is not None:
                dist.all_gather_object(complete_by_node, is_complete, group=leaders)
            copy.receive(np.stack(complete_by_node), leaders, is_main=ctx.is_main)
            return copy.spec()


class StageCopy:
    """A node's copy of a data set in a folder of ``place``, which is created if necessary. Masks have one value for
    each file of the plan.

    Another user could guess the folder's name and make it first, so it must be private, and no link.
    """

    def __init__(self, place: Path, plan: StagePlan) -> None:
        root = plan.spec.root
        source = normal_path(plan.spec.source)
        digest = hashlib.blake2b(f"{source}\0{root}".encode("utf-8", "surrogateescape"), digest_size=6)
        self.folder = place / f"{source.stem}-{digest.hexdigest()}"
        self.plan = plan
        folders: set[str | Path] = {path_of(folder, root) for folder in {*map(os.path.dirname, plan.names)}}
        folders.update(path for split in plan.listings for path in plan.spec.split(split).paths if path.is_dir())
        if any(is_inside(self.folder, folder) for folder in folders):
            raise UserError(f"--stage: {place} is inside the data set; name a folder outside it")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(place, "--stage")
        private_folder(self.folder, "--stage")
        # The tree begins as many levels above the data set's folder as any name leads.
        levels = max((name.split("/").count("..") for name in plan.names), default=0)
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
        """Returns a mask of the planned files that are complete, bool (F,)."""
        complete = np.zeros(len(self.plan.names), bool)
        for i, (name, stamp) in enumerate(zip(self.plan.names, self.plan.stamps.tolist())):
            with contextlib.suppress(OSError):
                status = os.lstat(path_of(name, self.root))
                complete[i] = stat.S_ISREG(status.st_mode) and [status.st_size, status.st_mtime_ns] == stamp
        return complete

    def check_space(self, missing: np.ndarray) -> None:
        """Raises UserError unless the disk has space for the files in the mask ``missing``, bool (F,)."""
        blocks = -(-self.plan.stamps[missing, 0] // _BLOCK)  # rounded up
        free = shutil.disk_usage(self.folder).free
        title = f"--stage, {counted(missing.sum(), 'file')} to copy"
        remedy = "free some space or name another disk"
        check_space(title, int(blocks.sum()) * _BLOCK, free=free, place=self.folder, remedy=remedy)

    def receive(self, complete: np.ndarray, leaders: dist.ProcessGroup | None, *, is_main: bool) -> None:
        """Copies the files that this node lacks, and sends those that other nodes lack. All leaders call this at the
        same time. ``complete``: the masks of all nodes, bool (N, F)."""
        missing = np.flatnonzero(~complete.all(axis=0))
        if is_main:
            self._log_plan(missing, num_nodes=len(complete))
        # The first node that has a file reads it there; of the others, each node reads every N-th.
        has_copy = complete[:, missing]
        readers = np.where(has_copy.any(axis=0), has_copy.argmax(axis=0), np.arange(len(missing)) % len(complete))
        node = 0 if leaders is None else leaders.rank()
        own_items = missing[readers == node].tolist()
        is_complete = complete[node].tolist()
        with contextlib.closing(
            map_ahead(lambda item: self._load(item, is_complete[item]), own_items, threads=_READING_THREADS)
        ) as contents:
            items = zip(missing.tolist(), readers.tolist())
            is_shown = is_main and len(missing) > 0
            for item, reader in progress(items, desc="staging", total=len(missing), unit="file", enabled=is_shown):
                size = self.plan.stamps[item, 0]
                data = next(contents) if reader == node else np.empty(size, np.uint8)
                if leaders is not None and size:
                    sender = dist.get_global_rank(leaders, reader)
                    dist.broadcast(torch.from_numpy(data), src=sender, group=leaders)
                if not is_complete[item]:
                    self._write(path_of(self.plan.names[item], self.root), data, mtime_ns=self.plan.stamps[item, 1])
        for split, listing in self.plan.listings.items():
            text = listing_text(listing).encode("utf-8", "surrogateescape")
            self._write(str(self._listing_file(split)), np.frombuffer(text, np.uint8))

    def spec(self) -> DatasetSpec:
        """Returns the data set as its copy."""
        original = self.plan.spec
        splits: dict[str, Split] = {
            name: FilesSplit(
                images=tuple(map(self._moved, split.images)),
                annotations=None if split.annotations is None else self._moved(split.annotations),
                label_format=split.label_format,
            )
            for name, split in original.listed_splits.items()
            if name in self.plan.listings
        }
        return replace(
            original, root=self.root, splits=splits, listings={name: self._listing_file(name) for name in splits}
        )

    def _moved(self, path: Path) -> Path:
        """Returns the path in the copy of a path in the data set."""
        return Path(path_of(relative_name(path, self.plan.spec.root), self.root))

    def _listing_file(self, split: str) -> Path:
        return self.folder / f"{split}.json"

    def _log_plan(self, missing: np.ndarray, num_nodes: int) -> None:
        """Logs the number and size of the files that any node lacks. ``missing``: their numbers."""
        count = len(self.plan.names)
        if not len(missing):
            get_logger().info("--stage: complete in %s (%s)", self.folder, counted(count, "file"))
            return
        size = format_bytes(int(self.plan.stamps[missing, 0].sum()))
        nodes = counted(num_nodes, "node")
        message = "--stage: copying %d of %d files (%s) to %s, on this node to %s"
        get_logger().info(message, len(missing), count, size, nodes, self.folder)

    def _load(self, item: int, is_complete: bool) -> np.ndarray:
        """Reads a planned file, uint8 (size,), from this copy if it is complete there, else from the original."""
        path = path_of(self.plan.names[item], self.root if is_complete else self.plan.spec.root)
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                data = np.fromfile(file, np.uint8)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None
        stamp = self.plan.stamps[item].tolist()
        if [status.st_size, status.st_mtime_ns] != stamp or len(data) != stamp[0]:
            raise UserError(f"{path}: changed while the data set was being copied; start again")
        return data

    def _write(self, path: str, data: np.ndarray, mtime_ns: int | None = None) -> None:
        """Writes or replaces a file of the copy. The lock makes this the only writer."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = self.folder / "incoming.tmp"
        with open(temporary, "wb") as file:
            file.write(data.data)
        if mtime_ns is not None:
            os.utime(temporary, ns=(mtime_ns, mtime_ns))
        os.replace(temporary, path)
