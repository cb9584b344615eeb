"""``--stage DIR``: copies the data set to a local disk of each node, reading the shared file system only once.

The first process of the run lists the data set. The first process of each node (its leader) reports which files its
disk already has and reads a shard of the rest; the leaders exchange the files they read (`exchange_items`). The other
processes wait for their leader. The next run continues an interrupted copy and merely checks a complete one.

A copy's folder contains ``tree/``, the copied files; ``<splits>.yaml``, which describes them; and
``<splits>.<split>.json``, the listing of a split, so that a copy is used, refused and reported like the original. Every
file keeps its name relative to the data set's folder and its modification time. It is written to ``incoming/`` and
moved to the tree once its bytes are on the disk, so that a file in the tree with the original's size and time is
complete even after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
import yaml

from data.dataset.spec import DEMO, DatasetSpec, DataSource
from data.dataset.yaml_file import load_dataset_spec
from data.file_exchange import exchange_items
from data.images.kinds import image_suffixes, suffix_of
from data.labels.label_format import UNREADABLE, Listing
from data.listing.listing import list_split, listing_text
from utils.distributed.context import DistributedContext, StoreBarrier, once_per_node
from utils.distributed.groups import Subgroup, one_per_node_group
from utils.errors import UserError, os_reason
from utils.files.locks import FileLock
from utils.files.paths import is_inside, normal_path, path_of, relative_name
from utils.logger import get_logger, progress
from utils.machine.limits import require_posix
from utils.machine.resources import check_space
from utils.program_folders import check_owner, private_folder
from utils.strings import counted, format_bytes

_SYNC_EVERY_S = 10.0  # a killed process loses at most the files written in this time
_BLOCK = 4096  # bytes; a file's disk usage is a multiple of this
_INODE = 512  # bytes that a file takes up besides its content


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

    @property
    def folders(self) -> list[str]:
        """Names of the folders that the splits name, from which other images are removed."""
        paths = [path for split in self.listings for path in self.spec.split(split).paths]
        return list(dict.fromkeys(relative_name(path, self.spec.root) for path in paths if path.is_dir()))

    @property
    def root_in_tree(self) -> Path:
        """The data set's folder in the copied tree, which begins as many levels above it as any name leads."""
        levels = max((name.split("/").count("..") for name in (*self.names, *self.folders)), default=0)
        return Path(*self.spec.root.parts[-levels:]) if levels else Path()

    @property
    def key(self) -> str:
        """A folder name that is unique to this data set."""
        source = normal_path(self.spec.source)
        digest = hashlib.blake2b(f"{source}\0{self.spec.root}".encode("utf-8", "surrogateescape"), digest_size=6)
        return f"{source.stem}-{digest.hexdigest()}"

    def yaml_text(self) -> str:
        """Returns the YAML of the copy, which is written next to the folder ``tree``."""
        root = self.spec.root
        content: dict[str, object] = {"path": Path("tree", self.root_in_tree).as_posix()}
        annotations: dict[str, str] = {}
        for name in self.listings:
            split = self.spec.listed_splits[name]
            content[name] = [relative_name(path, root) for path in split.images]
            if split.annotations is not None:
                annotations[name] = relative_name(split.annotations, root)
        if annotations:
            content["annotations"] = annotations
        return yaml.safe_dump(content | self.spec.content(), sort_keys=False, allow_unicode=True)


def _copy_as_leader(
    source: DataSource, ctx: DistributedContext, leaders: Subgroup, make_plan: Callable[[], StagePlan]
) -> DatasetSpec:
    """Receives the plan, which the first leader makes for all, completes this node's copy, and opens it."""
    folder = Path(os.path.expanduser(source.stage.replace("{node_rank}", str(ctx.node_rank)))).absolute()
    title = f"stage/{leaders.handle.group_name}" if leaders.handle else ""
    with StoreBarrier(ctx.store, title, leaders.group_size) as barrier:
        plans = [make_plan() if leaders.group_rank == 0 else None]
        barrier.wait()
        if leaders.group_size > 1:
            dist.broadcast_object_list(plans, src=leaders.ranks[0], group=leaders.handle)
        plan = plans[0]
        assert plan is not None
        image_folders = {os.path.dirname(name) for name in plan.names}
        if any(is_inside(folder / plan.key, path_of(name, plan.spec.root)) for name in (*plan.folders, *image_folders)):
            raise UserError(f"--stage: {folder} is inside the data set; name a folder outside it")
        copy = StageCopy(folder / plan.key, plan)
        with copy.locked(wait=leaders.group_size == 1):
            complete = copy.complete_files()
            barrier.wait()
            complete_by_node = _gather(complete, leaders)
            copy.check_space(~complete)
            barrier.wait()
            missing = ~np.all(complete_by_node, axis=0)
            if ctx.is_main:
                _log_plan(copy, missing, num_nodes=leaders.group_size)
            is_shown = ctx.is_main and bool(missing.any())
            sizes = plan.stamps[:, 0]
            items = exchange_items(sizes, complete_by_node, copy.loader(complete), barrier=barrier, group=leaders)
            for item, data in progress(items, desc="staging", total=int(missing.sum()), unit="file", enabled=is_shown):
                if not complete[item]:
                    copy.write(item, data)
            copy.finish()
            barrier.wait()
    spec = load_dataset_spec(copy.yaml)
    listings = {split: copy.listing_file(split) for split in spec.splits}
    return replace(spec, source=plan.spec.source, listings=listings)


def _gather(complete: np.ndarray, leaders: Subgroup) -> np.ndarray:
    """Gathers the masks of the files that are complete on each node: bool (N, F). ``complete``: bool (F,), that of this
    node."""
    packed: list[np.ndarray] = [np.packbits(complete)] * leaders.group_size
    if leaders.group_size > 1:
        dist.all_gather_object(packed, packed[0], group=leaders.handle)
    return np.stack([np.unpackbits(bits, count=len(complete)).astype(bool) for bits in packed])


def _log_plan(copy: StageCopy, missing: np.ndarray, num_nodes: int) -> None:
    """Logs the number and size of the files to copy. ``missing``: bool (F,), those that any node lacks."""
    if not missing.any():
        get_logger().info("--stage: complete in %s (%s)", copy.folder, counted(len(missing), "file"))
        return
    get_logger().info(
        "--stage: copying %d of %d files (%s) to %s, on this node to %s",
        missing.sum(),
        len(missing),
        format_bytes(int(copy.plan.stamps[missing, 0].sum())),
        counted(num_nodes, "node"),
        copy.folder,
    )


class StageCopy:
    """A node's copy of a data set in the folder ``folder``, which is created if necessary.

    A file is given by its number in the plan (``item``); masks have one value for each file. Writing needs `locked`.
    Another user could guess its name and make it first: symbolic links in the copy are not followed, and only a folder
    in which nobody else can write is taken (`private_folder`).
    """

    def __init__(self, folder: Path, plan: StagePlan) -> None:
        self.folder = folder
        self.plan = plan
        self.yaml = folder / f"{'-'.join(plan.listings)}.yaml"
        self._root = os.path.join("tree", plan.root_in_tree)  # the data set's folder, relative to ``folder``
        self._written: set[int] = set()  # whole files in ``incoming``
        self._synced_at = time.monotonic()
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(folder.parent, "--stage")
        with self._opened(""):  # creates it
            private_folder(folder, "--stage")

    @contextlib.contextmanager
    def locked(self, *, wait: bool) -> Iterator[None]:
        """Locks the copy for writing. If another run or node holds the lock, waits for it (``wait``) or raises
        UserError."""
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
            try:
                yield
            finally:  # even if another node has failed
                self._move_written()

    def complete_files(self) -> np.ndarray:
        """Returns a mask of the planned files that are complete, bool (F,)."""
        complete = np.zeros(len(self.plan.names), bool)
        for i, (name, stamp) in enumerate(zip(self.plan.names, self.plan.stamps.tolist())):
            with contextlib.suppress(OSError):
                status = os.lstat(self.folder / self._path_in_copy(name))
                complete[i] = stat.S_ISREG(status.st_mode) and [status.st_size, status.st_mtime_ns] == stamp
        return complete

    def check_space(self, missing: np.ndarray) -> None:
        """Raises UserError unless the disk has space for the files in the mask ``missing``, bool (F,)."""
        blocks = -(-self.plan.stamps[missing, 0] // _BLOCK)  # rounded up
        needed = int(blocks.sum()) * _BLOCK + _INODE * int(missing.sum())
        free = shutil.disk_usage(self.folder).free
        title = f"--stage, {counted(missing.sum(), 'file')} to copy"
        check_space(title, needed, free=free, place=self.folder, remedy="free some space or name another disk")

    def loader(self, complete: np.ndarray) -> Callable[[int], bytes]:
        """Returns a function that reads a planned file, from this copy where the mask ``complete``, bool (F,), is set,
        else from the original."""

        def load(item: int) -> bytes:
            name = self.plan.names[item]
            path = os.path.join(self.folder, self._path_in_copy(name))
            if not complete[item]:
                path = path_of(name, self.plan.spec.root)
            try:
                with open(path, "rb", buffering=0) as file:
                    status = os.fstat(file.fileno())
                    data = file.readall()
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None
            stamp = self.plan.stamps[item].tolist()
            if [status.st_size, status.st_mtime_ns] != stamp or len(data) != stamp[0]:
                raise UserError(f"{path}: changed while the data set was being copied; start again")
            return data

        return load

    def write(self, item: int, data: memoryview) -> None:
        """Writes a planned file."""
        self._write_incoming(str(item), data, int(self.plan.stamps[item, 1]))
        self._written.add(item)
        if time.monotonic() - self._synced_at > _SYNC_EVERY_S:
            self._move_written()

    def finish(self) -> None:
        """Removes images that the original no longer contains, and writes the listings and the YAML."""
        self._move_written()
        wanted = set(map(self._path_in_copy, self.plan.names))
        for folder in map(self._path_in_copy, self.plan.folders):
            self._remove_other_images(folder, wanted)
        for split, listing in self.plan.listings.items():
            self._write_text(self.listing_file(split).name, listing_text(listing))
        self._write_text(self.yaml.name, self.plan.yaml_text())

    def listing_file(self, split: str) -> Path:
        """Returns the path of a split's listing."""
        return self.yaml.with_suffix(f".{split}.json")

    def _path_in_copy(self, name: str) -> str:
        """Returns the path of a planned file or folder relative to the copy's folder."""
        return os.path.normpath(os.path.join(self._root, name))

    @contextlib.contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """Yields a descriptor of a folder in the copy, which is created if necessary. Raises PermissionError for a
        link."""
        descriptor = _open_below(self.folder.parent, os.path.join(self.folder.name, folder))
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _remove_other_images(self, top: str, wanted: Collection[str]) -> None:
        """Removes the images in and below the folder ``top`` that are not ``wanted``. Both are relative to the copy's
        folder."""
        suffixes = image_suffixes(self.plan.spec.pixels)
        with self._opened(top) as top_descriptor:
            for parent, _, names, descriptor in os.fwalk(".", dir_fd=top_descriptor):
                folder = os.path.normpath(os.path.join(top, parent))
                for name in names:
                    if suffix_of(name) in suffixes and os.path.join(folder, name) not in wanted:
                        os.unlink(name, dir_fd=descriptor)

    def _move_written(self) -> None:
        """Moves the written files to the tree once their bytes are on the disk."""
        if self._written:
            os.sync()
        by_folder: dict[str, list[tuple[int, str]]] = {}
        for item in self._written:
            folder, name = os.path.split(self._path_in_copy(self.plan.names[item]))
            by_folder.setdefault(folder, []).append((item, name))
        for folder, files in by_folder.items():
            for item, name in files:
                self._move(str(item), folder, name)
                self._written.remove(item)
        self._synced_at = time.monotonic()

    def _write_incoming(self, name: str, data: memoryview | bytes, mtime_ns: int | None = None) -> None:
        """Writes a new file in ``incoming``. An OSError (a full disk) names the copy."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with self._opened("incoming") as incoming:
                descriptor = os.open(name, flags, 0o666, dir_fd=incoming)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                if mtime_ns is not None:
                    os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
        except OSError as error:
            error.filename = str(self.folder)
            raise

    def _move(self, incoming_name: str, folder: str, name: str) -> None:
        """Moves a file of ``incoming`` to ``name`` in ``folder``, relative to the copy's folder, in place of an older
        file. Raises UserError if ``name`` is itself a folder."""
        with self._opened("incoming") as incoming, self._opened(folder) as descriptor:
            try:
                os.replace(incoming_name, name, src_dir_fd=incoming, dst_dir_fd=descriptor)
            except IsADirectoryError:  # names only the file in ``incoming``
                path = self.folder / folder / name
                raise UserError(f"--stage: {path}: a folder in place of a file of the copy; remove it") from None

    def _write_text(self, name: str, text: str) -> None:
        """Writes or replaces a text file in the copy's folder."""
        self._write_incoming("text", text.encode("utf-8", "surrogateescape"))
        self._move("text", "", name)


def _open_below(root: Path, name: str) -> int:
    """Opens the folder ``name`` below ``root`` and returns a descriptor. Missing folders are made for this user alone.
    Raises PermissionError for a symbolic link below ``root``, so that files written to the folder stay there even if
    another user replaces a part of its path."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = root
    for part in Path(name).parts:
        path /= part
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=descriptor)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise PermissionError(errno.EPERM, "is a symbolic link or a file, not a folder", str(path)) from None
            error.filename = str(path)
            raise
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor
