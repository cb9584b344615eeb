"""Writes detections: crops, YOLO labels, tracks in MOT Challenge's format, and rows of COCO JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.boxes import scale_boxes, xyxy_to_cxcywh, xyxy_to_xywh
from utils.detections import DetectionTable
from utils.drawing.draw import write_image
from utils.files.safe_io import write_whole

FRACTION_DIGITS = 9  # digits of fractions in YOLO's labels: 0.00001 px at a size of 10,000
CROP_GAIN = 1.02
CROP_MARGIN_PX = 10


def crop_images(image: np.ndarray, boxes_xyxy_px: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the row and the pixels (a view) of each box (N, 4) that is not outside the image. Crops have the margin of
    YOLOv5 and Ultralytics: a side is multiplied by `CROP_GAIN` and lengthened by `CROP_MARGIN_PX`; fractions of pixels
    are cut off."""
    center, side = np.split(xyxy_to_cxcywh(boxes_xyxy_px), 2, 1)
    half = (side * CROP_GAIN + CROP_MARGIN_PX) / 2
    corners = np.concatenate([center - half, center + half], 1).astype(int)  # rounds towards zero
    for row, (x0, y0, x1, y1) in enumerate(corners.tolist()):
        crop = image[max(y0, 0) : max(y1, 0), max(x0, 0) : max(x1, 0)]
        if crop.size:
            yield row, crop


def write_crops(
    folder: Path,
    stem: str,
    image: np.ndarray,
    boxes_xyxy_px: np.ndarray,
    *,
    folders: Sequence[str],
    before_writing: Callable[[Path], object] = lambda path: None,
) -> None:
    """Writes the pixels of boxes (N, 4), as `crop_images` yields them, to FOLDER/CLASS/STEM_ROW.jpg.

    Args:
        folders: CLASS of each box, see `class_folders`.
        before_writing: called with the path of each file.
    """
    for row, crop in crop_images(image, boxes_xyxy_px):
        path = folder / folders[row] / f"{stem}_{row}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        before_writing(path)
        write_image(path, crop)


def write_yolo_labels(
    path: Path,
    image_hw: tuple[int, int],
    table: DetectionTable,
    *,
    scores: bool = False,
    tracks: Sequence[int] | None = None,
) -> None:
    """Writes a line per detection: class, cx cy w h as fractions of the image's size, then the score with ``scores``,
    and the track id with ``tracks``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = image_hw
    boxes = scale_boxes(xyxy_to_cxcywh(table.boxes_xyxy_px), 1 / width, 1 / height)
    columns = [table.classes[:, None], boxes]
    template = "%d" + f" %.{FRACTION_DIGITS}f" * 4
    if scores:
        columns.append(table.scores[:, None])
        template += " %.6f"
    if tracks is not None:
        columns.append(np.array(tracks, dtype=np.float64)[:, None])
        template += " %d"
    rows = np.concatenate(columns, 1)
    write_whole(path, "".join(template % tuple(row) + "\n" for row in rows.tolist()))


def mot_lines(table: DetectionTable, tracks: np.ndarray, frame: int) -> str:
    """Returns the detections of a frame as lines of a MOT Challenge file: frame, id, left, top, width, height, score
    and three times -1. ``tracks``: ids (N,). ``frame``: counted from 0; the file counts from 1."""
    numbers = np.full(len(tracks), frame + 1)
    boxes = xyxy_to_xywh(table.boxes_xyxy_px)
    rows = np.concatenate([numbers[:, None], tracks[:, None], boxes, table.scores[:, None]], 1)
    template = "{:.0f},{:.0f},{:.3f},{:.3f},{:.3f},{:.3f},{:.6f},-1,-1,-1\n"
    return "".join(template.format(*row) for row in rows.tolist())


def coco_rows(
    table: DetectionTable,
    *,
    names: Sequence[str],
    ids: Sequence[int],
    source: str,
    image_id: str,
    frame: int | None,
    tracks: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """Converts the detections of an image or frame to rows of predictions.json.

    Args:
        names, ids: names and category ids by class.
        source: path of the image or video.
        image_id: stem of its files; for a frame, with the frame's number.
        frame: number of the frame; None: an image.
        tracks: ids (N,) of tracks, which become track_id.
    """
    boxes = np.round(xyxy_to_xywh(table.boxes_xyxy_px), 3).tolist()
    common: dict[str, Any] = {"image_id": image_id, "file": source}
    if frame is not None:
        common["frame"] = frame
    rows = [
        {**common, "category_id": ids[c], "category": names[c], "bbox": box, "score": round(score, 6)}
        for c, box, score in zip(table.classes.tolist(), boxes, table.scores.tolist())
    ]
    if tracks is not None:
        for row, track in zip(rows, tracks.tolist()):
            row["track_id"] = track
    return rows
