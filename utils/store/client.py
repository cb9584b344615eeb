"""Reads objects of stores (``s3://``, ``gs://``, ``az://``, ``https://``) through files on the local disk.

A process of its own talks to the stores (`utils.store.server`). It is started when it is first needed, and forked
children, such as loader workers, use that of their parent.

`data.spec.dataset_yaml.Stores` says which addresses may be read, and `MIRRORS` which folders mirror one.
"""

from __future__ import annotations

import contextlib
import glob
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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from utils.errors import UserError, one_line
from utils.files.folders import cache_folder
from utils.files.safe_io import flock, make_own_folder, read_text, remove_abandoned, write_whole
from utils.logger import get_logger
from utils.machine.limits import require_package
from utils.store.address import MIRRORS, store_of

PATIENCE_S = 600.0  # how long a run waits for a store that does not answer
_PAUSE_S = 1.0
_ADVICE = "check the address of what tools.shard has written, and the credentials (environment variables, or ~/.aws)"
FOLDER = "stores"  # of the cache folder
MOST_BYTES = {".yaml": 1 << 24, ".yml": 1 << 24, ".shards": 1 << 36}  # of a file that is read whole
_PREFIX = "lockstep-store-"  # of the folder of a server, in that of temporary files
_UNFINISHED_S = 60.0  # a file that is being written is locked at this age
_SILENT_S = 10.0  # after which a line says that a store has not answered
_starting = threading.Lock()
_servers: list[tuple[subprocess.Popen, str]] = []  # the last one is in use, unless it was killed


def mirrored(url: str, cache_dir: str) -> Path:
    """A local copy of the small file ``url``, read anew when it has changed. Files next to it in the store are copied
    to its folder by `refresh`. Raises UserError."""
    require_package("obstore", url, "copy the data set to a local disk")
    scheme, separator, rest = url.partition("://")
    url = scheme.lower() + separator + rest
    base, _, name = url.rpartition("/")
    if not 0 < len(name.encode("utf-8", "replace")) < 200 or not url.isprintable():  # as a file's name, with a suffix
        raise UserError(f"{url[:200]!r}: not an address of a file")
    if re.match(r"https?://[^/]*@", url):
        raise UserError(
            f"{store_of(url).rpartition('@')[2]}: the address has a password, which checkpoints would store"
        )
    cache = cache_folder(cache_dir).resolve()  # as paths in a YAML are
    folder = cache / FOLDER / hashlib.blake2b(base.encode(), digest_size=12).hexdigest()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            make_own_folder(each)
    except OSError as error:
        reason = str(error.strerror).lower()
        raise UserError(f"{error.filename or folder}: {reason}; name a folder of your own with --cache-dir") from None
    MIRRORS[folder] = base
    return refresh(folder / name)


def refresh(path: Path) -> Path:
    """Reads a file of a `mirrored` folder anew if it is missing or has changed. Leaves other files alone."""
    if base := MIRRORS.get(path.parent):
        url, tag_file = f"{base}/{path.name}", path.with_name(f"{path.name}.tag")
        tag, size = _ask(url, 0.0, {"what": "tag"})[0]
        if not tag or not path.exists() or not tag_file.exists() or read_text(tag_file) != _mark(tag, path.stat()):
            _remove_unfinished(path)
            most = MOST_BYTES.get(path.suffix, 0)
            if size > most:
                raise UserError(f"{url}: has {size:,} bytes, more than such a file can need ({most:,})")
            handle = fetch(url, path, 0, size, tag=tag, again=True, patience_s=0.0)
            with contextlib.suppress(OSError):  # it is read again next time
                write_whole(tag_file, _mark(tag, os.fstat(handle)))
            os.close(handle)
    return path


def _remove_unfinished(path: Path) -> None:
    """Removes copies that killed processes left half written; new ones may not be locked yet."""
    for half in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - half.lstat().st_mtime > _UNFINISHED_S:
                remove_abandoned([half])


def _mark(tag: str, status: os.stat_result) -> str:
    """The tag of an object and the copy that has it: another process may have replaced it by that of another tag."""
    return f"{tag} {status.st_ino} {status.st_mtime_ns}"


def forget(path: Path) -> None:
    """Makes the next `refresh` read a file anew, which is damaged."""
    if path.parent in MIRRORS:
        with contextlib.suppress(OSError):
            path.with_name(f"{path.name}.tag").unlink()


def fetch(
    url: str,
    path: Path,
    start: int,
    stop: int,
    *,
    tag: str = "",
    again: bool = False,
    limit: int = 0,
    patience_s: float | None = None,
) -> int:
    """An open file with bytes ``start`` to ``stop`` of ``url``.

    Args:
        path: the file, in a `mirrored` folder or next to one. It may be removed when this function returns.
        tag: of the object, which must not have changed; "": any.
        again: read the object, even if the file exists.
        limit: bytes that the files of the folder above may take, of which the least recently used are removed; 0: any.
        patience_s: how long to wait for a store that does not answer; None: `PATIENCE_S`.

    Raises UserError.
    """
    request = {"what": "file", "path": str(path), "start": start, "stop": stop}
    request |= {"tag": tag, "again": again, "limit": limit}
    return _ask(url, PATIENCE_S if patience_s is None else patience_s, request)[1][0]


def _ask(url: str, patience_s: float, request: dict[str, Any]) -> tuple[Any, list[int]]:
    """The result of a request about ``url``, and the files that came with it."""
    deadline = time.monotonic() + patience_s
    while True:
        answer, files = _send(url, json.dumps(request | {"url": url}).encode() + b"\n")
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


def _send(url: str, line: bytes) -> tuple[dict[str, Any], list[int]]:
    said = ""
    for _ in range(3):  # the server may be killed
        address = _address()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(line)
            if not wait([connection], _SILENT_S):
                get_logger().warning("%s: no answer after %g s; waiting for it", url, _SILENT_S)
            start, files, _, _ = socket.recv_fds(connection, 1, 1)
            with connection.makefile("rb") as rest:
                text = start + rest.readline()
            if text.endswith(b"\n"):
                return json.loads(text), files
        said = _forget_server(address) or said
    raise UserError(f"{url}: the process that reads object stores ends again and again{said}")


def _forget_server(address: str) -> str:
    """Removes what a server that has ended left. Returns what it said last, for messages."""
    folder, said = Path(address).parent, ""
    with _starting:
        _servers[:] = [each for each in _servers if each[1] != address]
    with contextlib.suppress(UserError):
        lines = [
            line for line in read_text(folder / "log").splitlines() if line.strip() and not line.startswith("note:")
        ]
        said = f" ({one_line(lines[-1])[:200]})" if lines else ""
    remove_abandoned([folder])
    return said


def _address() -> str:
    """The address of the server, which is started if necessary."""
    with _starting:
        if not _servers:
            remove_abandoned(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
            folder = tempfile.mkdtemp(prefix=_PREFIX)
            address = os.path.join(folder, "socket")
            command = [sys.executable, str(Path(__file__).with_name("server.py")), address]
            # A session of its own: not to be ended by Ctrl-C, after which a run still needs images.
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
            lock = os.open(folder, os.O_RDONLY)  # the server's, while it lives
            with contextlib.suppress(OSError):  # a file system without locks
                flock(lock)
            with open(os.path.join(folder, "log"), "wb") as log:
                environment = os.environ | {"RUST_BACKTRACE": "0"}
                server = subprocess.Popen(command, stderr=log, pass_fds=(lock,), env=environment, **pipes)
            os.close(lock)
            server.stdout.readline()
            _servers.append((server, address))
        return _servers[-1][1]
