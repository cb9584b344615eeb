"""A video with known identities: objects of the demo set that move, cross, and pass behind a wall."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch

from data.dataset import demo
from engine.inference.results import Boxes, Results
from engine.inference.sources import Frame
from engine.inference.tracks import ObjectTracks
from utils.boxes import iou
from utils.drawing.draw import write_image

SIZE = 320
FRAMES = 150
FPS = 25.0
VISIBLE = 0.5  # fraction of an object that must be visible to count as one that should be tracked
_WALL = (140, 196)  # columns, in pixels of the frame
_BIT = 8  # side of a square that holds a bit of the frame's number
_BITS = 8


@dataclass(frozen=True)
class _Mover:
    """An object on a straight line, or on waves around one. Frame: pixels of the frame."""

    name: str
    colors: tuple[tuple[int, int, int], tuple[int, int, int]]  # RGB
    radius: float
    start: tuple[float, float]
    speed: tuple[float, float]  # per frame
    wave: float = 0.0  # height

    def center(self, number: int) -> tuple[float, float]:
        x, y = (at + by * number for at, by in zip(self.start, self.speed))
        return x, y + self.wave * float(np.sin(number / 12))


_MOVERS = (
    _Mover("ball", ((220, 40, 40), (250, 230, 60)), 24, (10, 80), (2.1, 0.0)),  # crosses the next one
    _Mover("ball", ((40, 90, 220), (240, 240, 240)), 24, (310, 95), (-2.1, 0.0)),
    _Mover("ring", ((30, 180, 60), (30, 180, 60)), 22, (30, 180), (1.9, 0.0), wave=8),
    _Mover("triangle", ((250, 140, 20), (250, 140, 20)), 26, (290, 240), (-0.9, -0.1), wave=12),
    _Mover("checker", ((200, 60, 200), (30, 30, 30)), 22, (60, 280), (1.2, -0.2)),
    _Mover("pie", ((60, 220, 220), (60, 220, 220)), 22, (250, 150), (0.0, 0.6), wave=6),
    _Mover("ring", ((250, 250, 120), (250, 250, 120)), 20, (-60, 225), (1.8, 0.1)),  # comes in later
)
NAMES = demo.CLASS_NAMES


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
    scale = demo.SUPERSAMPLE
    side = SIZE * scale
    background = demo.render_background(np.random.default_rng(5), side)
    wall = slice(_WALL[0] * scale, _WALL[1] * scale)
    for number in range(frames):
        canvas = background.copy()
        owner = np.full((side, side), -1, np.int16)
        areas = []
        for row, mover in enumerate(_MOVERS):
            areas.append(_draw(mover, number, canvas, owner, row))
        canvas[100 * scale :, wall] = (105, 100, 95)
        owner[100 * scale :, wall] = -1
        image = cv2.resize(canvas, (SIZE, SIZE), interpolation=cv2.INTER_AREA).round().clip(0, 255).astype(np.uint8)
        _write_number(image, number)
        yield _frame_of(number, image, owner, np.array(areas))


def _draw(mover: _Mover, number: int, canvas: np.ndarray, owner: np.ndarray, row: int) -> float:
    """Draws a mover on the canvas, and writes ``row`` to the owners of its pixels. Returns its whole area in pixels.

    Only the window around it is rasterized, because the canvas is large.
    """
    radius = mover.radius * demo.SUPERSAMPLE
    x, y = (at * demo.SUPERSAMPLE for at in mover.center(number))
    extent = 2 * math.ceil(radius) + 3
    left, top = (math.floor(at) - extent // 2 for at in (x, y))
    to_window = np.array([[radius, 0, x - left], [0, radius, y - top]])
    is_inside, has_second, area = demo.shape_pixels(mover.name, to_window, extent)

    rows, own_rows = _overlap(top, extent, len(canvas))
    columns, own_columns = _overlap(left, extent, len(canvas))
    is_drawn = is_inside[own_rows, own_columns]
    canvas[rows, columns][is_drawn] = np.array(mover.colors, np.float32)[has_second[own_rows, own_columns][is_drawn]]
    owner[rows, columns][is_drawn] = row
    return area


def _overlap(start: int, extent: int, side: int) -> tuple[slice, slice]:
    """Returns the part of a canvas of ``side`` pixels that a window covers, and the same part of the window."""
    first = max(start, 0)
    end = max(min(start + extent, side), first)
    return slice(first, end), slice(first - start, end - start)


def _frame_of(number: int, image: np.ndarray, owner: np.ndarray, areas: np.ndarray) -> SceneFrame:
    rows = []
    boxes = []
    visible = []
    for row, area in enumerate(areas):
        is_visible = owner == row
        columns = np.flatnonzero(is_visible.any(0))
        lines = np.flatnonzero(is_visible.any(1))
        if len(columns):
            rows.append(row)
            boxes.append([columns[0], lines[0], columns[-1] + 1, lines[-1] + 1])
            visible.append(min(is_visible.sum() / area, 1.0))
    ids = np.array(rows, np.int64) + 1
    classes = np.array([NAMES.index(_MOVERS[row].name) for row in rows], np.int64)
    corners = np.array(boxes, np.float64).reshape(-1, 4) / demo.SUPERSAMPLE
    return SceneFrame(number, image, ids, classes, corners, np.array(visible, np.float64))


def _write_number(image: np.ndarray, number: int) -> None:
    for bit in range(_BITS):
        image[:_BIT, bit * _BIT : (bit + 1) * _BIT] = 255 if number >> bit & 1 else 0


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


def write_picture(path: str, numbers: Sequence[int] = (40, 80, 120)) -> None:
    """Writes some frames, side by side, with the tracks of ByteTrack."""
    tracks = ObjectTracks("bytetrack", 0.5)
    pictures = []
    for frame in scene(max(numbers) + 1):
        source_frame = Frame("scene.mp4", frame.image, frame.number, frame.number / FPS, fps=FPS, is_video=True)
        rows = detections_in(frame)
        rows = tracks.update(source_frame, rows[rows[:, 4] > tracks.lowest_confidence])
        if frame.number in numbers:
            boxes = Boxes(rows, frame.image.shape[:2])
            pictures.append(Results(frame.image, "scene.mp4", dict(enumerate(NAMES)), boxes, {}).drawn())
    write_image(path, np.concatenate(pictures, 1))


if __name__ == "__main__":
    write_picture("assets/tracks.jpg")
