"""Reads object stores for another process and its forks, which ask over a Unix socket (`utils.store.client`).

obstore is used in this process only, because the threads of its runtime do not survive a fork: loader workers of a
process that has used it would hang. Nothing of this program is imported here. The process ends when all processes that
hold its standard input have ended.

A request is a line of JSON, and so is the answer. The answer to a request for bytes carries an open file that has them:
a file of the cache, which stays readable when it is removed to make room.
"""

from __future__ import annotations

import configparser
import contextlib
import datetime
import fcntl
import json
import os
import re
import resource
import shutil
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import obstore
from obstore.exceptions import GenericError
from obstore.store import HTTPStore, from_url

_SWEEPS = 64  # a part of the limit that may be written before files are removed
_KEPT = 0.9  # of the limit, when files are removed
_UNFINISHED_S = 3600.0  # a temporary file of this age is left from a process that was killed
_PIECE = 1 << 26  # bytes that are requested at once
_MEMORY = 1 << 32  # bytes that this process may take, whatever a store answers
_MADE = re.compile(r"\d{5,}-\d+-\d+(\.[0-9a-f]{8}\.tmp)?")  # names of blocks, see `utils.store.shards`
_RETRIES = {
    "max_retries": 5,
    "backoff": {
        "init_backoff": datetime.timedelta(seconds=0.1),
        "max_backoff": datetime.timedelta(seconds=3),
        "base": 2,
    },
    "retry_timeout": datetime.timedelta(seconds=15),
}
_CLIENT = {"timeout": "60s", "connect_timeout": "5s", "allow_http": True}
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: ((\d+)[\w ]*)")
_WORTH_WAITING = {"408", "429"}  # and 5xx
_AWS = {  # names in AWS's files, and of the variables that replace them
    "aws_access_key_id": "AWS_ACCESS_KEY_ID",
    "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "aws_session_token": "AWS_SESSION_TOKEN",
    "region": "AWS_REGION",
    "endpoint_url": "AWS_ENDPOINT_URL",
}


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: str) -> None:
        super().__init__(address, Handler)
        self.stores: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.writing = [threading.Lock() for _ in range(256)]  # by hash of a path: what two ask for is read once
        self.written: dict[str, int] = {}  # bytes since files were removed, by folder
        self.is_waiting = False  # for a store that does not answer

    def open(self, url: str) -> tuple[Any, str]:
        """The store of ``url``, and the key of the object in it."""
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        base = f"{scheme}://{bucket}"
        with self.lock:
            if base not in self.stores:
                if scheme in ("http", "https"):
                    store = HTTPStore.from_url(base, client_options=_CLIENT, retry_config=_RETRIES)
                else:
                    store = from_url(base, client_options=_CLIENT, retry_config=_RETRIES)
                self.stores[base] = store
            return self.stores[base], key

    def file(self, path: Path, url: str, start: int, stop: int, tag: str, again: bool, limit: int) -> int:
        """An open file with bytes ``start`` to ``stop`` of ``url``. It is the file at ``path``, unless that has to be
        read ``again``."""
        with self.writing[hash(path) % len(self.writing)]:
            if not again:
                with contextlib.suppress(FileNotFoundError):
                    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
            try:
                with open(temporary, "xb") as file:
                    with contextlib.suppress(OSError):  # a file system without locks
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # while it is written
                    for first in range(start, stop, _PIECE):
                        self.copy(url, first, min(first + _PIECE, stop), tag, file)
                handle = os.open(temporary, os.O_RDONLY)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        if limit:
            self.make_room(path.parents[1], stop - start, limit)
        return handle

    def copy(self, url: str, start: int, stop: int, tag: str, file: BinaryIO) -> None:
        """Appends bytes of ``url`` to ``file``; not more than these, whatever the store sends."""
        store, key = self.open(url)
        answer, left = obstore.get(store, key, options={"range": (start, stop)}), stop - start
        if tag and _tag(answer.meta) != tag:
            raise GenericError("has changed while it was read")
        for part in answer.stream(min_chunk_size=1 << 20):
            left -= len(part)
            if left < 0:
                break
            file.write(part)
        if left:
            raise GenericError("an answer of another length")

    def make_room(self, folder: Path, size: int, limit: int) -> None:
        """Counts ``size`` new bytes below ``folder``. Removes the least recently used files if they may be too many."""
        key = str(folder)
        with self.lock:
            self.written[key] = self.written.get(key, limit) + size  # the first time, others may have filled it
            if self.written[key] <= limit / _SWEEPS:
                return
            self.written[key] = 0
        files = []
        for path in folder.glob("*/*"):
            if not _MADE.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError):
                status = path.lstat()
                if path.suffix != ".tmp" or time.time() - status.st_mtime > _UNFINISHED_S:  # else it is being written
                    files.append((status.st_mtime, status.st_blocks * 512, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files) if total > limit else ():
            if total <= _KEPT * limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def tag(self, url: str) -> tuple[str, int]:
        """What changes with the object, "" if nothing does, and its size in bytes."""
        store, key = self.open(url)
        meta = obstore.get(store, key, options={"range": (0, 1)}).meta  # the answer to HEAD would have no reason
        return _tag(meta), meta["size"]


class Handler(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        answer, files = {}, []
        try:
            match request.pop("what"):
                case "file":
                    files = [self.server.file(Path(request.pop("path")), **request)]
                case "tag":
                    answer["result"] = self.server.tag(**request)
            self.server.is_waiting = False
        except OSError as error:  # NotFoundError and PermissionDeniedError, too
            answer["local"] = bool(error.strerror)  # the cache's disk is full
            answer["error"] = f"{error.filename}: {error.strerror}" if error.strerror else _reason(error)[0]
        except BaseException as error:  # PanicException, too
            answer["error"], answer["wait"] = _reason(error)
            answer["is_first"], self.server.is_waiting = not self.server.is_waiting, answer["wait"]
        line = json.dumps(answer).encode() + b"\n"
        with contextlib.suppress(OSError):  # the client was killed
            socket.send_fds(self.request, [line[:1]], files)
            self.request.sendall(line[1:])
        for handle in files:
            os.close(handle)


def _tag(meta: dict[str, Any]) -> str:
    modified = meta["last_modified"].timestamp()
    return f"{meta['e_tag']} {meta['size']} {modified}" if meta["e_tag"] or modified else ""


def _reason(error: BaseException) -> tuple[str, bool]:
    """Why a store refuses, in a line, and whether it may answer later."""
    text = str(error)
    if "169.254." in text or "metadata.google" in text:
        return "no credentials found", False
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        reason = f"{status[1].strip()}{f', {code[1]}' if code else ''}"
        return reason, status[2] in _WORTH_WAITING or status[2][0] == "5"
    if isinstance(error, PermissionError):
        return "access denied", False
    if isinstance(error, FileNotFoundError):
        return "no such object", False
    first = text.partition("\n")[0]
    return first.rpartition(": ")[2][:200] or first[:200], type(error) is GenericError  # the network's


def _read_aws_files() -> None:
    """Sets the variables that `aws configure` has written to files instead."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return
    parser = configparser.RawConfigParser()
    folder, profile = Path("~/.aws").expanduser(), os.environ.get("AWS_PROFILE", "default")
    files = (os.environ.get("AWS_CONFIG_FILE", folder / "config"),
             os.environ.get("AWS_SHARED_CREDENTIALS_FILE", folder / "credentials"))  # fmt: skip
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read(files)
    for section in (f"profile {profile}", profile):
        for name, variable in _AWS.items():
            if parser.has_option(section, name):
                os.environ.setdefault(variable, parser.get(section, name))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(os.path.dirname(sys.argv[1]), ignore_errors=True)
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    _read_aws_files()
    with Server(sys.argv[1]) as server:
        print("ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
