"""Serves a camera's stream of JPEG images over HTTP on this machine, which drops as a test says."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np
import pytest


@contextlib.contextmanager
def serve_mjpeg(connections: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the URL of a stream, whose n-th connection ends after ``connections[n]`` frames, 50 a second. Later
    connections are refused with 503."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    remaining = iter(connections)
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    jpeg = cv2.imencode(".jpg", pixels)[1].tobytes()

    class Camera(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            frames = next(remaining, None)
            if frames is None:
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for _ in range(frames):
                    self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg))
                    self.wfile.write(jpeg + b"\r\n")
                    time.sleep(0.02)

    with ThreadingHTTPServer(("127.0.0.1", 0), Camera) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://me:secret@127.0.0.1:{server.server_address[1]}/live.mjpg"
        finally:
            server.shutdown()
            thread.join()
