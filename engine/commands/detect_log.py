"""The log of detect.py: frames with their detections, and files that could not be used."""

from __future__ import annotations

import errno
import time
from collections import Counter

import cv2

from engine.inference.detection_stream import FrameDetections
from engine.inference.results.drawing import describe_counts
from engine.inference.sources.frames import FileProblem
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable
from utils.errors import UserError, os_reason
from utils.logger import get_logger
from utils.strings import counted

LOGGED_FRAMES = 20  # each of the first frames gets a line, later ones at most one every `FRAME_LINE_EVERY_S`
FRAME_LINE_EVERY_S = 5.0


class FrameLog:
    """Logs frames and their detections, and counts them."""

    def __init__(self, names: tuple[str, ...], config: DetectConfig) -> None:
        self._names = names
        self._config = config
        self._counts: Counter[int] = Counter()  # detections by class
        self._tracks: set[tuple[str, int]] = set()  # sequences and ids
        self._frames = 0
        self._milliseconds = 0.0
        self._logged_at = 0.0
        self._unit = "image"

    def add(self, item: FrameDetections, table: DetectionTable) -> None:
        """Logs a line for each of the first frames, then at most one every few seconds; with ``quiet``, none."""
        frame = item.frame
        milliseconds = sum(item.speed.values())
        counts: Counter[int] = Counter(table.classes.tolist())
        self._counts += counts
        if item.tracks is not None:
            self._tracks.update((frame.sequence, track) for track in item.tracks.tolist())
        self._frames += 1
        self._milliseconds += milliseconds
        if frame.is_video:
            self._unit = "frame"
        now = time.monotonic()
        is_due = self._frames <= LOGGED_FRAMES or now - self._logged_at >= FRAME_LINE_EVERY_S
        if self._frames == LOGGED_FRAMES + 1 and not self._config.quiet:
            get_logger().info("from here on, a line at most every %g s", FRAME_LINE_EVERY_S)
        if is_due and not self._config.quiet:
            self._logged_at = now
            name = frame.path
            if frame.is_video:
                is_within = frame.total is not None and frame.index < frame.total  # the total is an estimate
                of_total = f" of {frame.total}" if is_within else ""
                name += f" frame {frame.index}{of_total}"  # as in predictions.json
            get_logger().info("%s: %s (%.1f ms)", name, describe_counts(counts, self._names), milliseconds)

    def summarize(self) -> None:
        """Logs the totals."""
        totals = describe_counts(self._counts, self._names)
        if self._config.track:
            totals += f" in {counted(len(self._tracks), 'track')}"
        mean_ms = self._milliseconds / max(self._frames, 1)
        get_logger().info("%s: %s; %.1f ms each", counted(self._frames, self._unit), totals, mean_ms)


class FileFailures:
    """Logs and counts the files that could not be used."""

    def __init__(self) -> None:
        self._used: set[str] = set()  # files that had frames
        self._reasons: dict[str, str] = {}  # reasons by file

    def __contains__(self, path: str) -> bool:
        return path in self._reasons

    def add_used(self, path: str) -> None:
        """Counts a file that has frames."""
        self._used.add(path)

    def add_problem(self, problem: FileProblem) -> None:
        """Logs a problem. The file counts as failed if it is skipped."""
        problem.log()
        if problem.is_skipped:
            self._reasons[problem.path] = problem.reason

    def raise_error(self) -> None:
        """Raises UserError if a file has failed."""
        if self._reasons:
            first_reason = next(iter(self._reasons.values()))
            count = len(self._used | self._reasons.keys())
            raise UserError(f"{len(self._reasons)} of {count} files could not be used (first: {first_reason})")


def reason_of(error: Exception, path: str) -> str:
    """Returns why a file failed. Raises ``error`` if its cause is not that file: a full disk, or a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
        return f"{path}: its results cannot be written ({os_reason(error)})"
    if isinstance(error, MemoryError | cv2.error):
        return f"{path}: detection, drawing or writing failed ({getattr(error, 'err', '') or error})"
    raise error
