"""Finds objects in images, folders, videos, webcams and streams, and writes annotated media, labels, JSON and crops.

python detect.py --weights runs/train/exp/best.pt --source photos/
python detect.py --weights best.pt --source clip.mp4 --save-txt --save-conf

A file of several that cannot be read, or whose results cannot be written, is reported and passed over; at the end the
exit status is then 2, with one line that counts them.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.parser import parse_config
from utils.config.settings import DetectConfig
from utils.entrypoint import run_main
from utils.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from data.sources import Frame
    from models.detector import Detector
    from utils.structures import DetectionTable

TALKATIVE_FRAMES = 20  # a line each; later ones at most every so many seconds
LINE_EVERY_S = 5.0
WINDOW = "lockstep"
CONFIDENCE = 0.25  # threshold for a checkpoint that was never validated here


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(DetectConfig, argv, __doc__.split("\n")[0])
    detect(config)


def detect(config: DetectConfig) -> Path:
    """Runs the detector over the source; returns the folder with the results."""
    _check_flags(config)
    from data.sources import open_source
    from models.weights.load import load_detector
    from utils.distributed.context import DistributedContext, parse_devices
    from utils.download import fetch_weights
    from utils.files.folders import increment_path
    from utils.logger import configure_logging, get_logger

    configure_logging(True)
    devices = parse_devices(config.device)
    if len(devices) > 1:
        raise UserError(f"--device {config.device}: detection runs on one device; name one")
    ctx = DistributedContext.single(devices[0])
    model, info = load_detector(fetch_weights(config.weights, ctx=ctx, offline=config.offline))
    if config.conf_thres is None:
        config = replace(config, conf_thres=best_confidence(config.weights, info))
    predictor = Predictor(model, config, config.imgsz or info["imgsz"], devices[0])
    failed: dict[str, str] = {}
    frames = open_source(config.source, vid_stride=config.vid_stride, max_frames=config.max_frames, failed=failed)
    if config.view_img:
        _open_window()
    first = list(itertools.islice(frames, 1))  # a source that cannot be read is refused before a folder is made
    output = Output(increment_path(config.project, config.name, config.exist_ok), model.names, config)
    tally = Tally(model.names)
    seen: set[str] = set()
    try:
        for frame in itertools.chain(first, frames):
            seen.add(frame.path)
            if frame.path in failed:  # a later frame of a video
                continue
            try:
                started = time.perf_counter()
                found = predictor(frame.image)
                tally.add(frame, found, time.perf_counter() - started)
                if not output.take(frame, found):
                    break
            except Exception as error:
                failed[frame.path] = _reason(error, frame.path)
                get_logger().warning("%s; passed over", failed[frame.path])
    finally:
        output.close()
    tally.summarise()
    get_logger().info("results are in %s", output.run_dir)
    if failed:
        why = next(iter(failed.values()))
        raise UserError(f"{len(failed)} of {len(seen | failed.keys())} files could not be used (first: {why})")
    return output.run_dir


def _reason(error: Exception, path: str) -> str:
    """What is wrong with one file. Raises ``error`` where it isn't of that file alone: a full disk, or a bug."""
    import cv2

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
        return f"{path}: its results cannot be written ({(error.strerror or str(error)).lower()})"
    if isinstance(error, MemoryError):
        return f"{path}: takes more memory than there is"
    if isinstance(error, cv2.error):
        return f"{path}: cannot be drawn or written ({getattr(error, 'err', '') or error})"
    raise error


def best_confidence(weights: str, info: dict) -> float:
    """The threshold when the user names none: where F1 was best when training last validated, if the checkpoint says.

    That was with the NMS of validation, which leaves more boxes an object than detection's.
    """
    from utils.logger import get_logger

    stored = info.get("progress", {}).get("confidence")
    if isinstance(stored, float) and 0 <= stored <= 1:
        get_logger().info("confidence threshold %.3f, of the best F1 in validation (--conf-thres sets another)", stored)
        return stored
    get_logger().info(
        "confidence threshold %g: %s does not tell a better one (--conf-thres sets another)", CONFIDENCE, weights
    )
    return CONFIDENCE


def _check_flags(config: DetectConfig) -> None:
    if config.save_conf and not config.save_txt:
        raise UserError("--save-conf: adds to the txt labels, so it wants --save-txt too")


def _open_window() -> None:
    """Fails in one line where nothing can be shown; some builds of OpenCV end the process instead."""
    import cv2

    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError(
            "--view-img: there is no display here (neither DISPLAY nor WAYLAND_DISPLAY is set); leave it out"
        )
    try:
        cv2.namedWindow(WINDOW, cv2.WINDOW_NORMAL)
    except cv2.error:
        raise UserError("--view-img: this OpenCV cannot open windows (a headless build?); leave it out") from None


class Predictor:
    """A picture in, its detections out."""

    def __init__(self, model: Detector, config: DetectConfig, imgsz: int, device: torch.device) -> None:
        import torch

        from engine.process import resolve_amp
        from models.postprocess.detections import DETECTION_IOU, suppression_iou
        from utils.config.settings import check_image_size

        check_image_size(imgsz, model.stride)
        wrong = [c for c in config.classes if not 0 <= c < model.num_classes]
        if wrong:
            raise UserError(f"--classes {wrong[0]}: the model has classes 0 to {model.num_classes - 1}")
        self._model = model.fuse(one_to_one=not config.nms).to(device, memory_format=torch.channels_last)
        self._config, self._imgsz, self._stride, self._device = config, imgsz, model.stride, device
        self._amp = resolve_amp(config.amp, device)
        asked = DETECTION_IOU if config.iou_thres is None and config.agnostic_nms else config.iou_thres
        self._iou_thres = suppression_iou(self._model.head, asked, DETECTION_IOU)

    def __call__(self, image: np.ndarray) -> DetectionTable:
        """Detections in ``image``, uint8 (H, W, 3) RGB, best first."""
        import numpy as np
        import torch

        from data.render.opencv import fit_letterbox, letterbox
        from models.postprocess.detections import select_detections
        from utils.boxes import clip_xyxy, letterbox_to_original
        from utils.structures import DetectionTable

        height, width = image.shape[:2]
        canvas_hw = self._canvas(height, width)
        fit = fit_letterbox((height, width), canvas_hw, self._imgsz)
        canvas = torch.from_numpy(letterbox(image, canvas_hw, fit)).to(self._device)
        with torch.inference_mode(), torch.autocast(self._device.type, self._amp, enabled=self._amp is not None):
            raw = self._model(canvas.permute(2, 0, 1)[None].float() / 255)
        config = self._config
        with torch.inference_mode():
            boxes, scores = self._model.decode([level.float() for level in raw])
            detections = select_detections(
                boxes,
                scores,
                conf_thres=config.conf_thres,
                iou_thres=self._iou_thres,
                max_det=config.max_det,
                agnostic=config.agnostic_nms,
                multi_label=False,
                classes=config.classes or None,
            )
        count = int(detections.counts[0])
        on_canvas, found_scores, classes = (t[0, :count].cpu().numpy() for t in detections[:3])
        original = letterbox_to_original(on_canvas.astype(np.float64), fit.gain_x, fit.gain_y, fit.pad_x, fit.pad_y)
        return DetectionTable(
            image_index=np.zeros(count, np.int64),
            boxes_xyxy_px=clip_xyxy(original, width, height),
            scores=found_scores.astype(np.float64),
            classes=classes,
        )

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """The smallest canvas of whole strides that holds the picture with its longer side at ``imgsz``."""
        longest = max(height, width)
        sides = [-(-side * self._imgsz // longest) for side in (height, width)]
        return tuple(-(-side // self._stride) * self._stride for side in sides)


class Output:
    """Sends each frame and its detections wherever the flags ask."""

    def __init__(self, run_dir: Path, names: tuple[str, ...], config: DetectConfig) -> None:
        from utils.visualize.detection_writer import DetectionFiles, MediaWriter, UniqueStems

        self.run_dir, self._names, self._config = run_dir, names, config
        self._stem_of = UniqueStems()
        self._media = None if config.nosave else MediaWriter(run_dir)
        self._files = DetectionFiles(
            run_dir,
            names,
            save_txt=config.save_txt,
            save_conf=config.save_conf,
            save_json=config.save_json,
            save_crop=config.save_crop,
        )

    def take(self, frame: Frame, found: DetectionTable) -> bool:
        """False when the user closes the window's show (q or Esc)."""
        if Path(frame.path).resolve().parent == self.run_dir.resolve():
            raise UserError(f"{frame.path}: lies in the folder of the results and could be overwritten; choose another")
        stem = self._stem_of(frame.path)
        self._files.write(frame.path, stem, frame.index if frame.is_video else None, frame.image, found)
        if self._media is None and not self._config.view_img:
            return True
        drawn = self._draw(frame.image, found)
        if self._media is not None and frame.is_video:
            self._media.frame(stem, drawn, frame.fps / self._config.vid_stride)
        elif self._media is not None:
            self._media.image(stem, Path(frame.path).suffix, drawn)
        return not self._config.view_img or _show(drawn, still=not frame.is_video)

    def close(self) -> None:
        if self._media is not None:
            self._media.close()
        if self._config.view_img:
            _close_window()
        self._files.close()

    def _draw(self, image: np.ndarray, found: DetectionTable) -> np.ndarray:
        from utils.visualize.draw import class_colours, draw_boxes

        config = self._config
        labels = None
        if not config.hide_labels:
            labels = [self._names[c] for c in found.classes]
            if not config.hide_conf:
                labels = [f"{label} {score:.2f}" for label, score in zip(labels, found.scores)]
        colours = class_colours(found.classes)
        return draw_boxes(image, found.boxes_xyxy_px, labels, colours, thickness=config.line_thickness)


def _show(image: np.ndarray, still: bool) -> bool:
    """Shows a picture, waiting for a key if it is a still one; False for q and Esc."""
    import cv2

    cv2.imshow(WINDOW, image[..., ::-1])
    return cv2.waitKey(0 if still else 1) & 0xFF not in (ord("q"), 27)


def _close_window() -> None:
    import cv2

    cv2.destroyWindow(WINDOW)


class Tally:
    """Says what was found: a line a frame at first, then now and then, and totals at the end."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._frames, self._seconds, self._said_at = 0, 0.0, 0.0
        self._counts: dict[int, int] = {}

    def add(self, frame: Frame, found: DetectionTable, seconds: float) -> None:
        from utils.logger import get_logger

        here: dict[int, int] = {}
        for c in found.classes.tolist():
            here[c] = here.get(c, 0) + 1
            self._counts[c] = self._counts.get(c, 0) + 1
        self._frames += 1
        self._seconds += seconds
        now = time.monotonic()
        if self._frames <= TALKATIVE_FRAMES or now - self._said_at >= LINE_EVERY_S:
            self._said_at = now
            place = frame.path
            if frame.is_video:
                place += f" frame {frame.index + 1}" + (f"/{frame.total}" if frame.total else "")
            get_logger().info("%s: %s (%.1f ms)", place, self._text(here), seconds * 1e3)

    def summarise(self) -> None:
        from utils.logger import get_logger

        pace = self._seconds / max(self._frames, 1) * 1e3
        get_logger().info("%d pictures: %s; %.1f ms each", self._frames, self._text(self._counts), pace)

    def _text(self, counts: dict[int, int]) -> str:
        return ", ".join(f"{n} {self._names[c]}" for c, n in sorted(counts.items())) or "nothing found"


if __name__ == "__main__":
    run_main(main)
