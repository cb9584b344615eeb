"""Detection on images, videos and streams: the work of detect.py."""

from __future__ import annotations

import errno
import itertools
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np

from data.sources import Frame, open_source
from engine.inference.results import describe_counts, label_texts
from engine.predictor import Predictor, open_weights
from models.postprocess.tiling import Tiles
from utils.config.settings import DetectConfig
from utils.errors import UserError
from utils.files.folders import increment_path
from utils.logger import configure_logging, get_logger
from utils.structures import DetectionTable
from utils.visualize.detection_writer import DetectionFiles, MediaWriter, UniqueStems, Window
from utils.visualize.draw import class_colors, draw_boxes

LOGGED_FRAMES = 20  # these get a line each, later ones at most one every LINE_EVERY_S
LINE_EVERY_S = 5.0


def detect(config: DetectConfig) -> Path:
    """Runs the detector over the source; returns the folder with the results.

    If there are several files, one that cannot be read, or whose results cannot be written, is logged and skipped; a
    UserError at the end counts them.
    """
    configure_logging(True)
    predictor = Predictor(
        open_weights(config.weights, device=config.device, nms=config.nms, offline=config.offline, trust=config.trust),
        imgsz=config.imgsz,
        conf=config.conf_thres,
        iou=config.iou_thres,
        box_voting=config.box_voting,
        max_det=config.max_det,
        classes=config.classes,
        agnostic=config.agnostic_nms,
        amp=config.amp,
        tiles=Tiles.of(config),
    )
    if config.conf_thres is None:
        _log_threshold(predictor, config.weights)
    if config.nms and predictor.model.ignores_nms:
        get_logger().warning("%s: --nms does nothing: the model has one branch", config.weights)
    if not config.box_voting and predictor.iou is None and predictor.model.nms_iou is None and not config.agnostic_nms:
        get_logger().warning("%s: --no-box-voting does nothing: its detections need no NMS", config.weights)
    names = predictor.model.names
    failed: dict[str, str] = {}
    frames = open_source(config.source, vid_stride=config.vid_stride, max_frames=config.max_frames, failed=failed)
    window = Window() if config.view_img else None
    first = list(itertools.islice(frames, 1))  # an unreadable source is refused before a folder is made
    output = Output(increment_path(config.project, config.name, config.exist_ok), names, config, window)
    log = DetectionLog(names)
    seen: set[str] = set()
    try:
        for frame in itertools.chain(first, frames):
            seen.add(frame.path)
            if frame.path in failed:  # a later frame of a video
                continue
            try:
                started = time.perf_counter()
                (found,) = predictor.detect([frame.image])
                log.add(frame, found, time.perf_counter() - started)
                if not output.write(frame, found):
                    break
            except Exception as error:
                failed[frame.path] = _reason(error, frame.path)
                get_logger().warning("%s; skipped", failed[frame.path])
    finally:
        output.close()
    output.remove_earlier(seen | failed.keys())
    log.summarise()
    get_logger().info("results are in %s", output.run_dir)
    if failed:
        why = next(iter(failed.values()))
        raise UserError(f"{len(failed)} of {len(seen | failed.keys())} files could not be used (first: {why})")
    return output.run_dir


def _log_threshold(predictor: Predictor, weights: str) -> None:
    """Logs where the default threshold is from. It is an estimate: validation's NMS leaves more boxes an object than
    detection's."""
    if predictor.model.confidence is None:
        text = f"{predictor.conf:g}: {weights} does not store a better one"
    else:
        text = f"{predictor.conf:.3f}, of the best F1 in validation"
    get_logger().info("confidence threshold %s (--conf-thres sets another)", text)


def _reason(error: Exception, path: str) -> str:
    """Why one file failed. Raises ``error`` if its cause is not that file: a full disk, or a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
        return f"{path}: its results cannot be written ({(error.strerror or str(error)).lower()})"
    if isinstance(error, MemoryError):
        return f"{path}: takes more memory than there is"
    if isinstance(error, cv2.error):
        return f"{path}: cannot be drawn or written ({getattr(error, 'err', '') or error})"
    raise error


class Output:
    """Writes each frame and its detections to the files that the flags ask for, and shows them in ``window``."""

    def __init__(self, run_dir: Path, names: tuple[str, ...], config: DetectConfig, window: Window | None) -> None:
        self.run_dir, self._names, self._config, self._window = run_dir, names, config, window
        self._stem_of = UniqueStems()
        self._media = None if config.nosave else MediaWriter(run_dir)
        self._files = DetectionFiles(run_dir, names, config)

    def write(self, frame: Frame, found: DetectionTable) -> bool:
        """False when the user closes the window (q or Esc)."""
        if Path(frame.path).resolve().parent == self.run_dir.resolve():
            raise UserError(f"{frame.path}: is in the folder of the results and could be overwritten; choose another")
        stem = self._stem_of(frame.path, is_video=frame.is_video)
        self._files.write(frame.path, stem, frame.index if frame.is_video else None, frame.image, found)
        if self._media is None and self._window is None:
            return True
        drawn = self._draw(frame.image, found)
        if self._media is not None and frame.is_video:
            self._media.frame(stem, drawn, frame.fps / self._config.vid_stride)
        elif self._media is not None:
            self._media.image(stem, Path(frame.path).suffix, drawn)
        return self._window is None or self._window.show(drawn, wait=not frame.is_video)

    def close(self) -> None:
        if self._media is not None:
            self._media.close()
        if self._window is not None:
            self._window.close()
        self._files.close()

    def remove_earlier(self, sources: Iterable[str]) -> None:
        """See `DetectionFiles.remove_earlier`."""
        self._files.remove_earlier(sources)

    def _draw(self, image: np.ndarray, found: DetectionTable) -> np.ndarray:
        labels = None
        if not self._config.hide_labels:
            labels = label_texts(self._names, found.classes, None if self._config.hide_conf else found.scores)
        colors = class_colors(found.classes)
        return draw_boxes(image, found.boxes_xyxy_px, labels, colors, thickness=self._config.line_thickness)


class DetectionLog:
    """Logs what is found: a line a frame at first, then one every few seconds, and the totals at the end."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._frames, self._seconds, self._logged_at = 0, 0.0, 0.0
        self._counts: Counter[int] = Counter()

    def add(self, frame: Frame, found: DetectionTable, seconds: float) -> None:
        counts = Counter(found.classes.tolist())
        self._counts += counts
        self._frames += 1
        self._seconds += seconds
        now = time.monotonic()
        if self._frames <= LOGGED_FRAMES or now - self._logged_at >= LINE_EVERY_S:
            self._logged_at = now
            name = frame.path
            if frame.is_video:
                name += f" frame {frame.index + 1}" + (f"/{frame.total}" if frame.total else "")
            get_logger().info("%s: %s (%.1f ms)", name, describe_counts(counts, self._names), seconds * 1e3)

    def summarise(self) -> None:
        mean_ms = self._seconds / max(self._frames, 1) * 1e3
        get_logger().info(
            "%d images: %s; %.1f ms each", self._frames, describe_counts(self._counts, self._names), mean_ms
        )
