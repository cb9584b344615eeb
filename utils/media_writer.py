"""Annotated pictures and videos to files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import cv2
import numpy as np

from utils.drawing import write_image
from utils.errors import UserError

WRITABLE = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
ROOM_BYTES = 1 << 20


class MediaWriter:
    """Writes into ``run_dir``: images one by one, and the frames of one video after those of another."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self._video: cv2.VideoWriter | None = None
        self._video_path = Path()
        self._size = (0, 0)

    def image(self, stem: str, suffix: str, image: np.ndarray) -> Path:
        """STEM.SUFFIX, or STEM.jpg for kinds that cannot be written. ``image``: uint8 (H, W, 3) RGB."""
        path = self.run_dir / (stem + (suffix if suffix.lower() in WRITABLE else ".jpg"))
        write_image(path, image)
        return path

    def frame(self, stem: str, image: np.ndarray, fps: float) -> Path:
        """One more frame of STEM.mp4; a frame of another size than the first is brought to the first's.

        Raises OSError when the disk is nearly full; what was written until then is playable.
        """
        path = self.run_dir / f"{stem}.mp4"
        self._check_room(path, image.nbytes)
        if self._video is None or path != self._video_path:
            self._open(path, image.shape[:2], fps)
        if image.shape[1::-1] != self._size:
            image = cv2.resize(image, self._size, interpolation=cv2.INTER_AREA)
        self._video.write(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
        return path

    def close(self) -> None:
        """Finishes the open video; without it the file cannot be played."""
        if self._video is not None:
            self._video.release()
            self._video = None

    def _check_room(self, path: Path, frame_bytes: int) -> None:
        """OpenCV says nothing of a full disk, and leaves a file that cannot be played. So the video is finished while
        there is room for its index. Raises OSError."""
        if shutil.disk_usage(self.run_dir).free < ROOM_BYTES + frame_bytes:
            self.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _open(self, path: Path, hw: tuple[int, int], fps: float) -> None:
        self.close()
        self._size, self._video_path = (hw[1], hw[0]), path
        self._video = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, self._size)
        if not self._video.isOpened():
            self._video = None
            raise UserError(f"{path}: this OpenCV cannot write mp4 videos; use --nosave with --save-txt or --save-json")
