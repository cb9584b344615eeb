"""Requests: logins and redirects by host, and how much of an answer is read."""

import base64
import contextlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import pytest

from tests.helpers.http_server import serve
from tests.helpers.messages import refused
from utils.files.url import open_url, read_url


@contextlib.contextmanager
def running(redirect: str = "") -> Iterator[SimpleNamespace]:
    """A server that redirects /first, or answers with ten bytes. Yields its host, the logins that it gets by path, and
    the number of bytes that it announces."""
    state = SimpleNamespace(logins={}, announced=10)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.logins[self.path] = self.headers.get("Authorization")
            self.send_response(302 if self.path == "/first" else 200)
            if self.path == "/first":
                self.send_header("Location", redirect)
            self.send_header("Content-Length", str(state.announced))
            self.end_headers()
            self.wfile.write(b"0123456789")

        def log_message(self, *args: object) -> None:
            pass

    with serve(Handler) as server:
        state.host = f"127.0.0.1:{server.server_port}"
        yield state


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


def test_a_login_is_not_sent_to_another_host():
    login = "Basic " + base64.b64encode(b"me:secret").decode()
    with running() as other, running(f"http://{other.host}/second") as first:
        with open_url(f"http://me:secret@{first.host}/first") as response:
            assert response.read() == b"0123456789"
        assert first.logins == {"/first": login}
        assert other.logins == {"/second": None}
    with running("/second") as server:
        with open_url(f"http://me:secret@{server.host}/first") as response:
            assert response.read() == b"0123456789"
        assert server.logins == {"/first": login, "/second": login}


def test_an_answer_is_whole_and_not_too_large():
    with running() as server:
        address = f"http://{server.host}/file"
        assert read_url(address, max_bytes=10) == b"0123456789"
        with refused(f"{address}: is larger than 9 bytes"):
            read_url(address, max_bytes=9)
        server.announced = 20
        with refused(f"{address}: cannot be downloaded (cut off after 10 bytes)"):
            read_url(address, max_bytes=20)
