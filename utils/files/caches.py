"""Lists the caches of data sets and removes old ones when they take too much space.

The environment variable LOCKSTEP_CACHE_GB limits the total size of all caches. The default is 200 GB, or half of the
disk if that is less. Before a run creates a cache, it removes others until the new one fits: first those of old
versions of data sets, then the least recently used. A cache in use is locked (`hold`) and never removed. A single cache
may exceed the limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files.array_file import CacheError, read_meta
from utils.files.safe_io import flock, open_own
from utils.logger import get_logger
from utils.strings import counted

LIMIT_VARIABLE = "LOCKSTEP_CACHE_GB"
DEFAULT_LIMIT = 200e9  # bytes
DEFAULT_FRACTION = 0.5  # of the disk
USABLE_FRACTION = 0.98  # of the free space that a new cache or copy may take
DAY_S = 86400.0
_PREFIXES = ("lockstep-", "train-", "val-", "test-")
_INDEX = re.compile(r"(?P<split>\w+)-(?P<version>[0-9a-f]{32})\.index")
_PIXELS = re.compile(r"lockstep-\d+-(?P<version>[^-]*)-(?P<imgsz>\d+)-v\d+\.(?P<kind>lmdb|pixels)")
_UNFINISHED = re.compile(r".+\.(index|pixels|tree)\.\w+(\.tmp)?")


@dataclass(frozen=True)
class CacheFile:
    """A cache on the disk or in memory."""

    path: Path
    size: int  # bytes on the disk
    used: float  # when a run last used it, seconds since 1970
    version: str  # the data set's: the fingerprint of its index; "" if unknown
    what: str  # a description for the user
    is_old: bool = False  # the data set has changed since

    def line(self, now: float) -> str:
        """Size, age, description and state, as `python -m tools.cache list` prints them."""
        state = ", an older version" * self.is_old + ", in use" * in_use(self)
        return f"{format_bytes(self.size):>9}  {_age(now - self.used):<14}{self.what}{state}"


def hold(owner: Any, path: Path) -> None:
    """Marks ``path`` as just used, and as in use while ``owner`` exists (if the file system has locks)."""
    with contextlib.suppress(OSError):
        handle = open_own(path)
        weakref.finalize(owner, close_quietly, handle).atexit = False
        flock(handle, shared=True)
        os.utime(handle)


def discard(flag: str, reason: Exception, *files: Path) -> None:
    """Removes the ``files`` of a cache, the last of which cannot be used, with a warning. Raises UserError if that is
    impossible."""
    why = reason.strerror if isinstance(reason, OSError) else reason
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            refusal = str(error.strerror).lower()
            raise UserError(
                f"{flag}: {file}: cannot be used ({why}) nor removed ({refusal}); ask its owner to remove it, or use "
                "another --cache"
            ) from None
    get_logger().warning("%s: %s cannot be used (%s); it is created again", flag, files[-1], why)


def close_quietly(handle: int) -> None:
    """Closes a file that was only read, ignoring errors, since no data can be lost."""
    with contextlib.suppress(OSError):
        os.close(handle)


def list_caches(folder: Path, shared_memory: Path | None = None) -> list[CacheFile]:
    """Returns this user's caches in ``folder`` and ``shared_memory``, the most recently used first."""
    found: list[CacheFile] = []
    described: dict[str, str] = {}
    origins: dict[str, str] = {}  # by version: the data set
    newest: dict[str, tuple[float, str]] = {}  # by data set: its most recently used version, after the time of that use
    for path in _files(folder):
        if not (match := _INDEX.fullmatch(path.name)):
            continue
        version = match["version"]
        try:
            meta = read_meta(path)
        except (OSError, CacheError):
            meta = {}
        source, split, single = meta.get("origin") or ("a data set of an older program", match["split"], False)
        images = meta.get("totals", {}).get("images", 0)
        described[version] = f"{source}, {split}{', as one class' if single else ''} ({counted(images, 'image')})"
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append(_cache_file(path, status, version, f"index of {described[version]}"))
            if "origin" in meta:
                origins[version] = repr(meta["origin"])
                newest[origins[version]] = max(newest.get(origins[version], (0.0, "")), (status.st_mtime, version))
    for path in (*_files(folder), *(_files(shared_memory) if shared_memory else ())):
        with contextlib.suppress(OSError):
            status = path.stat()
            if match := _PIXELS.fullmatch(path.name):
                where = "in memory" if path.parent == shared_memory else "on disk"
                of = described.get(match["version"], "a data set whose index was removed")
                size = "full size" if match["imgsz"] == "0" else f"{match['imgsz']} px"
                what = f"images {where}, {size}, of {of}"
                found.append(_cache_file(path, status, match["version"], what))
            elif _UNFINISHED.fullmatch(path.name) and path.name.lstrip(".").startswith(_PREFIXES):
                found.append(_cache_file(path, status, "", "an unfinished file"))
    old = {version for version, origin in origins.items() if newest[origin][1] != version}
    return sorted((replace(c, is_old=c.version in old) for c in found), key=lambda c: -c.used)


def _files(folder: Path) -> list[Path]:
    try:
        own, entries = os.getuid(), [e for e in os.scandir(folder) if e.is_file(follow_symlinks=False)]
        return [Path(entry.path) for entry in entries if entry.stat(follow_symlinks=False).st_uid == own]
    except OSError:
        return []


def _cache_file(path: Path, status: os.stat_result, version: str, what: str) -> CacheFile:
    return CacheFile(path, status.st_blocks * 512, status.st_mtime, version, what)


def in_use(cache: CacheFile) -> bool:
    """Whether a process reads or fills the cache."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        return not _lock(cache.path, stack)
    return False


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Locks a cache until ``stack`` is closed; returns False if another process has locked it."""
    for file in (path.with_suffix(".lock"), path):  # the first is locked by the process that fills the cache
        try:
            handle = open_own(file, os.O_RDWR)
        except FileNotFoundError:
            continue
        stack.callback(os.close, handle)
        try:
            flock(handle)
        except BlockingIOError:
            return False
    return True


def remove(cache: CacheFile) -> bool:
    """Removes a cache and its companion files; returns False if it is in use or cannot be removed."""
    if not cache.version and time.time() - cache.used < DAY_S:  # unfinished; it may still be written
        return False
    try:
        with contextlib.ExitStack() as stack:
            if not _lock(cache.path, stack):
                return False
            cache.path.unlink(missing_ok=True)
            for suffix in (".lock", ".txt", ".damaged", ".tree"):
                cache.path.with_suffix(suffix).unlink(missing_ok=True)
    except OSError:
        return False
    return True


def removal_order(caches: Iterable[CacheFile]) -> list[CacheFile]:
    """Sorts caches: old versions of data sets first, then by last use, oldest first."""
    return sorted(caches, key=lambda c: (not c.is_old, c.used))


def cache_limit(folder: Path) -> float:
    """The maximum total size of the caches, bytes. Raises UserError if LOCKSTEP_CACHE_GB is not a valid number."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return min(DEFAULT_LIMIT, DEFAULT_FRACTION * shutil.disk_usage(folder).total)
    return gigabytes(text, LIMIT_VARIABLE)


def make_room(folder: Path, needed: int, keep: Path) -> None:
    """Removes caches from the disk until ``needed`` more bytes fit within the limit and the free space, or until only
    ``keep`` and caches in use are left."""
    caches, limit = list_caches(folder), cache_limit(folder)
    total = sum(c.size for c in caches)
    removed: list[int] = []
    for cache in removal_order(caches):
        fits = total - sum(removed) + needed <= limit
        if fits and needed <= USABLE_FRACTION * shutil.disk_usage(folder).free:
            break
        if cache.path != keep and remove(cache):
            removed.append(cache.size)
    if removed:
        get_logger().info(
            "%s: removed %s of other data sets or versions, %s, to make room (limit %s; %s sets another)",
            folder, counted(len(removed), "cache"), format_bytes(sum(removed)), format_bytes(limit), LIMIT_VARIABLE,
        )  # fmt: skip


def gigabytes(text: str, name: str) -> float:
    """Converts a number of gigabytes, the value of ``name``, to bytes. Raises UserError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{name} {text}: must be a number of gigabytes, 0 or more")
    return value * 1e9


def format_bytes(size: float) -> str:
    """A number of bytes as text, with a decimal unit up to GB."""
    for unit, digits in (("B", 0), ("kB", 0), ("MB", 1)):
        if size < 999.5:
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _age(seconds: float) -> str:
    for unit, name in ((DAY_S, "day"), (3600.0, "hour"), (60.0, "minute")):
        count = int(seconds / unit)
        if count:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
