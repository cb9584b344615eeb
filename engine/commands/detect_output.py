"""The output of detect.py: drawings, lines of the log and files, in the order of the frames."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from engine.commands.detect_files import DrawnFrame, ResultFiles, open_results_folder, remove_if_empty, writes_files
from engine.commands.detect_log import FileFailures, FrameLog, reason_of
from engine.inference.detection_stream import DetectionStream, FrameDetections
from engine.inference.detection_writer import written_suffix
from engine.inference.drawing import draw_detections
from engine.inference.frames import FileProblem
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable
from utils.drawing.draw import encode_image
from utils.logger import get_logger
from utils.machine.threads import map_ahead
from utils.pixels import as_rgb8


class DetectOutput:
    """Draws, logs and writes the frames of a stream and their detections. If that fails for a frame, the stream skips
    the rest of its file.

    Attributes:
        failures: the files that could not be used.
        run_dir: folder of the results; None if there is none.
    """

    def __init__(self, stream: DetectionStream, names: tuple[str, ...], config: DetectConfig) -> None:
        """``names``: class names."""
        self.failures = FileFailures()
        self.run_dir: Path | None = None
        self._stream = stream
        self._names = names
        self._config = config
        self._drawer = FrameDrawer(names, config)
        self._log = FrameLog(names, config)
        self._files: ResultFiles | None = None  # until the first frame; an unreadable source leaves no folder

    def draw_and_write(self, threads: int) -> Generator[DrawnFrame | None, None, None]:
        """Draws in ``threads`` threads and writes in another, while the stream detects in the next frames. Yields each
        frame when it is written, in order; None for a file that has failed."""
        ahead = self._stream.ahead
        drawn = map_ahead(self._drawer.draw, self._stream, threads=threads, ahead=ahead)
        written = map_ahead(self._write, drawn, threads=1, ahead=ahead)
        with contextlib.closing(drawn), contextlib.closing(written):  # closes the last stage first
            yield from written

    def _write(self, item: DrawnFrame | FileProblem) -> DrawnFrame | None:
        """Logs and writes the next frame. Returns it, or None if its file has failed."""
        if isinstance(item, FileProblem):
            self.failures.add_problem(item)
            return None
        detected = item.detected
        path = detected.frame.path
        if path in self.failures:  # a later frame of a video
            return None
        if self._files is None and writes_files(self._config):
            self.run_dir = open_results_folder(self._config)
            self._files = ResultFiles(self.run_dir, self._names, self._config)
        self.failures.add_used(path)
        try:
            if isinstance(detected.outcome, Exception):
                raise detected.outcome
            self._log.add(detected, detected.outcome)
            if self._files is not None:
                self._files.add(item, detected.outcome)
        except Exception as error:
            self.failures.add_problem(FileProblem(path, reason_of(error, path), is_skipped=True))
            self._stream.skip(path)
            return None
        return item

    def close(self) -> None:
        """Finishes the files that hold several frames."""
        if self._files is not None:
            self._files.close()

    def summarize(self) -> None:
        """Logs the totals and the folder of the results."""
        if self.run_dir is not None and not self._config.exist_ok and remove_if_empty(self.run_dir):
            self.run_dir = None
        if self.run_dir is not None and self._files is not None:
            self._files.warn_of_other_names()
        self._log.summarize()
        if self.run_dir is not None:
            get_logger().info("results are in %s", self.run_dir)


class FrameDrawer:
    """Draws and encodes the boxes of frames, as the flags request. Several threads may call it at once."""

    def __init__(self, names: tuple[str, ...], config: DetectConfig) -> None:
        """``names``: class names."""
        self._names = names
        self._config = config

    def draw(self, item: FrameDetections | FileProblem) -> DrawnFrame | FileProblem:
        """Draws a frame. An error becomes the outcome of the frame."""
        if isinstance(item, FileProblem):
            return item
        is_unused = self._config.nosave and not self._config.view_img
        if is_unused or isinstance(item.outcome, Exception):
            return DrawnFrame(item)
        try:
            return self._draw_boxes(item, item.outcome)
        except Exception as error:
            return DrawnFrame(replace(item, outcome=error))

    def _draw_boxes(self, item: FrameDetections, table: DetectionTable) -> DrawnFrame:
        config = self._config
        drawing = draw_detections(
            as_rgb8(item.frame.image),
            table.boxes_xyxy_px,
            classes=table.classes,
            scores=None if config.hide_conf else table.scores,
            tracks=item.tracks,
            names=None if config.hide_labels else self._names,
            line_width=config.line_thickness,
        )
        encoded = b""
        if not config.nosave and not item.frame.is_video:
            encoded = encode_image(drawing, written_suffix(item.frame.path), item.frame.path)
        is_needed = item.frame.is_video or config.view_img
        return DrawnFrame(item, drawing if is_needed else None, encoded)
