"""Fetches public weights when the user names some that are not on the disk; nothing else here uses the network.

A file arrives under a temporary name, is checked, and is renamed: what lies under its own name is whole.
"""

from __future__ import annotations

import hashlib
import time
import urllib.parse
from pathlib import Path

from utils.cache_folder import cache_folder
from utils.distributed import DistributedContext, torch_distributed_zero_first
from utils.errors import UserError
from utils.file_lock import FileLock
from utils.http_transfer import Interrupted, Refused, TransferLimits, transfer
from utils.logger import get_logger
from utils.weights_catalogue import CATALOGUE, WeightsEntry, catalogue_name, find_entry, is_url


def fetch_weights(
    name_or_path: str,
    *,
    ctx: DistributedContext,
    offline: bool,
    catalogue: Path = CATALOGUE,
    cache_dir: Path | None = None,
    limits: TransferLimits | None = None,
) -> Path:
    """The file that ``--weights`` means: a path that is there, or else a name of the catalogue or a URL.

    The first process of each node fetches what is missing, after printing address and licence; the others wait.

    Args:
        name_or_path: ``runs/exp/best.pt``, ``yolov8n`` or ``yolov8n.pt``, ``https://...``.
        ctx: every process of the run must call this.
        offline: never use the network.
        catalogue: YAML of `WeightsEntry` by name.
        cache_dir: where fetched files are kept; None: ``weights`` in the cache folder.

    Raises:
        UserError: no such file or name; off-line, unreachable, or not the file that was expected.
    """
    path = Path(name_or_path).expanduser()
    with torch_distributed_zero_first(ctx):
        if path.is_file():
            return path
        entry = find_entry(name_or_path, catalogue)
        target = _target(name_or_path, entry, cache_dir or cache_folder() / "weights")
        if not target.is_file():
            if not ctx.is_node_leader:
                raise UserError(f"{target}: fetched by another process, but not to be seen from this one")
            if offline:
                raise UserError(
                    f"{name_or_path}: not on this machine and --offline is set; put {entry.url} at {target}"
                )
            _fetch(entry, target, limits or TransferLimits())
    return target


def _target(name_or_path: str, entry: WeightsEntry, cache_dir: Path) -> Path:
    """Where the file is kept: under its name in the catalogue; of free URLs, which may end alike, in a folder each."""
    file_name = Path(urllib.parse.unquote(urllib.parse.urlsplit(entry.url).path)).name or "weights.pt"
    if is_url(name_or_path):
        return cache_dir / hashlib.sha256(entry.url.encode()).hexdigest()[:16] / file_name
    return cache_dir / f"{catalogue_name(name_or_path)}{Path(file_name).suffix or '.pt'}"


def _fetch(entry: WeightsEntry, target: Path, limits: TransferLimits) -> None:
    logger = get_logger()
    checked = "sha256 known" if entry.sha256 else "no checksum known"
    size = f"{entry.size / 1e6:.1f} MB; " if entry.size else ""
    logger.info("fetching %s (licence of the file: %s; %s%s)", entry.url, entry.licence, size, checked)
    started = time.monotonic()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        lock = FileLock(target.with_name(target.name + ".lock"))
        lock.wait(f"another run that fetches {target}")
        with lock:
            if not target.is_file():  # another run on this machine may just have fetched it
                with open(part, "ab") as file:
                    transfer(entry, file, limits)
                part.replace(target)
    except Refused as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{entry.url}: {error}") from None
    except Interrupted as error:
        raise UserError(f"{entry.url}: cannot be fetched ({error}); put the file at {target}, or name one") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from None
    logger.info("%s: %.1f MB in %.1f s", target, target.stat().st_size / 1e6, time.monotonic() - started)
