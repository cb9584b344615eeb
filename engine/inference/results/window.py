"""Shows images on the screen."""

from __future__ import annotations

import os
import sys

import cv2
import numpy as np

from utils.errors import UserError

_INSTEAD_OF_WINDOW = "leave out --view-img, because drawn images are saved anyway; in Python, use save()"


class Window:
    """A window on the screen that shows one image at a time. Raises UserError where none can be opened."""

    NAME = "lockstep"

    def __init__(self) -> None:
        # Without a display, some builds of OpenCV end the process instead of raising.
        if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise UserError(f"no window can be opened: there is no display; {_INSTEAD_OF_WINDOW}")
        try:
            cv2.namedWindow(self.NAME, cv2.WINDOW_NORMAL)
        except cv2.error:
            raise UserError(f"this OpenCV cannot open windows (a headless build?); {_INSTEAD_OF_WINDOW}") from None

    def show(self, image: np.ndarray, *, wait: bool) -> bool:
        """Shows ``image`` (RGB); with ``wait``, until a key is pressed. Returns False if the key is q or Esc."""
        cv2.imshow(self.NAME, image[..., ::-1])
        return cv2.waitKey(0 if wait else 1) & 0xFF not in (ord("q"), 27)

    def close(self) -> None:
        cv2.destroyWindow(self.NAME)
