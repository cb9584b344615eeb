"""Downloads public weights of configs/weights.yaml that the user names and that are not on disk.

A file appears under its name only when it is complete and its checksum is right.
"""

from __future__ import annotations

import hashlib
import os
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from models.weights.catalog import WeightsEntry, catalog_name, weights_entry
from utils.address import as_address, full_address
from utils.errors import UserError
from utils.files.safe_io import atomic_write
from utils.files.url import NETWORK_ERRORS, is_http, open_url, reason_of, url_path
from utils.logger import get_logger
from utils.program_folders import cache_folder, private_folder

if TYPE_CHECKING:
    from utils.distributed.context import DistributedContext

CHUNK_BYTES = 1 << 18
MAX_BYTES = 8 << 30  # of a file whose size the catalog does not have


def fetch_weights(name_or_path: str, *, ctx: DistributedContext, offline: bool, cache_dir: Path | None = None) -> Path:
    """Returns the file that ``--weights`` names: an existing path, or else a name in the catalog (``yolov8n``,
    ``yolov8n.pt``) or a URL.

    All processes must call it: the first one of each node downloads a missing file into ``cache_dir`` (None:
    ``weights`` in the cache folder), the others wait. Raises UserError if there is no such file or name, or if it
    cannot be downloaded.
    """
    from utils.distributed.context import torch_distributed_zero_first  # imports torch

    name_or_path = as_address(name_or_path)
    path = Path(os.path.expanduser(name_or_path))
    with torch_distributed_zero_first(ctx):
        if os.path.isfile(path):
            return path
        entry = weights_entry(name_or_path)
        folder = private_folder(cache_dir or cache_folder() / "weights", "the variable XDG_CACHE_HOME")
        target = _download_path(name_or_path, entry, folder)
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
    """Returns the path of the file: its name in the catalog. Files of other URLs, whose names may be equal, have a
    folder each."""
    file_name = Path(url_path(entry.url)).name or "weights.pt"
    if is_http(name_or_path):
        return cache_dir / hashlib.sha256(full_address(entry.url).encode()).hexdigest()[:16] / file_name
    return cache_dir / f"{catalog_name(name_or_path)}{Path(file_name).suffix or '.pt'}"


def _download(entry: WeightsEntry, target: Path) -> None:
    """Logs URL and license, downloads the file and checks it. Raises UserError if it cannot be downloaded."""
    details = [f"license of the file: {entry.license}"]
    if entry.size:
        details.append(f"{entry.size / 1e6:.1f} MB")
    details.append("sha256 known" if entry.sha256 else "no checksum known")
    get_logger().info("downloading %s (%s)", entry.url, "; ".join(details))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_url(entry.url) as response, atomic_write(target) as file:
            _receive(entry, response, file)
    except NETWORK_ERRORS as error:
        raise UserError(f"{entry.url}: cannot be downloaded ({reason_of(error)}); put the file at {target}") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from None


def _receive(entry: WeightsEntry, response: HTTPResponse, file: BinaryIO) -> None:
    """Writes the content of a response to a new file. Raises UserError if it is a web page or has another checksum than
    ``entry``, and ConnectionError if it is cut off."""
    digest = hashlib.sha256()
    max_bytes = entry.size or MAX_BYTES
    while chunk := response.read(CHUNK_BYTES):
        if not file.tell() and chunk.lstrip()[:1] == b"<":
            raise UserError(f"{entry.url}: the server sent a web page, not weights")
        if file.tell() + len(chunk) > max_bytes:
            raise UserError(f"{entry.url}: is larger than {max_bytes:,} bytes")
        file.write(chunk)
        digest.update(chunk)
    if response.length or not file.tell():
        raise ConnectionError(f"cut off after {file.tell()} bytes")
    if entry.sha256 and digest.hexdigest() != entry.sha256.lower():
        raise UserError(f"{entry.url}: has sha256 {digest.hexdigest()}, expected {entry.sha256}")
