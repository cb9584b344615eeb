"""Implements detect.py: detection on images, videos and streams."""

from __future__ import annotations

import contextlib
import errno
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import cv2

from engine.commands.result_files import DrawnFrame, ResultFiles
from engine.inference.detection_stream import Detected, DetectionStream
from engine.inference.detection_writer import Window, written_suffix
from engine.inference.frames import FileProblem
from engine.inference.object_tracks import ObjectTracks, check_sequence
from engine.inference.predictor import Predictor, open_weights
from engine.inference.results import describe_counts, label_texts
from engine.inference.source_files import source_files
from engine.run.new_folder import check_run_dir, increment_path
from engine.run.previous_run import remove_written
from models.postprocess.tiles import Tiles
from utils.config.checks import typed_classes
from utils.config.settings import DetectConfig
from utils.detections import DetectionTable
from utils.drawing.draw import class_colors, draw_boxes, encode_image
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.machine.packages import require_installed
from utils.machine.threads import map_ahead
from utils.pixels import as_rgb8
from utils.strings import counted, listed

LOGGED_FRAMES = 20  # each of the first frames gets a line, later ones at most one every `LINE_EVERY_S`
LINE_EVERY_S = 5.0


def detect(config: DetectConfig) -> Path | None:
    """Runs the detector over the source. Returns the folder with the results, None if there are no files to write.

    Files that cannot be read, or whose results cannot be written, are logged and skipped if there are several; a
    UserError at the end counts them.
    """
    check_run_dir(config.project, config.name, config.exist_ok)
    if config.track:
        check_sequence(config.source)
        require_installed(["trackers"], f"--track {config.track}", "leave out --track")
    predictor = _open_predictor(config)
    with contextlib.ExitStack() as stack:
        # At its end: waits for the files that are being written, then closes them, then the source.
        stream = stack.enter_context(_open_stream(predictor, config))
        window = stack.enter_context(contextlib.closing(Window())) if config.view_img else None
        output = stack.enter_context(contextlib.closing(Output(stream, predictor.model.names, config)))
        written = stack.enter_context(contextlib.closing(output.draw_and_write(predictor.threads)))
        for item in written:
            if window is None or item is None or item.drawing is None:
                continue
            if not window.show(item.drawing, wait=not item.detected.frame.is_video):
                break
    output.summarise()
    output.failures.raise_error()
    return output.run_dir


def _open_stream(predictor: Predictor, config: DetectConfig) -> DetectionStream:
    """Opens the source; with ``--track``, for detections that belong to tracks."""
    settings = predictor.settings.resolve(predictor.model)
    tracks = None
    if config.track is not None:
        tracks = ObjectTracks(config.track, settings.conf, vid_stride=config.vid_stride)
    return predictor.open_stream(
        config.source,
        settings=settings,
        tracks=tracks,
        reads_ahead=not config.view_img,  # the window shows a frame before the next one is processed
        vid_stride=config.vid_stride,
        max_frames=config.max_frames,
    )


def writes_files(config: DetectConfig) -> bool:
    """Returns whether the flags ask for any file. A run without files needs no folder, and uses up no number."""
    return not config.nosave or config.save_txt or config.save_json or config.save_crop


def _open_predictor(config: DetectConfig) -> Predictor:
    """Opens the predictor with the flags. Logs its threshold, and flags that do nothing."""
    configure_logging(True)
    model = open_weights(
        config.weights, device=config.device, nms=config.nms, offline=config.offline, trust=config.trust
    )
    predictor = Predictor(
        model,
        imgsz=config.imgsz,
        conf=config.conf_thres,
        iou=config.iou_thres,
        box_voting=config.box_voting,
        max_det=config.max_det,
        classes=typed_classes(config.classes),
        agnostic=config.agnostic_nms,
        amp=config.amp,
        tiles=Tiles.from_config(config, model.tile) or False,
    )
    if config.conf_thres is None:
        conf = predictor.settings.resolve(model).conf
        if model.confidence is None:
            threshold = f"{conf:g}: {config.weights} does not store a better one"
        else:
            threshold = f"{conf:.3f}, of the best F1 in validation"
        get_logger().info("confidence threshold %s (--conf-thres sets another)", threshold)
    if config.nms and model.ignores_nms:
        get_logger().warning("%s: --nms does nothing: the model has one branch", config.weights)
    if not config.box_voting and predictor.settings.resolve(model).iou is None:
        get_logger().warning("%s: --no-box-voting does nothing: its detections need no NMS", config.weights)
    return predictor


def _open_folder(config: DetectConfig) -> Path:
    """Creates the folder for the results. With ``--exist-ok``, it removes the files that an earlier run has written
    there, so that they do not lie beside the new ones. Raises UserError if a file of the source is in the folder."""
    folder = increment_path(config.project, config.name, config.exist_ok)
    inside = folder.resolve()
    for path in source_files(config.source) if config.exist_ok else ():
        if path.resolve().is_relative_to(inside):
            raise UserError(f"{path}: is in the folder of the results and could be overwritten; choose another")
    removed = remove_written(folder)
    if removed:
        get_logger().info("%s: %s of an earlier run removed (--exist-ok)", folder, counted(removed, "file"))
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others:
        message = "%s: has files that no run of detect.py lists, which stay beside the new ones: %s"
        get_logger().warning(message, folder, listed(others))
    return folder


def _remove_if_empty(folder: Path) -> bool:
    """Removes a folder into which nothing was written, such as crops where nothing was detected, so that its number is
    free again. Returns whether it is removed."""
    try:
        folder.rmdir()
    except OSError:  # there are files in it
        return False
    return True


def _reason(error: Exception, path: str) -> str:
    """Returns why a file failed. Raises ``error`` if its cause is not that file: a full disk, or a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
        return f"{path}: its results cannot be written ({(error.strerror or str(error)).lower()})"
    if isinstance(error, MemoryError | cv2.error):
        return f"{path}: detection, drawing or writing failed ({getattr(error, 'err', '') or error})"
    raise error


class FrameDrawer:
    """Draws and encodes the boxes of frames, as the flags ask. Several threads may call one."""

    def __init__(self, names: tuple[str, ...], config: DetectConfig) -> None:
        """``names``: of the classes."""
        self._names = names
        self._config = config

    def draw(self, item: Detected | FileProblem) -> DrawnFrame | FileProblem:
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

    def _draw_boxes(self, item: Detected, table: DetectionTable) -> DrawnFrame:
        labels = None
        if not self._config.hide_labels:
            scores = None if self._config.hide_conf else table.scores
            labels = label_texts(self._names, table.classes, scores, item.tracks)
        colors = class_colors(table.classes if item.tracks is None else item.tracks)
        thickness = self._config.line_thickness
        drawing = draw_boxes(as_rgb8(item.frame.image), table.boxes_xyxy_px, labels, colors, thickness=thickness)
        encoded = b""
        if not self._config.nosave and not item.frame.is_video:
            encoded = encode_image(drawing, written_suffix(item.frame.path), item.frame.path)
        is_needed = item.frame.is_video or self._config.view_img
        return DrawnFrame(item, drawing if is_needed else None, encoded)


class FileFailures:
    """Logs and counts the files that could not be used."""

    def __init__(self) -> None:
        self._used: set[str] = set()  # files that had frames
        self._reasons: dict[str, str] = {}  # by file

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


class Output:
    """Draws, logs and writes the frames of a stream and their detections. The stream skips the other frames of a file
    for which that fails.

    Attributes:
        failures: the files that could not be used.
        run_dir: folder of the results; None if there is none.
    """

    def __init__(self, stream: DetectionStream, names: tuple[str, ...], config: DetectConfig) -> None:
        """``names``: of the classes."""
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
            self.run_dir = _open_folder(self._config)
            self._files = ResultFiles(self.run_dir, self._names, self._config)
        self.failures.add_used(path)
        try:
            if isinstance(detected.outcome, Exception):
                raise detected.outcome
            self._log.add(detected, detected.outcome)
            if self._files is not None:
                self._files.add(item, detected.outcome)
        except Exception as error:
            self.failures.add_problem(FileProblem(path, _reason(error, path), is_skipped=True))
            self._stream.skip(path)
            return None
        return item

    def close(self) -> None:
        """Finishes the files that hold several frames."""
        if self._files is not None:
            self._files.close()

    def summarise(self) -> None:
        """Logs the totals and the folder of the results."""
        self._log.summarise()
        if self.run_dir is not None and not self._config.exist_ok and _remove_if_empty(self.run_dir):
            self.run_dir = None
        if self.run_dir is not None:
            get_logger().info("results are in %s", self.run_dir)


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

    def add(self, item: Detected, table: DetectionTable) -> None:
        """Logs a line for each of the first frames, then one every few seconds; with ``quiet``, none."""
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
        is_due = self._frames <= LOGGED_FRAMES or now - self._logged_at >= LINE_EVERY_S
        if is_due and not self._config.quiet:
            self._logged_at = now
            name = frame.path
            if frame.is_video:
                is_within = frame.total is not None and frame.index < frame.total  # the total is an estimate
                of_total = f" of {frame.total}" if is_within else ""
                name += f" frame {frame.index}{of_total}"  # as in predictions.json
            get_logger().info("%s: %s (%.1f ms)", name, describe_counts(counts, self._names), milliseconds)

    def summarise(self) -> None:
        """Logs the totals."""
        totals = describe_counts(self._counts, self._names)
        if self._config.track:
            totals += f" in {counted(len(self._tracks), 'track')}"
        mean_ms = self._milliseconds / max(self._frames, 1)
        get_logger().info("%s: %s; %.1f ms each", counted(self._frames, self._unit), totals, mean_ms)
