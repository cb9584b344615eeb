"""Implements detect.py: detection on images, videos and streams."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from engine.commands.detect_drawing import DrawnFrame, FrameDrawer
from engine.commands.detect_files import ResultFiles, open_results_folder, remove_if_empty, writes_files
from engine.commands.detect_log import FileFailures, FrameLog, reason_of
from engine.inference.detection_stream import DetectionStream, open_detection_stream
from engine.inference.image_detector import ImageDetector
from engine.inference.model import InferenceModel, autocast_type
from engine.inference.object_tracks import ObjectTracks
from engine.inference.open_model import open_weights
from engine.inference.results.window import Window
from engine.inference.settings import DetectionSettings, ResolvedSettings, warn_of_unused_flags
from engine.inference.sources.frames import FileProblem
from models.postprocess.tiles import Tiles
from utils.class_names import typed_classes
from utils.config.settings import DetectConfig
from utils.files.new_folder import check_run_dir
from utils.logger import configure_logging, get_logger
from utils.machine.packages import require_installed
from utils.machine.threads import map_ahead


def detect(config: DetectConfig) -> Path | None:
    """Runs the detector over the source. Returns the folder with the results, None if there are no files to write.

    Files that cannot be read, or whose results cannot be written, are logged and skipped if there are several; a
    UserError at the end counts them.
    """
    check_run_dir(config.project, config.name, config.exist_ok)
    if config.track:
        require_installed(["trackers"], f"--track {config.track}", "leave out --track")
    configure_logging(True)
    model = open_weights(
        config.weights, device=config.device, nms=config.nms, offline=config.offline, trust=config.trust
    )
    settings = _settings(config, model)
    detector = _open_detector(config, model)
    _log_threshold(config, model, settings)
    warn_of_unused_flags(model, nms=config.nms, box_voting=config.box_voting, iou=settings.iou)
    with contextlib.ExitStack() as stack:
        # On exit, waits for the files that are being written, then closes them, then the source.
        stream = stack.enter_context(_open_stream(config, detector, settings))
        window = stack.enter_context(contextlib.closing(Window())) if config.view_img else None
        output = stack.enter_context(contextlib.closing(DetectOutput(stream, model.names, config)))
        written = stack.enter_context(contextlib.closing(output.draw_and_write(detector.threads)))
        for item in written:
            if window is None or item is None or item.drawing is None:
                continue
            if not window.show(item.drawing, wait=not item.detected.frame.is_video):
                break
    output.summarize()
    output.failures.raise_error()
    return output.run_dir


def _settings(config: DetectConfig, model: InferenceModel) -> ResolvedSettings:
    """Converts the flags to settings, with the defaults of ``model``."""
    chosen = DetectionSettings(
        imgsz=config.imgsz,
        conf=config.conf_thres,
        iou=config.iou_thres,
        box_voting=config.box_voting,
        max_det=config.max_det,
        classes=typed_classes(config.classes),
        agnostic=config.agnostic_nms,
    )
    return chosen.resolve(model)


def _open_detector(config: DetectConfig, model: InferenceModel) -> ImageDetector:
    return ImageDetector(model, autocast_type(model, config.amp), Tiles.from_config(config, model.tile))


def _log_threshold(config: DetectConfig, model: InferenceModel, settings: ResolvedSettings) -> None:
    """Logs the threshold if no flag sets it."""
    if config.conf_thres is not None:
        return
    if model.is_unscored_branch:
        threshold = f"{settings.conf:g}: training scores the one-to-one branch of {config.weights}"
    elif model.confidence is None:
        threshold = f"{settings.conf:g}: {config.weights} does not store a better one"
    else:
        threshold = f"{settings.conf:.3f}, which has the best F1 in validation"
    get_logger().info("confidence threshold %s (--conf-thres sets another)", threshold)


def _open_stream(config: DetectConfig, detector: ImageDetector, settings: ResolvedSettings) -> DetectionStream:
    """Opens the source, with ``--track`` for detections that are assigned to tracks."""
    tracks = None
    if config.track is not None:
        tracks = ObjectTracks(config.track, settings.conf, vid_stride=config.vid_stride)
    return open_detection_stream(
        config.source,
        detector,
        settings,
        vid_stride=config.vid_stride,
        max_frames=config.max_frames,
        tracks=tracks,
        reads_ahead=not config.view_img,  # the window shows a frame before the next one is processed
    )


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
        path = item.detected.frame.path
        if path in self.failures:  # a later frame of a video
            return None
        if self._files is None and writes_files(self._config):
            self.run_dir = open_results_folder(self._config)
            self._files = ResultFiles(self.run_dir, self._names, self._config)
        self.failures.add_used(path)
        error = item.error or self._log_and_write(item)
        if error is not None:
            self.failures.add_problem(FileProblem(path, reason_of(error, path), is_skipped=True))
            self._stream.skip(path)
            return None
        return item

    def _log_and_write(self, item: DrawnFrame) -> Exception | None:
        """Logs a frame and writes its files. Returns the error if that or the detection has failed."""
        table = item.detected.outcome
        if isinstance(table, Exception):
            return table
        try:
            self._log.add(item.detected, table)
            if self._files is not None:
                self._files.add(item, table)
        except Exception as error:
            return error
        return None

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
