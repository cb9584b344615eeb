"""HTTP servers on this machine."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


@contextlib.contextmanager
def serve(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """Yields a server whose requests ``handler`` answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def serve_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the URL of an HTTP server for ``folder``, including the login that it requires for images."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

        def send_head(self):
            if "moved" in self.path:
                self.send_response(302)
                self.send_header("Location", "s3://bucket/w.pt?signature=t0ken")
                self.end_headers()
                return None
            login = "Basic " + base64.b64encode(b"me:s cret").decode()
            is_open = "mp4" in self.path or "page" in self.path
            if is_open or self.headers.get("Authorization") == login:
                return super().send_head()
            return self.send_error(401)

        def guess_type(self, path) -> str:
            return "image/jpeg" if str(path).endswith("photo") else super().guess_type(path)

    with serve(partial(Quiet, directory=str(folder))) as server:
        yield f"http://me:s%20cret@127.0.0.1:{server.server_port}"
