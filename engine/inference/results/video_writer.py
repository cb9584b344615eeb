"""Writes the frames of videos and streams to mp4 files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import cv2
import numpy as np

from utils.errors import UserError

SPARE_BYTES = 1 << 20


class VideoFiles:
    """Writes frames to mp4 files, one file at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self._video: cv2.VideoWriter | None = None
        self._video_path = Path()
        self._size = (0, 0)

    def path_of(self, stem: str) -> Path:
        """Returns the path of a video."""
        return self.run_dir / f"{stem}.mp4"

    def add(self, stem: str, image: np.ndarray, fps: float) -> Path:
        """Appends a frame to STEM.mp4; a frame that differs in size from the first one is resized.

        Raises OSError while the disk still has space for the index of the video: on a full disk, OpenCV would leave a
        file that cannot be played, without an error.
        """
        path = self.path_of(stem)
        if shutil.disk_usage(self.run_dir).free < SPARE_BYTES + image.nbytes:
            self.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        video = self._video
        if video is None or path != self._video_path:
            height, width = image.shape[:2]
            video = self._open(path, (height, width), fps)
        if image.shape[1::-1] != self._size:
            image = cv2.resize(image, self._size, interpolation=cv2.INTER_AREA)
        video.write(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
        return path

    def close(self) -> None:
        """Finishes the open video, which cannot be played before that."""
        if self._video is not None:
            self._video.release()
            self._video = None

    def _open(self, path: Path, hw: tuple[int, int], fps: float) -> cv2.VideoWriter:
        self.close()
        height, width = hw
        self._size = (width, height)
        self._video_path = path
        # OpenCV writes a frame rate as a fraction with powers of ten, whose numerator MPEG-4 limits to 65,535.
        fps = max(round(fps, 1 if fps > 65 else 3), 0.002)
        video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, self._size)
        if not video.isOpened():
            raise UserError(
                f"{path}: this OpenCV cannot write mp4 videos of {width}x{height} pixels; use --nosave with --save-txt "
                "or --save-json"
            )
        self._video = video
        return video
