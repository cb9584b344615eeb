"""Implements detect.py: detection on images, videos and streams."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np

from engine.inference.detect_output import ResultFiles
from engine.inference.detector import FrameDetections, ImageDetector, detect_frames
from engine.inference.drawing import Window, describe_counts, draw_detections
from engine.inference.label_writers import written_suffix
from engine.inference.model import autocast_type
from engine.inference.open_model import open_weights
from engine.inference.settings import DetectionSettings, warn_of_unused_flags
from engine.inference.sources import FileProblem, ReadAhead, SourceOptions, open_source
from engine.inference.tracks import ObjectTracks
from models.postprocess.tiles import Tiles
from utils.class_names import typed_classes
from utils.config.settings import DetectConfig
from utils.drawing.draw import encode_image
from utils.errors import UserError, one_line, os_reason
from utils.files.new_folder import check_run_dir
from utils.logger import LINE_EVERY_S, configure_logging, get_logger, terminal_bars
from utils.machine.packages import require_installed
from utils.machine.threads import map_ahead
from utils.pixels import as_rgb8
from utils.strings import counted

# A frame with its detections or its problem; the drawing, uint8 (H, W, 3) RGB; and the drawing as an image file.
DrawnFrame: TypeAlias = tuple[FrameDetections | FileProblem, np.ndarray | None, bytes]
LOGGED_FRAMES = 5  # each of the first frames gets a line; the later ones share one


def detect(config: DetectConfig) -> Path | None:
    """Runs the detector over the source. Returns the folder with the results, None if there are no files to write.

    Files that cannot be read, or whose results cannot be written, are logged and skipped if there are several; a
    UserError at the end counts them. At an error or a signal, the files of all frames before it are complete.
    """
    check_run_dir(config.project, config.name, config.exist_ok)
    if config.track:
        require_installed(["trackers"], f"--track {config.track}", "leave out --track")
    configure_logging(True)
    model = open_weights(
        config.weights, device=config.device, nms=config.nms, offline=config.offline, trust=config.trust
    )
    settings = DetectionSettings(
        imgsz=config.imgsz,
        conf=config.conf_thres,
        iou=config.iou_thres,
        box_voting=config.box_voting,
        max_det=config.max_det,
        classes=typed_classes(config.classes),
        agnostic=config.agnostic_nms,
    ).resolve(model)
    threshold = settings.selection.conf_thres
    detector = ImageDetector(model, autocast_type(model, config.amp), Tiles.from_config(config, model.tile))
    if config.conf_thres is None:
        reason = "the weights store no better one" if model.confidence is None else "the best F1 in validation"
        get_logger().info("confidence threshold %.4g: %s (--conf-thres sets another)", threshold, reason)
    warn_of_unused_flags(model, nms=config.nms, box_voting=config.box_voting, iou=settings.selection.iou_thres)

    # The window shows a frame before the next one is processed.
    ahead = ReadAhead(0 if config.view_img else detector.images_at_once())
    tracks = ObjectTracks(config.track, threshold, vid_stride=config.vid_stride) if config.track else None
    options = SourceOptions(
        vid_stride=config.vid_stride,
        max_frames=config.max_frames,
        threads=detector.threads,
        ahead=ahead,
        pixels=model.pixels,
        in_sequences=tracks is not None,
    )
    frames = open_source(config.source, options)
    results = _Results(config, model.names)
    stream = detect_frames(frames, detector, settings, ahead=ahead, tracks=tracks, skipped=results.failed)
    with contextlib.closing(stream):
        results.take(stream, threads=detector.threads, ahead=ahead)
    results.summarize()
    return results.files.folder


class _Results:
    """Draws, logs and writes the detections of a source."""

    def __init__(self, config: DetectConfig, names: tuple[str, ...]) -> None:
        self.files = ResultFiles(names, config)
        self.failed: dict[str, str] = {}  # files that could not be used, and why
        self._config = config
        self._names = names
        self._log = FrameLog(names, config)
        self._seen: set[str] = set()  # files that had frames

    def take(self, stream: Iterator[FrameDetections | FileProblem], *, threads: int, ahead: ReadAhead) -> None:
        """Takes all frames of ``stream``, or those until the user closes the window."""
        with contextlib.ExitStack() as stack:
            # On exit, waits for the files that are being written, then completes them.
            window = stack.enter_context(contextlib.closing(Window())) if self._config.view_img else None
            stack.enter_context(contextlib.closing(self._log))
            stack.enter_context(contextlib.closing(self.files))
            drawn = stack.enter_context(contextlib.closing(map_ahead(self._draw, stream, threads=threads, ahead=ahead)))
            written = stack.enter_context(contextlib.closing(map_ahead(self._write, drawn, threads=1, ahead=ahead)))
            for item, drawing, _ in written:
                if window is None or drawing is None or isinstance(item, FileProblem):
                    continue
                if not window.show(drawing, wait=not item.frame.is_video):
                    break

    def summarize(self) -> None:
        """Logs the totals. Raises UserError if files could not be used."""
        self._log.summarize()
        if self.files.folder is not None:
            get_logger().info("results are in %s", self.files.folder)
        if self.failed:
            first = next(iter(self.failed.values()))
            count = len(self._seen | self.failed.keys())
            raise UserError(f"{len(self.failed)} of {count} files could not be used (first: {first})")

    def _draw(self, item: FrameDetections | FileProblem) -> DrawnFrame:
        config = self._config
        if isinstance(item, FileProblem) or (config.nosave and not config.view_img):
            return item, None, b""
        frame = item.frame
        try:
            drawing = draw_detections(
                as_rgb8(frame.image),
                item.table.boxes_xyxy_px,
                classes=item.table.classes,
                scores=None if config.hide_conf else item.table.scores,
                tracks=item.tracks,
                names=None if config.hide_labels else self._names,
                line_width=config.line_thickness,
            )
            if config.nosave or frame.is_video:
                return item, drawing, b""
            return item, drawing, encode_image(drawing, written_suffix(frame.path), frame.path)
        except Exception as error:
            return problem_of(error, frame.path), None, b""

    def _write(self, drawn: DrawnFrame) -> DrawnFrame:
        """Logs and writes the next frame, and notes the problems."""
        item, drawing, encoded = drawn
        if isinstance(item, FrameDetections) and item.frame.path not in self.failed:
            self._seen.add(item.frame.path)
            self.files.open_folder()
            try:
                self._log.add(item)
                self.files.add(item, drawing, encoded)
            except Exception as error:
                item = problem_of(error, item.frame.path)
        if isinstance(item, FileProblem) and item.path not in self.failed:  # a video may have failed already
            item.log()
            if item.is_skipped:
                self.failed[item.path] = item.reason
        return item, drawing, b""


def problem_of(error: Exception, path: str) -> FileProblem:
    """Returns why a file failed. Raises ``error`` if its cause is not that file: a full disk, or a bug."""
    if isinstance(error, UserError):
        reason = str(error)
    elif isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
        reason = f"{path}: its results cannot be written ({os_reason(error)})"
    elif isinstance(error, MemoryError | cv2.error):
        reason = f"{path}: drawing or writing failed ({getattr(error, 'err', '') or error})"
    else:
        raise error
    return FileProblem(path, reason, is_skipped=True)


class FrameLog:
    """Logs a line for each of the first frames and the totals. The frames between update one line of a terminal, or
    are a line every `LINE_EVERY_S` elsewhere."""

    def __init__(self, names: tuple[str, ...], config: DetectConfig) -> None:
        self._names = names
        self._config = config
        self._counts: Counter[int] = Counter()  # detections by class
        self._tracks: set[tuple[str, int]] = set()  # sequences and ids
        self._frames = 0
        self._milliseconds = 0.0
        self._logged_at = time.monotonic()
        self._unit = "image"
        self._bar: Any = None  # the line of the terminal

    def add(self, item: FrameDetections) -> None:
        """Counts a frame, and shows it unless ``quiet``."""
        frame = item.frame
        milliseconds = sum(item.speed.values())
        counts: Counter[int] = Counter(item.table.classes.tolist())
        self._counts += counts
        if item.tracks is not None:
            self._tracks.update((frame.sequence, track) for track in item.tracks.tolist())
        self._frames += 1
        self._milliseconds += milliseconds
        name = frame.path
        if frame.is_video:
            self._unit = "frame"
            name += f" frame {frame.index}"  # as in predictions.json
            if frame.total is not None and frame.index < frame.total:  # the total is an estimate
                name += f" of {frame.total}"
        if self._config.quiet:
            return
        line = f"{name}: {describe_counts(counts, self._names)} ({milliseconds:.1f} ms)"
        if self._frames <= LOGGED_FRAMES:
            get_logger().info("%s", line)
            return
        line = f"{counted(self._frames, self._unit)}, now {line}"
        bars = terminal_bars(sys.stdout)
        if bars is not None:
            if self._bar is None:
                self._bar = bars(bar_format="{desc}", dynamic_ncols=True, leave=False, file=sys.stdout)
            self._bar.set_description_str(one_line(line))
        elif time.monotonic() - self._logged_at >= LINE_EVERY_S:
            self._logged_at = time.monotonic()
            get_logger().info("%s", line)

    def close(self) -> None:
        """Removes the line of the terminal."""
        if self._bar is not None:
            self._bar.close()

    def summarize(self) -> None:
        """Logs the totals."""
        totals = describe_counts(self._counts, self._names)
        if self._config.track:
            totals += f" in {counted(len(self._tracks), 'track')}"
        mean_ms = self._milliseconds / max(self._frames, 1)
        get_logger().info("%s: %s; %.1f ms each", counted(self._frames, self._unit), totals, mean_ms)
