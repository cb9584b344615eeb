"""Lists and removes caches of data sets.

python -m tools.cache list
python -m tools.cache prune --older-than 30      # days since a run last used it
python -m tools.cache prune --to 50              # GB to keep; old versions of a data set are removed first
python -m tools.cache prune --all
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from utils.config.flags import parser_of
from utils.entrypoint import run_main
from utils.files.caches import (
    DAY_S,
    LIMIT_VARIABLE,
    CacheFile,
    cache_limit,
    format_bytes,
    gigabytes,
    list_caches,
    removal_order,
    remove,
)
from utils.files.folders import SHARED_MEMORY, cache_folder
from utils.logger import configure_logging, get_logger
from utils.strings import counted


def main(argv: Sequence[str] | None = None) -> None:
    options = _parse(argv)
    configure_logging(True)
    folder = cache_folder(options.cache_dir)
    caches = list_caches(folder, SHARED_MEMORY)
    if options.command == "list":
        _print_list(folder, caches)
    else:
        _prune(caches, _chosen(options))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("cache", "Lists or removes caches of data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print size, last use and content of each cache")
    prune = commands.add_parser("prune", help="remove caches that no process uses")
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--older-than", type=float, metavar="DAYS", help="caches not used for this many days")
    which.add_argument("--to", metavar="GB", help="caches beyond this total size, old versions of data sets first")
    which.add_argument("--all", action="store_true", help="all caches; runs create them again")
    for command in commands.choices.values():
        command.add_argument("--cache-dir", default="", help="the --cache-dir of the runs; empty: ~/.cache/lockstep")
    return parser.parse_args(argv)


def _chosen(options: argparse.Namespace) -> Callable[[CacheFile, int], bool]:
    """Returns a function that tells whether to remove a cache, given the bytes of all caches that are left."""
    if options.all:
        return lambda cache, left: True
    if options.to is not None:
        most = gigabytes(options.to, "--to")
        return lambda cache, left: left > most
    before = time.time() - options.older_than * DAY_S
    return lambda cache, left: cache.used < before


def _prune(caches: list[CacheFile], is_chosen: Callable[[CacheFile, int], bool]) -> None:
    left, count, total = sum(c.size for c in caches), 0, 0
    now = time.time()
    for cache in removal_order(caches):
        if not is_chosen(cache, left):
            continue
        if remove(cache):
            get_logger().info("removed  %s", cache.line(now))
            left, count, total = left - cache.size, count + 1, total + cache.size
        else:
            get_logger().info("kept (in use): %s", cache.line(now))
    get_logger().info("%d removed, %s; %s left", count, format_bytes(total), format_bytes(left))


def _print_list(folder: Path, caches: list[CacheFile]) -> None:
    now = time.time()
    for cache in caches:
        get_logger().info("%s", cache.line(now))
    total = format_bytes(sum(c.size for c in caches))
    limit = f", limit {format_bytes(cache_limit(folder))} ({LIMIT_VARIABLE} changes it)" if folder.is_dir() else ""
    get_logger().info("%s in %s and memory: %s%s", counted(len(caches), "cache"), folder, total, limit)
    for name, what in (("demo", "the demo set"), ("weights", "downloaded weights")):
        sizes = [p.stat().st_size for p in (folder / name).rglob("*") if p.is_file()]
        if sizes:
            size = format_bytes(sum(sizes))
            get_logger().info("%s in %s, not removed by prune: %s", what, folder / name, size)


if __name__ == "__main__":
    run_main(main)
