"""Detection on images, videos and streams: the work of detect.py."""

from __future__ import annotations

import errno
import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from data.render.opencv import fit_letterbox, letterbox
from data.sources import Frame, open_source
from engine.evaluation.evaluator import IMAGES_IN_CACHE
from engine.process import resolve_amp
from models.detector import Detector
from models.postprocess.detections import DETECTION_IOU, select_detections, suppression_iou
from models.postprocess.tiling import TiledDetector
from models.weights.load import load_detector
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.config.settings import DetectConfig, check_image_size
from utils.distributed.context import DistributedContext, parse_devices
from utils.download import fetch_weights
from utils.errors import UserError
from utils.files.folders import increment_path
from utils.logger import configure_logging, get_logger
from utils.structures import Detections, DetectionTable
from utils.visualize.detection_writer import DetectionFiles, MediaWriter, UniqueStems, Window
from utils.visualize.draw import class_colors, draw_boxes

CONFIDENCE = 0.25  # threshold for a checkpoint that does not store one
TILES_AT_ONCE = 16  # on a device
LOGGED_FRAMES = 20  # these get a line each, later ones at most one every LINE_EVERY_S
LINE_EVERY_S = 5.0


def detect(config: DetectConfig) -> Path:
    """Runs the detector over the source; returns the folder with the results.

    If there are several files, one that cannot be read, or whose results cannot be written, is logged and skipped; a
    UserError at the end counts them.
    """
    configure_logging(True)
    devices = parse_devices(config.device)
    if len(devices) > 1:
        raise UserError(f"--device {config.device}: detection runs on one device; name one")
    ctx = DistributedContext.single(devices[0])
    model, info = load_detector(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    if config.conf_thres is None:
        config = replace(config, conf_thres=default_confidence(config.weights, info))
    predictor = Predictor(model, config, config.imgsz or info["imgsz"], devices[0])
    failed: dict[str, str] = {}
    frames = open_source(config.source, vid_stride=config.vid_stride, max_frames=config.max_frames, failed=failed)
    window = Window() if config.view_img else None
    first = list(itertools.islice(frames, 1))  # an unreadable source is refused before a folder is made
    output = Output(increment_path(config.project, config.name, config.exist_ok), model.names, config, window)
    log = DetectionLog(model.names)
    seen: set[str] = set()
    try:
        for frame in itertools.chain(first, frames):
            seen.add(frame.path)
            if frame.path in failed:  # a later frame of a video
                continue
            try:
                started = time.perf_counter()
                found = predictor(frame.image)
                log.add(frame, found, time.perf_counter() - started)
                if not output.write(frame, found):
                    break
            except Exception as error:
                failed[frame.path] = _reason(error, frame.path)
                get_logger().warning("%s; skipped", failed[frame.path])
    finally:
        output.close()
    log.summarise()
    get_logger().info("results are in %s", output.run_dir)
    if failed:
        why = next(iter(failed.values()))
        raise UserError(f"{len(failed)} of {len(seen | failed.keys())} files could not be used (first: {why})")
    return output.run_dir


def default_confidence(weights: str, info: dict[str, Any]) -> float:
    """The threshold of the best F1 when training last validated, if the checkpoint stores it, else `CONFIDENCE`.

    It is an estimate: validation's NMS leaves more boxes an object than detection's.
    """
    stored = info.get("progress", {}).get("confidence")
    if isinstance(stored, float) and 0 <= stored <= 1:
        get_logger().info("confidence threshold %.3f, of the best F1 in validation (--conf-thres sets another)", stored)
        return stored
    get_logger().info(
        "confidence threshold %g: %s does not store a better one (--conf-thres sets another)", CONFIDENCE, weights
    )
    return CONFIDENCE


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


class Predictor:
    """Maps an image to its detections."""

    def __init__(self, model: Detector, config: DetectConfig, imgsz: int, device: torch.device) -> None:
        """``imgsz``: pixels of the longer side on the canvas. Raises UserError for sizes and classes that do not fit
        the model."""
        check_image_size(imgsz, model.stride)
        unknown = [c for c in config.classes if not 0 <= c < model.num_classes]
        if unknown:
            raise UserError(f"--classes {unknown[0]}: the model has classes 0 to {model.num_classes - 1}")
        self._model = model.fuse(one_to_one=not config.nms).to(device, memory_format=torch.channels_last)
        self._config, self._imgsz, self._stride, self._device = config, imgsz, model.stride, device
        self._amp = resolve_amp(config.amp, device)
        iou = DETECTION_IOU if config.iou_thres is None and config.agnostic_nms else config.iou_thres
        self._iou_thres = suppression_iou(self._model.head, iou, DETECTION_IOU)
        self._tiled: TiledDetector | None = None
        if config.tile:
            check_image_size(config.tile, model.stride, flag="--tile")
            self._tiled = TiledDetector(
                self._model,
                self._select,
                stride=model.stride,
                tile=config.tile,
                overlap=config.overlap,
                batch=IMAGES_IN_CACHE if device.type == "cpu" else TILES_AT_ONCE,
                full_image=imgsz if config.tile_full_image else 0,
                iou_thres=self._iou_thres,
                max_det=config.max_det,
                agnostic=config.agnostic_nms,
            )

    def __call__(self, image: np.ndarray) -> DetectionTable:
        """Detections in ``image``, uint8 (H, W, 3) RGB, highest score first."""
        height, width = image.shape[:2]
        canvas_hw = (height, width) if self._tiled else self._canvas(height, width)
        fit = fit_letterbox((height, width), canvas_hw, max(height, width) if self._tiled else self._imgsz)
        canvas = torch.from_numpy(letterbox(image, canvas_hw, fit)).to(self._device)
        with torch.inference_mode():
            with torch.autocast(self._device.type, self._amp, enabled=self._amp is not None):
                raw = (self._tiled or self._model)(canvas.permute(2, 0, 1)[None].float() / 255)
            raw = [level.float() for level in raw]
            detections = self._tiled.stitch(raw) if self._tiled else self._select(self._model, raw)
        count = int(detections.counts[0])
        on_canvas, kept_scores, classes = (t[0, :count].cpu().numpy() for t in detections[:3])
        original = letterbox_to_original(on_canvas.astype(np.float64), fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
        return DetectionTable(
            image_index=np.zeros(count, np.int64),
            boxes_xyxy_px=clip_xyxy(original, width, height),
            scores=kept_scores.astype(np.float64),
            classes=classes,
        )

    def _select(self, model: Detector, raw: list[torch.Tensor]) -> Detections:
        config = self._config
        return select_detections(
            *model.decode(raw),
            conf_thres=config.conf_thres,
            iou_thres=self._iou_thres,
            max_det=config.max_det,
            agnostic=config.agnostic_nms,
            multi_label=False,
            classes=config.classes or None,
        )

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """The smallest canvas of whole strides that holds the image with its longer side at ``imgsz``."""
        longest = max(height, width)
        sides = [-(-side * self._imgsz // longest) for side in (height, width)]
        return tuple(-(-side // self._stride) * self._stride for side in sides)


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
        stem = self._stem_of(frame.path)
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

    def _draw(self, image: np.ndarray, found: DetectionTable) -> np.ndarray:
        labels = None
        if not self._config.hide_labels:
            labels = [self._names[c] for c in found.classes]
            if not self._config.hide_conf:
                labels = [f"{label} {score:.2f}" for label, score in zip(labels, found.scores)]
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
            get_logger().info("%s: %s (%.1f ms)", name, self._text(counts), seconds * 1e3)

    def summarise(self) -> None:
        mean_ms = self._seconds / max(self._frames, 1) * 1e3
        get_logger().info("%d images: %s; %.1f ms each", self._frames, self._text(self._counts), mean_ms)

    def _text(self, counts: Counter[int]) -> str:
        return ", ".join(f"{n} {self._names[c]}" for c, n in sorted(counts.items())) or "nothing found"
