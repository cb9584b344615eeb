"""The caches of data sets: which there are, which are in use, and which go when they are too many.

A cache that a process uses is locked (`hold`) and stays. The environment variable LOCKSTEP_CACHE_GB limits what caches
may take together; by default it is 200 GB, or half of the disk where that is less. A run that makes a cache removes
others first, as far as the limit and the disk ask for it: versions of a data set that has changed since, then those
that were not used for longest. Its own may be larger than the limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files.array_file import CacheError, read_meta
from utils.files.locks import flock
from utils.logger import get_logger

LIMIT_VARIABLE = "LOCKSTEP_CACHE_GB"
DEFAULT_LIMIT = 200e9  # bytes
DEFAULT_SHARE = 0.5  # of the disk
MOST_OF_FREE = 0.98  # of what is free on the disk may be filled
DAY_S = 86400.0
_PREFIXES = ("lockstep-", "train-", "val-", "test-")
_INDEX = re.compile(r"(?P<split>\w+)-(?P<version>[0-9a-f]{32})\.index")
_PIXELS = re.compile(r"lockstep-\d+-(?P<version>[^-]*)-(?P<imgsz>\d+)-v\d+\.(?P<kind>lmdb|pixels)")
# The second: what an interrupted scan has read.
_UNFINISHED = re.compile(r".+\.(index|pixels|tree)\.\w+(\.tmp)?|\w+-[0-9a-f]{32}-\w+\.partial")


@dataclass(frozen=True)
class CacheFile:
    """A cache on the disk or in memory."""

    path: Path
    size: int  # bytes on the disk
    used: float  # when a run last used it, seconds since 1970
    version: str  # of the data set: the index's fingerprint; "" where it is not known
    what: str  # in words
    is_old: bool = False  # the data set has changed since

    def line(self, now: float) -> str:
        old = ", an older version" if self.is_old else ""
        return (
            f"{amount(self.size):>9}  {_age(now - self.used):<14}{self.what}{old}{', in use' if in_use(self) else ''}"
        )


def hold(owner: Any, path: Path) -> None:
    """Marks ``path`` as used now, and as in use while ``owner`` lives. A file system without locks has no marks."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        weakref.finalize(owner, close_quietly, handle).atexit = False
        flock(handle, shared=True)
        os.utime(path)


def close_quietly(handle: int) -> None:
    """Closes a file that was only read: whatever the disk says then, nothing is lost."""
    with contextlib.suppress(OSError):
        os.close(handle)


def list_caches(folder: Path, shared_memory: Path | None = None) -> list[CacheFile]:
    """This user's caches in ``folder`` and, where that is given, in memory, those used last first."""
    found: list[CacheFile] = []
    described: dict[str, str] = {}
    newest: dict[str, tuple[float, str]] = {}  # by data set: its version that was used last
    origins: dict[str, str] = {}
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
        described[version] = f"{source}, {split}{', as one class' if single else ''} ({images:,} images)"
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
                where = "in memory" if match["kind"] == "pixels" else "on disk"
                of = described.get(match["version"], "a data set whose index has gone")
                what = f"images {where}, {match['imgsz']} px, of {of}"
                found.append(_cache_file(path, status, match["version"], what))
            elif _UNFINISHED.fullmatch(path.name) and path.name.lstrip(".").startswith(_PREFIXES):
                found.append(_cache_file(path, status, "", "an unfinished file"))
    old = {version for version, origin in origins.items() if newest[origin][1] != version}
    marked = [c if c.version not in old else CacheFile(**{**vars(c), "is_old": True}) for c in found]
    return sorted(marked, key=lambda c: -c.used)


def _files(folder: Path) -> list[Path]:
    try:
        return [
            Path(entry.path) for entry in os.scandir(folder) if entry.is_file() and entry.stat().st_uid == os.getuid()
        ]
    except OSError:
        return []


def _cache_file(path: Path, status: os.stat_result, version: str, what: str) -> CacheFile:
    return CacheFile(path, status.st_blocks * 512, status.st_mtime, version, what)


def in_use(cache: CacheFile) -> bool:
    """Whether a process reads or fills it."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        return not _lock(cache.path, stack)
    return False


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Locks a cache for its removal, until ``stack`` ends; False if a process has it."""
    for file in (path.with_suffix(".lock"), path):  # the first is its filler's
        try:
            handle = os.open(file, os.O_RDWR)
        except FileNotFoundError:
            continue
        stack.callback(os.close, handle)
        try:
            flock(handle)
        except BlockingIOError:
            return False
    return True


def remove(cache: CacheFile) -> bool:
    """Removes a cache with what belongs to it; False if it is in use, or not ours to remove."""
    if not cache.version and time.time() - cache.used < DAY_S:  # unfinished, perhaps still being written
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
    """Versions of data sets that have changed since, then those that were not used for longest."""
    return sorted(caches, key=lambda c: (not c.is_old, c.used))


def cache_limit(folder: Path) -> float:
    """Bytes that caches may take together. Raises UserError for a limit that is none."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return min(DEFAULT_LIMIT, DEFAULT_SHARE * shutil.disk_usage(folder).total)
    return gigabytes(text, LIMIT_VARIABLE)


def make_room(folder: Path, wanted: int, keep: Path) -> None:
    """Removes caches on the disk, so that ``wanted`` more bytes stay within the limit and find room, as far as that can
    be had: ``keep`` stays, as does what is in use."""
    caches = list_caches(folder)
    limit = cache_limit(folder)
    removed = 0

    def is_enough() -> bool:
        total = sum(c.size for c in caches) - removed
        return total + wanted <= limit and wanted <= MOST_OF_FREE * shutil.disk_usage(folder).free

    count = 0
    for cache in removal_order(caches):
        if is_enough():
            break
        if cache.path != keep and remove(cache):
            removed, count = removed + cache.size, count + 1
    if count:
        get_logger().info(
            "%s: removed %d cache(s) of other data sets or versions, %s, to make room (limit %s; %s sets another)",
            folder, count, amount(removed), amount(limit), LIMIT_VARIABLE,
        )  # fmt: skip


def gigabytes(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{name} {text}: wants gigabytes, a number from 0")
    return value * 1e9


def amount(size: float) -> str:
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
