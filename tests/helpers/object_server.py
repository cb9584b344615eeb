"""A server of a folder in the manner of S3, whose answers can be faulty."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from utils.store import client

FAULTS = ("500", "503", "429", "slow", "cut", "reset", "flip", "empty", "long")


class ObjectServer(ThreadingHTTPServer):
    """The bucket ``bucket`` has the files of ``folder``. ``faults``: what goes wrong with the next answers that have
    content, by name, of files whose names end in ``faulty``."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.faults, self.faulty, self.is_down = folder, [], ".tar", False
        self.answers = threading.Event()  # unless it is cleared, in which case requests wait for it
        self.answers.set()
        self.sizes: dict[str, int] = {}  # false ones, by name
        self.elsewhere = ""  # the address of another server, to which all requests are redirected
        self.has_key = False  # whether the last request had credentials
        self.requests: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()

    @property
    def environment(self) -> dict[str, str]:
        """With which obstore finds the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        server, name = self.server, self.path.partition("?")[0].removeprefix("/bucket/")
        server.requests[f"{self.command} {name}"] += 1
        server.has_key = "Authorization" in self.headers
        if server.elsewhere:
            self.send_response(302)
            self.send_header("Location", server.elsewhere + self.path)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        server.answers.wait()
        if server.is_down:
            return self._refuse(503, "SlowDown")
        if name.startswith("forbidden"):
            return self._refuse(403, "AccessDenied")
        if name.startswith("expired"):
            return self._refuse(400, "ExpiredToken")
        file = server.folder / name
        if not file.is_file():
            return self._refuse(404, "NoSuchBucket" if not self.path.startswith("/bucket/") else "NoSuchKey")
        data, status = file.read_bytes(), 200
        tag = f'"{file.stat().st_mtime_ns:x}"'
        headers = {"ETag": tag, "Last-Modified": "Wed, 01 Jul 2026 10:00:00 GMT", "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range", "").removeprefix("bytes="):
            start, stop = (int(number) for number in wanted.split("-"))
            if start >= len(data):
                return self._refuse(416, "InvalidRange")
            size = server.sizes.get(name, len(data))
            headers["Content-Range"] = f"bytes {start}-{min(stop, size - 1)}/{size}"
            data, status = data[start : stop + 1], 206
        is_faulty = with_content and server.faults and name.endswith(server.faulty)
        fault = server.faults.pop(0) if is_faulty else ""
        server.injected[fault] += 1
        if fault.isdigit():
            return self._refuse(int(fault), "SlowDown")
        if fault == "slow":
            time.sleep(0.5)
        if fault == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault == "long":
            data += data
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault in ("cut", "reset", "empty"):
            self.wfile.write(data[: {"cut": len(data) // 2, "reset": 1, "empty": 0}[fault]])
            self.close_connection = True
        elif with_content:
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def object_server(folder: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> Iterator[ObjectServer]:
    """Serves ``folder``. The environment names the server, of this process with ``monkeypatch``."""
    with ObjectServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in server.environment.items() if monkeypatch else ():
            monkeypatch.setenv(name, value)
        yield server
        server.shutdown()


@contextmanager
def used_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """`object_server` for this process, whose reader of stores starts anew. Skips the test without obstore."""
    pytest.importorskip("obstore")
    with object_server(folder, monkeypatch) as server:
        client._servers.clear()
        yield server
        for reader, _ in client._servers:
            reader.stdin.close()
        client._servers.clear()
