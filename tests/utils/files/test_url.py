"""Requests: logins and redirects by host, and how much of an answer is read."""

import base64
import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.helpers.messages import refused
from utils.files.url import open_url, read_url


class Server:
    """An HTTP server that redirects or answers with ten bytes, and notes the logins that it gets."""

    def __init__(self, redirect: str = "") -> None:
        self.logins: dict[str, str | None] = {}
        self.announced = 10  # bytes, in Content-Length
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.logins[self.path] = self.headers.get("Authorization")
                self.send_response(302 if self.path == "/first" else 200)
                if self.path == "/first":
                    self.send_header("Location", redirect)
                self.send_header("Content-Length", str(server.announced))
                self.end_headers()
                self.wfile.write(b"0123456789")

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.http.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator["Server"]:
        thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.http.shutdown()
            thread.join()
            self.http.server_close()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


def test_a_login_is_not_sent_to_another_host():
    login = "Basic " + base64.b64encode(b"me:secret").decode()
    with Server().running() as other, Server(f"http://{other.host}/second").running() as first:
        with open_url(f"http://me:secret@{first.host}/first") as response:
            assert response.read() == b"0123456789"
        assert first.logins == {"/first": login}
        assert other.logins == {"/second": None}
    with Server("/second").running() as server:
        with open_url(f"http://me:secret@{server.host}/first") as response:
            assert response.read() == b"0123456789"
        assert server.logins == {"/first": login, "/second": login}


def test_an_answer_is_whole_and_not_too_large():
    with Server().running() as server:
        address = f"http://{server.host}/file"
        assert read_url(address, max_bytes=10) == b"0123456789"
        with refused(f"{address}: is larger than 9 bytes"):
            read_url(address, max_bytes=9)
        server.announced = 20
        with refused(f"{address}: cannot be downloaded (cut off after 10 bytes)"):
            read_url(address, max_bytes=20)
