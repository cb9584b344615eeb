"""Downloads public weights of configs/weights.yaml that the user names and that are not on disk.

A file appears under its name only when it is complete and its checksum is right.
"""

from __future__ import annotations

import functools
import hashlib
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from utils.config.other_programs import other_task
from utils.config.settings import WEIGHTS_SUFFIXES
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.folders import CONFIGS, UNKNOWN, Origin, cache_folder
from utils.files.safe_io import atomic_write
from utils.files.schema import Bounds, Count, build, suggestion
from utils.files.url import NETWORK_ERRORS, is_http, open_url, reason_of
from utils.logger import get_logger

if TYPE_CHECKING:
    from models.weights.read import StoredWeights
    from utils.distributed.context import DistributedContext

CATALOG = CONFIGS / "weights.yaml"
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class WeightsEntry:
    """One entry of the catalog."""

    url: str
    license: str = UNKNOWN
    sha256: str = ""  # hex digest; empty: not known
    size: Count = 0  # bytes; 0: not known
    ap: Annotated[float, Bounds(0, 100)] = 0.0  # published AP50-95 on COCO val2017, percent; 0: not known


def known_weights() -> dict[str, WeightsEntry]:
    """Reads the entries of the catalog by name, in its order: permissive licenses first."""
    return {name: build(WeightsEntry, entry, f"{CATALOG}: {name}") for name, entry in load_yaml(CATALOG).items()}


def find_entry(name_or_path: str) -> WeightsEntry:
    """Returns the entry for a URL or a name in the catalog. Raises UserError for anything else, with a suggestion."""
    if is_http(name_or_path):
        return WeightsEntry(url=name_or_path)
    catalog = known_weights()
    name = catalog_name(name_or_path)
    if name in catalog:
        return catalog[name]
    if Path(name_or_path).is_dir():
        raise UserError(f"{name_or_path}: is a folder; name a file in it, such as best.pt")
    if Path(name_or_path).name != name_or_path:
        raise UserError(f"{name_or_path}: no such file")
    other_task_message = other_task(name_or_path)
    if other_task_message:
        raise UserError(other_task_message)
    hint = suggestion(name, catalog) or f"; public weights: {', '.join(catalog)}"
    raise UserError(f"{name_or_path}: neither a file nor the name of public weights{hint}")


def check_weights(name_or_path: str) -> None:
    """Raises UserError unless the file or folder exists, or can be downloaded."""
    if not os.path.exists(os.path.expanduser(name_or_path)):
        find_entry(name_or_path)


def catalog_name(name: str) -> str:
    """Removes the suffix of a weights file: ``yolov8n`` for ``yolov8n.pt``."""
    return next((name.removesuffix(suffix) for suffix in WEIGHTS_SUFFIXES if name.endswith(suffix)), name)


def origin_of(info: Mapping[str, Any], path: Path) -> Origin:
    """Returns the origin of a checkpoint with the content ``info``."""
    stored = info.get("origin")
    if stored and isinstance(stored, dict):
        return Origin(*(str(stored.get(name, UNKNOWN)) for name in Origin._fields))
    return _public_origin(path)


def origin_of_run(start: StoredWeights) -> Origin:
    """Returns the origin of the checkpoints of a run that starts from these weights."""
    if not start.is_ours:
        return _public_origin(start.path)
    start_origin = origin_of(start.content, start.path)
    return start_origin._replace(weights=f"{start.path.name}, trained from {start_origin.weights}")


def _public_origin(path: Path) -> Origin:
    """Looks up a file in the catalog by its checksum; by its name if the checksum is not known or the file missing."""
    catalog = known_weights()
    digest = ""
    if path.is_file():
        status = path.stat()
        digest = _digest(path, status.st_size, status.st_mtime_ns)
    for name, entry in catalog.items():
        if digest and entry.sha256.lower() == digest:
            return Origin(f"{name}, a public file", entry.license)
    namesake = catalog.get(catalog_name(path.name))
    if namesake is None or (digest and namesake.sha256):  # not in the catalog, or another file of the same name
        return Origin(f"{path.name}, a file of unknown origin", UNKNOWN)
    return Origin(path.name, f"{namesake.license}, if it was the public file of this name")


@functools.lru_cache(maxsize=4)
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    """Computes the sha256 of a file. ``size`` and ``mtime_ns`` tell versions of it apart in the cache."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache  # once per process
def _warn_of_namesake(path: Path) -> None:
    """Warns of a file that has the name of a public one, but other content."""
    if catalog_name(path.name) in known_weights() and _public_origin(path).license == UNKNOWN:
        get_logger().warning("%s: has the name of a public file but another checksum; its license is unknown", path)


def fetch_weights(name_or_path: str, *, ctx: DistributedContext, offline: bool, cache_dir: Path | None = None) -> Path:
    """Returns the file that ``--weights`` names: an existing path, or else a name in the catalog (``yolov8n``,
    ``yolov8n.pt``) or a URL.

    All processes must call it: the first one of each node downloads a missing file into ``cache_dir`` (None:
    ``weights`` in the cache folder), the others wait. Raises UserError if there is no such file or name, or if it
    cannot be downloaded.
    """
    from utils.distributed.context import torch_distributed_zero_first  # imports torch

    path = Path(os.path.expanduser(name_or_path))
    with torch_distributed_zero_first(ctx):
        if path.is_file():
            _warn_of_namesake(path)
            return path
        entry = find_entry(name_or_path)
        target = _download_path(name_or_path, entry, cache_dir or cache_folder() / "weights")
        if not target.is_file():
            if not ctx.is_node_leader:
                raise UserError(
                    f"{target}: was downloaded by another process of this node, but this process cannot see it"
                )
            if offline:
                raise UserError(
                    f"{name_or_path}: not on this machine, and --offline is set; put {entry.url} at {target}"
                )
            _download(entry, target)
    return target


def _download_path(name_or_path: str, entry: WeightsEntry, cache_dir: Path) -> Path:
    """Returns where the file goes: under its name in the catalog. Other URLs, whose file names may be equal, have a
    folder each."""
    file_name = Path(urllib.parse.unquote(urllib.parse.urlsplit(entry.url).path)).name or "weights.pt"
    if is_http(name_or_path):
        return cache_dir / hashlib.sha256(entry.url.encode()).hexdigest()[:16] / file_name
    return cache_dir / f"{catalog_name(name_or_path)}{Path(file_name).suffix or '.pt'}"


def _download(entry: WeightsEntry, target: Path) -> None:
    """Logs URL and license, downloads the file and checks it. Raises UserError if it cannot be downloaded."""
    details = [f"license of the file: {entry.license}"]
    if entry.size:
        details.append(f"{entry.size / 1e6:.1f} MB")
    details.append("sha256 known" if entry.sha256 else "no checksum known")
    get_logger().info("downloading %s (%s)", entry.url, "; ".join(details))
    digest = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_url(entry.url) as response, atomic_write(target) as file:
            while chunk := response.read(CHUNK_BYTES):
                if not file.tell() and chunk.lstrip()[:1] == b"<":
                    raise UserError(f"{entry.url}: the server sent a web page, not weights")
                file.write(chunk)
                digest.update(chunk)
            if response.length or not file.tell():
                raise ConnectionError(f"cut off after {file.tell()} bytes")
            if entry.sha256 and digest.hexdigest() != entry.sha256.lower():
                raise UserError(f"{entry.url}: has sha256 {digest.hexdigest()}, expected {entry.sha256}")
    except NETWORK_ERRORS as error:
        raise UserError(f"{entry.url}: cannot be downloaded ({reason_of(error)}); put the file at {target}") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from None
