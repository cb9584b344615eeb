"""Implements detect.py: detection on images, videos and streams."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import partial
from pathlib import Path

from engine.inference.model import open_model
from engine.inference.predict import Predictor, unused_detection_settings
from engine.inference.results import Results, Window, describe_counts, written_suffix
from engine.inference.sources import ReadAhead, SourceOptions, log_skipped, open_source
from engine.inference.tracks import ObjectTracks
from engine.inference.writers import Drawn, ResultFiles
from models.postprocess.tiles import Tiles
from utils.class_names import typed_classes
from utils.config.settings import DetectConfig
from utils.drawing.draw import encode_image
from utils.errors import UserError
from utils.files.new_folder import check_run_dir
from utils.logger import LINE_EVERY_S, configure_logging, get_logger, get_summary_logger
from utils.machine.resources import available_cores
from utils.machine.threads import map_ahead
from utils.machine.torch_threads import torch_threads
from utils.strings import counted

LOGGED_FRAMES = 5  # each of the first frames gets a line


def detect(config: DetectConfig) -> Path | None:
    """Runs the detector over the source. Returns the folder with the results, None if there are no files to write.

    Files that cannot be read, and images whose drawings are too large for their format, are logged and skipped if there
    are several; a UserError at the end counts them. At another error, or a signal, the files of all frames before it
    are complete.
    """
    check_run_dir(config.project, config.name, config.exist_ok)
    configure_logging(True, quiet=config.quiet)
    model = open_model(config.weights, device=config.device, nms=config.nms, offline=config.offline, trust=config.trust)
    predictor = Predictor(
        model,
        amp=config.amp,
        tiles=Tiles.from_config(config, model.tile),
        imgsz=config.imgsz,
        conf=config.conf_thres,
        iou=config.iou_thres,
        box_voting=config.box_voting,
        max_det=config.max_det,
        classes=typed_classes(config.classes),
        agnostic=config.agnostic_nms,
    )
    settings = predictor.settings.resolve(model)
    threshold = settings.selection.conf_thres
    if config.conf_thres is None:
        get_logger().info("confidence threshold %.4g (--conf-thres sets another)", threshold)
    for line in unused_detection_settings(config, model, predictor.tiles):
        get_logger().warning("%s", line)
    # The window shows a frame before the next one is processed.
    ahead = ReadAhead(0 if config.view_img else predictor.images_at_once)
    tracks = ObjectTracks(config.track, threshold) if config.track else None
    skipped: list[tuple[str, int]] = []

    def skip(reason: str, number: int) -> None:
        log_skipped(reason, number)
        skipped.append((reason, number))

    options = SourceOptions(
        config.vid_stride,
        config.max_frames,
        threads=predictor.threads,
        ahead=ahead,
        pixels=model.pixels,
        is_tracked=tracks is not None,
        skip=skip,
    )
    frames = open_source(config.source, options)
    files = ResultFiles(config)
    log = FrameLog(predictor.names, config)
    paths: set[str] = set()  # of the files that are used

    def write(item: Drawn | UserError) -> Drawn | None:
        """Logs and writes the next frame, unless it cannot be drawn."""
        if isinstance(item, UserError):
            skip(str(item), 1)
            return None
        paths.add(item.result.path)
        log.add(item.result)
        files.write(item)
        return item._replace(encoded=b"")

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_threads(available_cores() - 1))  # one core reads, draws and writes meanwhile
        # On exit, the last one first: waits for the files that are being written, then completes them.
        found = predictor.detect_frames(frames, settings, ahead=ahead, tracks=tracks)
        stack.enter_context(contextlib.closing(found))
        window = stack.enter_context(contextlib.closing(Window())) if config.view_img else None
        stack.enter_context(contextlib.closing(files))
        draw = partial(draw_frame, config)
        drawn = stack.enter_context(contextlib.closing(map_ahead(draw, found, threads=predictor.threads, ahead=ahead)))
        written = stack.enter_context(contextlib.closing(map_ahead(write, drawn, threads=1, ahead=ahead)))
        for item in written:
            if window is None or item is None or item.drawing is None:
                continue
            if not window.show(item.drawing, wait=not item.result.frame.is_video):
                break
    log.summarize()
    if files.path is not None:
        get_summary_logger().info("results are in %s%s", files.path, files.note)
    if skipped:
        num_skipped = sum(number for _, number in skipped)
        num_files = len(paths) + num_skipped
        raise UserError(f"{num_skipped} of {num_files} files could not be used (first: {skipped[0][0]})")
    return files.path


def draw_frame(config: DetectConfig, result: Results) -> Drawn | UserError:
    """Draws the detections of a frame, and encodes the drawing if it is an image's and is saved. Returns the error if
    it is too large for its format."""
    if config.nosave and not config.view_img:
        return Drawn(result, None, b"")
    drawing = result.drawn(conf=not config.hide_conf, labels=not config.hide_labels, line_width=config.line_thickness)
    if config.nosave or result.frame.is_video:
        return Drawn(result, drawing, b"")
    try:
        return Drawn(result, drawing, encode_image(drawing, written_suffix(result.path), result.path))
    except UserError as error:
        return error


class FrameLog:
    """Logs a line for each of the first frames, then one every `LINE_EVERY_S`, and the totals."""

    def __init__(self, names: dict[int, str], config: DetectConfig) -> None:
        self._names = names
        self._config = config
        self._counts: Counter[int] = Counter()  # detections by class
        self._tracks: set[tuple[str, int]] = set()  # sequences and ids
        self._frames = 0
        self._milliseconds = 0.0
        self._logged_at = time.monotonic()
        self._unit = "image"

    def add(self, result: Results) -> None:
        """Counts and shows a frame."""
        frame = result.frame
        milliseconds = sum(result.speed.values())
        self._counts += Counter(result.boxes.classes)
        self._tracks.update((frame.sequence, track) for track in result.boxes.track_ids or ())
        self._frames += 1
        self._milliseconds += milliseconds
        name = frame.path
        if frame.is_video:
            self._unit = "frame"
            duration = "" if frame.duration_s is None else f" of {frame.duration_s:.2f}"
            name += f" frame {frame.index} at {frame.time_s:.2f}{duration} s"  # as in predictions.json
        line = f"{name}: {result.verbose()} ({milliseconds:.1f} ms)"
        if self._frames <= LOGGED_FRAMES:
            get_logger().info("%s", line)
        elif time.monotonic() - self._logged_at >= LINE_EVERY_S:
            self._logged_at = time.monotonic()
            get_logger().info("%s, now %s", counted(self._frames, self._unit), line)

    def summarize(self) -> None:
        """Logs the totals."""
        totals = describe_counts(self._counts, self._names)
        if self._config.track:
            totals += f" in {counted(len(self._tracks), 'track')}"
        mean_ms = self._milliseconds / max(self._frames, 1)
        get_summary_logger().info("%s: %s; %.1f ms each", counted(self._frames, self._unit), totals, mean_ms)
