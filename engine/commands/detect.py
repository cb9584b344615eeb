"""Implements detect.py: detection on images, videos and streams."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import cv2

from engine.inference.detection_writer import (
    UniqueStems,
    VideoFiles,
    Window,
    coco_rows,
    mot_lines,
    write_crops,
    write_yolo_labels,
    written_suffix,
)
from engine.inference.frames import Frame, source_files
from engine.inference.object_tracks import ObjectTracks, check_sequence, sequence_of
from engine.inference.predictor import Detected, Predictor, SourceFrames, open_weights
from engine.inference.results import describe_counts, label_texts
from models.postprocess.tiles import Tiles
from utils.config.coco_classes import coco_category_ids
from utils.config.parser import typed_classes
from utils.config.settings import DetectConfig
from utils.drawing.draw import class_colors, draw_boxes, encode_image
from utils.errors import UserError
from utils.files.folders import check_run_dir, increment_path
from utils.files.previous_run import WrittenFiles, remove_written
from utils.files.safe_io import write_whole
from utils.logger import configure_logging, get_logger
from utils.machine.packages import require_installed
from utils.machine.threads import Ahead, map_ahead
from utils.pixels import as_rgb8
from utils.strings import counted, image_ids_of, listed
from utils.structures import DetectionTable

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
    ahead = Ahead(0 if config.view_img else predictor.pipeline.images_at_once())
    frames = predictor.read(
        config.source,
        ahead,
        vid_stride=config.vid_stride,
        max_frames=config.max_frames,
        by_number=config.track is not None,
    )
    results = _detect_or_track(frames, ahead, predictor, config)
    first = next(results, None)
    if first is None:  # an unreadable source is refused before a folder is made
        raise frames.error or UserError(f"{config.source}: no frame can be read; name another source")
    window = Window() if config.view_img else None
    output = Output(_open_folder(config) if writes_files(config) else None, predictor.model.names, config, frames)
    drawn = map_ahead(output.draw, itertools.chain([first], results), threads=predictor.threads, ahead=ahead)
    written = map_ahead(output.write, drawn, threads=1, ahead=ahead)
    try:
        for shown in written:
            if window is None or shown is None or shown.drawing is None:
                continue
            if not window.show(shown.drawing, wait=not shown.frame.is_video):
                break
        else:
            if frames.error:
                raise frames.error
    finally:
        for stage in (written, drawn, results):  # waits for the files that are being written
            stage.close()
        output.close()
        if window:
            window.close()
    output.summarise()
    failed = frames.failed
    if failed:
        first_reason = next(iter(failed.values()))
        count = len(output.seen | failed.keys())
        raise UserError(f"{len(failed)} of {count} files could not be used (first: {first_reason})")
    return output.run_dir


def _detect_or_track(
    frames: SourceFrames, ahead: Ahead, predictor: Predictor, config: DetectConfig
) -> Generator[Detected, None, None]:
    """Yields the detections in each frame; with ``--track``, those that belong to tracks."""
    if config.track is None:
        return predictor.detect_each(frames, ahead)
    settings = predictor.settings.resolve(predictor.model)
    tracks = ObjectTracks(config.track, settings.conf, vid_stride=config.vid_stride)
    return predictor.track_each(frames, ahead, tracks, settings)


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


def _reason(error: Exception, path: str) -> str:
    """Returns why a file failed. Raises ``error`` if its cause is not that file: a full disk, or a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
        return f"{path}: its results cannot be written ({(error.strerror or str(error)).lower()})"
    if isinstance(error, MemoryError | cv2.error):
        return f"{path}: detection, drawing or writing failed ({getattr(error, 'err', '') or error})"
    raise error


class Output:
    """Draws, logs and writes frames and their detections.

    Attributes:
        seen: files that had frames.
    """

    def __init__(
        self, run_dir: Path | None, names: tuple[str, ...], config: DetectConfig, frames: SourceFrames
    ) -> None:
        """``run_dir``: folder of the results; None: no files are written."""
        self.seen: set[str] = set()
        self._names = names
        self._config = config
        self._failed = frames.failed
        self._log = FrameLog(names, config)
        self._files = None if run_dir is None else ResultFiles(run_dir, names, config)

    @property
    def run_dir(self) -> Path | None:
        """Folder of the results; None if there is none."""
        return None if self._files is None else self._files.run_dir

    def draw(self, item: Detected) -> Detected:
        """Draws and encodes the boxes of a frame. Several threads may call it."""
        is_unused = self._config.nosave and not self._config.view_img
        if is_unused or isinstance(item.outcome, Exception):
            return item
        try:
            table = item.outcome
            labels = None
            if not self._config.hide_labels:
                scores = None if self._config.hide_conf else table.scores
                labels = label_texts(self._names, table.classes, scores, item.tracks)
            colors = class_colors(table.classes if item.tracks is None else item.tracks)
            thickness = self._config.line_thickness
            drawing = draw_boxes(as_rgb8(item.frame.image), table.boxes_xyxy_px, labels, colors, thickness=thickness)
            if not self._config.nosave and not item.frame.is_video:
                item.encoded = encode_image(drawing, written_suffix(item.frame.path), item.frame.path)
            if not item.encoded or self._config.view_img:
                item.drawing = drawing
        except Exception as error:
            item.outcome = error
        return item

    def write(self, item: Detected) -> Detected | None:
        """Logs and writes the next frame. Returns it, or None if its file has failed."""
        path = item.frame.path
        self.seen.add(path)
        if path in self._failed:  # a later frame of a video
            return None
        try:
            if isinstance(item.outcome, Exception):
                raise item.outcome
            self._log.add(item, item.outcome)
            if self._files is not None:
                self._files.add(item, item.outcome)
        except Exception as error:
            self._failed[path] = _reason(error, path)
            get_logger().warning("%s; skipped", self._failed[path])
            return None
        return item

    def close(self) -> None:
        """Finishes the files that hold several frames."""
        if self._files is not None:
            self._files.close()

    def summarise(self) -> None:
        """Logs the totals, and the folder of the results, which is removed if nothing was written, such as crops where
        nothing was detected, so that its number is free again."""
        self._log.summarise()
        run_dir = self.run_dir
        if run_dir is None:
            return
        if not self._config.exist_ok:
            with contextlib.suppress(OSError):  # there are files in it
                run_dir.rmdir()
                self._files = None
                return
        get_logger().info("results are in %s", run_dir)


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
            self._tracks.update((sequence_of(frame), track) for track in item.tracks.tolist())
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
                of_total = f" of {frame.total}" if frame.total else ""
                name += f" frame {frame.index}{of_total}"  # as in predictions.json
            get_logger().info("%s: %s (%.1f ms)", name, describe_counts(counts, self._names), milliseconds)

    def summarise(self) -> None:
        """Logs the totals."""
        totals = describe_counts(self._counts, self._names)
        if self._config.track:
            totals += f" in {counted(len(self._tracks), 'track')}"
        mean_ms = self._milliseconds / max(self._frames, 1)
        get_logger().info("%s: %s; %.1f ms each", counted(self._frames, self._unit), totals, mean_ms)


class ResultFiles:
    """Writes the files that the flags ask for into ``run_dir``. For the frames of videos, STEM is STEM_FRAME:

    - STEM.jpg or another suffix of images, or STEM.mp4, with the boxes, unless ``nosave``;
    - ``save_txt``: labels/STEM.txt, empty without detections; ``save_conf`` adds the confidence as a sixth number;
      with ``track``: tracks/STEM.txt in MOT Challenge's format, where STEM is a video's or a folder's;
    - ``save_json``: predictions.json, when closed; image ids are stems, or numbers if all stems are numbers; category
      ids are COCO's for a model of its classes, else the numbers of the classes;
    - ``save_crop``: crops/CLASS/STEM_NUMBER.jpg.
    """

    def __init__(self, run_dir: Path, names: tuple[str, ...], config: DetectConfig) -> None:
        self.run_dir = run_dir
        self._names = names
        self._config = config
        self._stem_of = UniqueStems()
        self._videos = VideoFiles(run_dir)
        self._written = WrittenFiles(run_dir)
        self._track_stem_of = UniqueStems()
        self._track_files: set[Path] = set()
        self._last_index: dict[str, int] = {}  # of the newest frame written, by path
        self._image_ids: list[str] = []  # of all frames, with detections or without
        self._rows: list[dict[str, Any]] = []  # of predictions.json
        self._category_ids = coco_category_ids(names) or tuple(range(len(names)))

    def add(self, item: Detected, table: DetectionTable) -> None:
        """Writes the files of a frame. Raises UserError for an image that lies in the folder of the results."""
        config = self._config
        frame = item.frame
        if Path(frame.path).resolve().parent == self.run_dir.resolve():
            raise UserError(f"{frame.path}: is in the folder of the results and could be overwritten; choose another")
        stem = self._stem_of(frame.path, is_video=frame.is_video)
        frame_stem = f"{stem}_{frame.index:06d}" if frame.is_video else stem
        image = as_rgb8(frame.image)
        if config.save_txt and item.tracks is not None:
            self._append_tracks(sequence_of(frame), mot_lines(table, item.tracks, frame.index))
        elif config.save_txt:
            height, width = image.shape[:2]
            path = self._written.add(self.run_dir / "labels" / f"{frame_stem}.txt")
            write_yolo_labels(path, (height, width), table, scores=config.save_conf)
        if config.save_json:
            self._image_ids.append(frame_stem)
            number = frame.index if frame.is_video else None
            self._rows += coco_rows(table, self._names, self._category_ids, frame.path, frame_stem, number, item.tracks)
        if config.save_crop:
            names = [self._names[c] for c in table.classes]
            write_crops(self.run_dir / "crops", frame_stem, image, table.boxes_xyxy_px, names, self._written.add)
        if not config.nosave:
            self._add_drawing(item, stem)

    def _add_drawing(self, item: Detected, stem: str) -> None:
        frame = item.frame
        if not frame.is_video:
            write_whole(self._written.add(self.run_dir / (stem + written_suffix(frame.path))), item.encoded)
        elif item.drawing is not None:
            self._written.add(self._videos.path_of(stem))
            for _ in range(self._repeats(frame)):
                self._videos.add(stem, item.drawing, frame.fps / self._config.vid_stride)

    def _append_tracks(self, sequence: str, lines: str) -> None:
        """Appends the lines of a frame to the file of its sequence, so that an endless stream loses none."""
        path = self.run_dir / "tracks" / f"{self._track_stem_of(sequence, is_video=True)}.txt"
        if path not in self._track_files:
            self._track_files.add(self._written.add(path))
            path.parent.mkdir(exist_ok=True)
            write_whole(path, "")
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines)

    def _repeats(self, frame: Frame) -> int:
        """How often a frame is written to its video. One of a live stream stands for those that were skipped while the
        model ran, so that the video has the stream's speed."""
        stride = self._config.vid_stride
        last = self._last_index.get(frame.path, frame.index - stride)
        self._last_index[frame.path] = frame.index
        return max(round((frame.index - last) / stride), 1) if frame.is_live else 1

    def close(self) -> None:
        """Finishes the files that hold several frames."""
        self._videos.close()
        if self._config.save_json:
            ids = dict(zip(self._image_ids, image_ids_of(self._image_ids)))
            rows = [row | {"image_id": ids[row["image_id"]]} for row in self._rows]
            path = self._written.add(self.run_dir / "predictions.json")
            write_whole(path, json.dumps(rows, ensure_ascii=False, indent=1))
