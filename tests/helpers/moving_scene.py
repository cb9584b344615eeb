"""A video with known identities: discs that move, cross, and pass behind a wall."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch

from data import demo
from utils.boxes import iou

SIZE = 320
FRAMES = 150
FPS = 25.0
VISIBLE = 0.5  # fraction of an object that must be visible to count as one that should be tracked
NAMES = demo.CLASS_NAMES
_WALL = (140, 196)  # columns, in pixels of the frame
_BIT = 8  # side of a square that holds a bit of the frame's number
_BITS = 8
# Class, radius, position and speed in pixels of the frame, and the height of the waves around this line.
_MOVERS = (
    ("ball", 24, (10, 80), (2.1, 0.0), 0),  # crosses the next one
    ("ball", 24, (310, 95), (-2.1, 0.0), 0),
    ("ring", 22, (30, 180), (1.9, 0.0), 8),
    ("triangle", 26, (290, 240), (-0.9, -0.1), 12),
    ("checker", 22, (60, 280), (1.2, -0.2), 0),
    ("pie", 22, (250, 150), (0.0, 0.6), 6),
    ("ring", 20, (-60, 225), (1.8, 0.1), 0),  # comes in later
)


@dataclass(frozen=True)
class SceneFrame:
    """A frame and what is in it. Boxes are those of the visible parts."""

    number: int
    image: np.ndarray  # uint8 (SIZE, SIZE, 3) RGB
    ids: np.ndarray  # int64 (N,), from 1
    classes: np.ndarray  # int64 (N,)
    boxes_xyxy_px: np.ndarray  # float64 (N, 4)
    visible: np.ndarray  # float64 (N,) visible fractions, above 0

    @property
    def expected(self) -> np.ndarray:
        """Mask of the objects that are visible enough to be tracked: bool (N,)."""
        return self.visible >= VISIBLE


def scene(frames: int = FRAMES) -> Iterator[SceneFrame]:
    """Yields the frames. A strip of squares at the top encodes the frame number (`number_in`)."""
    for number in range(frames):
        image = np.full((SIZE, SIZE, 3), 90, np.uint8)
        owner = np.zeros((SIZE, SIZE), np.uint8)
        for row, (_, radius, start, speed, wave) in enumerate(_MOVERS, 1):
            x, y = (at + by * number for at, by in zip(start, speed))
            center = (round(x), round(y + wave * float(np.sin(number / 12))))
            cv2.circle(owner, center, radius, row, -1)
            cv2.circle(image, center, radius, (30 * row, 250 - 30 * row, 200), -1)
        for canvas in (owner, image):
            canvas[100:, slice(*_WALL)] = 0
        for bit in range(_BITS):
            image[:_BIT, bit * _BIT : (bit + 1) * _BIT] = 255 if number >> bit & 1 else 0
        yield _frame_of(number, image, owner)


def _frame_of(number: int, image: np.ndarray, owner: np.ndarray) -> SceneFrame:
    ids = np.array([row for row in range(1, len(_MOVERS) + 1) if (owner == row).any()], np.int64)
    boxes = []
    visible = []
    for row in ids:
        ys, xs = np.nonzero(owner == row)
        boxes.append([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
        visible.append(min(len(xs) / (np.pi * _MOVERS[row - 1][1] ** 2), 1.0))
    classes = np.array([NAMES.index(_MOVERS[row - 1][0]) for row in ids], np.int64)
    return SceneFrame(number, image, ids, classes, np.array(boxes, np.float64).reshape(-1, 4), np.array(visible))


def number_in(image: np.ndarray) -> int:
    """Reads the number of a frame, even after lossy compression."""
    middle = image[_BIT // 2, _BIT // 2 : _BITS * _BIT : _BIT].mean(-1)
    return int(((middle > 127) << np.arange(_BITS)).sum())


def write_video(path: Path, frames: list[SceneFrame]) -> Path:
    video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (SIZE, SIZE))
    for frame in frames:
        video.write(frame.image[..., ::-1])
    video.release()
    return path


def write_images(folder: Path, frames: list[SceneFrame]) -> Path:
    folder.mkdir(parents=True)
    for frame in frames:
        cv2.imwrite(str(folder / f"{frame.number:06d}.png"), frame.image[..., ::-1])
    return folder


def detections_in(frame: SceneFrame) -> np.ndarray:
    """Returns detections (N, 6), corners, score and class, like an imperfect detector's, highest score first: boxes are
    off by a pixel, and scores fall from 0.9 for a fully visible object to less than 0.5 for one that is half hidden."""
    rng = np.random.default_rng(frame.number)
    scores = 0.05 + 0.85 * frame.visible**1.2 - rng.uniform(0, 0.05, len(frame.visible))
    order = np.argsort(-scores)
    boxes = np.clip(frame.boxes_xyxy_px + rng.normal(0, 1, frame.boxes_xyxy_px.shape), 0, SIZE)
    return np.concatenate([boxes, scores[:, None], frame.classes[:, None]], 1)[order]


def _iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the IoU (N, M) of boxes (N, 4) and (M, 4)."""
    return iou(torch.from_numpy(a)[:, None], torch.from_numpy(b)[None]).numpy()


def scores_of(frames: Sequence[SceneFrame], tracked: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Returns IDF1, MOTA, identity switches and track fragmentations, computed by motmetrics at IoU 0.5.

    ``tracked``: ids (N,) and boxes (N, 4) of each frame. Boxes on objects that are hidden too much are ignored.
    """
    import motmetrics

    accumulator = motmetrics.MOTAccumulator(auto_id=True)
    for frame, (ids, boxes) in zip(frames, tracked, strict=True):
        overlap = _iou(boxes, frame.boxes_xyxy_px)
        best = overlap.argmax(1) if overlap.size else np.zeros(len(boxes), int)
        is_on_hidden = (overlap.max(1, initial=0) >= 0.5) & ~frame.expected[best] if overlap.size else best.astype(bool)
        distances = 1 - _iou(frame.boxes_xyxy_px[frame.expected], boxes[~is_on_hidden])
        distances[distances > 0.5] = np.nan
        accumulator.update(frame.ids[frame.expected], ids[~is_on_hidden], distances)
    names = ["idf1", "mota", "num_switches", "num_fragmentations"]
    summary = motmetrics.metrics.create().compute(accumulator, metrics=names, name="scene")
    return {name: float(summary[name].iloc[0]) for name in names}
