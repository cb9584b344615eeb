"""Reads objects of stores (``s3://``, ``gs://``, ``az://``, ``https://``) through files on the local disk.

A process of its own talks to the stores (`utils.store.server`). It is started when it is first needed, and forked
children, such as loader workers, use that of their parent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files.folders import cache_folder
from utils.files.safe_io import read_text, write_whole
from utils.logger import get_logger
from utils.machine.limits import require_package

PATIENCE_S = 600.0  # how long a run waits for a store that does not answer
_PAUSE_S = 1.0
_URL = re.compile(r"(s3|s3a|gs|az|azure|abfs|abfss|https?)://[^/]+")
_ADVICE = "check the address of what data.shard has written, and the credentials (environment variables, or ~/.aws)"
FOLDER = "stores"  # of the cache folder
_ORIGIN = "origin.json"  # in a folder of the cache that mirrors one of a store
_starting = threading.Lock()
_servers: list[tuple[subprocess.Popen, str]] = []  # the last one is in use, unless it was killed


def is_url(text: str) -> bool:
    """Whether ``text`` is the address of an object or folder in a store."""
    return _URL.match(text) is not None


def mirrored(url: str, cache_dir: str) -> Path:
    """A local copy of the small file ``url``, read anew when it has changed. Files beside it in the store are copied to
    its folder by `refresh`. Raises UserError."""
    require_package("obstore", url, "copy the data set to a local disk")
    base, _, name = url.rpartition("/")
    folder = cache_folder(cache_dir) / FOLDER / hashlib.blake2b(base.encode(), digest_size=12).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _ORIGIN, json.dumps({"url": base}))
    except OSError as error:
        raise UserError(f"{folder}: {str(error.strerror).lower()}; name a writable folder with --cache-dir") from None
    return refresh(folder / name)


def refresh(path: Path) -> Path:
    """Reads a file of a `mirrored` folder anew if it is missing or has changed. Leaves other files alone."""
    base = origin_of(path.parent)
    if base:
        url, tag_file = f"{base}/{path.name}", path.with_name(f"{path.name}.tag")
        tag = _ask(url, 0.0, {"what": "tag"})[0]
        if not path.exists() or not tag_file.exists() or read_text(tag_file) != tag:
            os.close(fetch(url, path, again=True, patience_s=0.0))
            write_whole(tag_file, tag)
    return path


def forget(path: Path) -> None:
    """Makes the next `refresh` read a file anew, which is damaged."""
    with contextlib.suppress(OSError):
        path.with_name(f"{path.name}.tag").unlink()


@functools.lru_cache(maxsize=64)
def origin_of(folder: Path) -> str:
    """The address of a mirrored folder; "" for others."""
    with contextlib.suppress(UserError, ValueError, KeyError, TypeError):
        url = json.loads(read_text(folder / _ORIGIN))["url"]
        return url if is_url(url) else ""
    return ""


def fetch(
    url: str,
    path: Path,
    start: int | None = None,
    stop: int = 0,
    *,
    again: bool = False,
    limit: int = 0,
    patience_s: float | None = None,
) -> int:
    """An open file with bytes ``start`` to ``stop`` of ``url``, or without ``start`` with all of them.

    Args:
        path: the file. It may be removed when this function returns.
        again: read the object, even if the file exists.
        limit: bytes that the files of the folder above may take, of which the least recently used are removed; 0: any.
        patience_s: how long to wait for a store that does not answer; None: `PATIENCE_S`.

    Raises UserError.
    """
    request = {"what": "file", "path": str(path), "start": start, "stop": stop, "again": again, "limit": limit}
    return _ask(url, PATIENCE_S if patience_s is None else patience_s, request)[1][0]


def _ask(url: str, patience_s: float, request: dict[str, Any]) -> tuple[Any, list[int]]:
    """The result of a request about ``url``, and the files that came with it."""
    deadline = time.monotonic() + patience_s
    while True:
        answer, files = _send(json.dumps(request | {"url": url}).encode() + b"\n")
        reason = answer.get("error")
        if reason is None:
            return answer.get("result"), files
        if not answer.get("wait"):
            raise UserError(f"{url}: {reason}{'' if answer.get('local') else f'; {_ADVICE}'}")
        if answer.get("is_first") and patience_s:
            text = "%s: cannot be read (%s); waiting for up to %g minutes"
            get_logger().warning(text, url, reason, patience_s / 60)
        if time.monotonic() >= deadline:
            waited, advice = f" for {patience_s / 60:g} minutes", "the run continues with --resume"
            if not patience_s:
                waited, advice = "", _ADVICE
            raise UserError(f"{url}: cannot be read{waited} ({reason}); {advice}")
        time.sleep(_PAUSE_S)


def _send(line: bytes) -> tuple[dict[str, Any], list[int]]:
    for _ in range(3):  # the server may be killed
        address = _address()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(line)
            start, files, _, _ = socket.recv_fds(connection, 1, 1)
            with connection.makefile("rb") as rest:
                text = start + rest.readline()
            if text.endswith(b"\n"):
                return json.loads(text), files
        with _starting:
            _servers[:] = [each for each in _servers if each[1] != address]
    raise UserError("the process that reads object stores ends again and again; the lines above may say why")


def _address() -> str:
    """The address of the server, which is started if necessary."""
    with _starting:
        if not _servers:
            address = os.path.join(tempfile.mkdtemp(prefix="lockstep-"), "socket")
            command = [sys.executable, str(Path(__file__).with_name("server.py")), address]
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )  # not to be ended by Ctrl-C, after which a run still needs images
            server.stdout.readline()
            _servers.append((server, address))
        return _servers[-1][1]
