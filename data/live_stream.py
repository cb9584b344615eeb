"""The newest picture of a camera or network stream, however slowly it is asked for."""

from __future__ import annotations

import threading

import cv2
import numpy as np


class LiveStream:
    """Reads ``capture`` in a thread and keeps one frame: whoever is slower than the stream misses frames, and never
    sees old ones. Takes over ``capture`` and releases it."""

    def __init__(self, capture: cv2.VideoCapture) -> None:
        self._capture = capture
        self._changed = threading.Condition()
        self._frame: np.ndarray | None = None  # not yet handed out
        self._number = 0  # frames read
        self._ended = False
        self._stop = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop:
            ok, frame = self._capture.read()
            with self._changed:
                self._ended = not ok
                if ok:
                    self._frame = frame
                    self._number += 1
                self._changed.notify()
            if not ok:
                return

    def next(self, timeout_s: float) -> tuple[int, np.ndarray] | None:
        """The number (from 0) and BGR picture of the newest frame not handed out yet; None when the stream has ended.

        Raises TimeoutError when none comes in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._frame is not None or self._ended, timeout_s):
                raise TimeoutError
            frame, self._frame = self._frame, None
            return None if frame is None else (self._number - 1, frame)

    def close(self) -> None:
        self._stop = True
        self._thread.join(timeout=1)
        if not self._thread.is_alive():  # a read that hangs holds on to the capture; the thread ends with the process
            self._capture.release()
