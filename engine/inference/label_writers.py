"""The files of results and their names: crops, YOLO labels, tracks in MOT Challenge's format, rows of COCO JSON."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.boxes import scale_boxes, xyxy_to_cxcywh, xyxy_to_xywh
from utils.detections import DetectionTable
from utils.drawing.draw import write_image
from utils.files.safe_io import write_whole
from utils.files.url import url_path

WRITABLE = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
FRACTION_DIGITS = 9  # digits of fractions in YOLO's labels: 0.00001 px at a size of 10,000
CROP_GAIN = 1.02
CROP_MARGIN_PX = 10


def written_suffix(path: str) -> str:
    """Returns the suffix of an image's drawing: the image's own, or .jpg for formats that cannot be written."""
    suffix = Path(url_path(path) if "://" in path else path).suffix
    return suffix if suffix.lower() in WRITABLE else ".jpg"


def safe_name(name: str) -> str:
    """Converts ``name`` to a file name without separators, control characters, and characters that some systems
    forbid."""
    return re.sub(r'[\x00-\x1f/\\:*?"<>|@]+', "_", name).strip(". ") or "_"


class UniqueStems:
    """Assigns each source a file stem of its own: the source's stem, made safe, with a number if it is taken.

    A stem that was changed never equals that of another file, because labels/STEM.txt belongs to that image. Names are
    compared without case, as some file systems do.
    """

    def __init__(self, files: Iterable[str | Path] = ()) -> None:
        """``files``: those that will be named."""
        self.renamed: dict[str, str] = {}  # stems of the files that did not get their own, by path
        self._stems: dict[str, str] = {}  # by source
        self._taken: set[str] = set()
        self._own = {Path(file).stem.casefold() for file in files}

    def __call__(self, source: str, *, is_video: bool = False) -> str:
        """Returns the stem of ``source``, always the same one. Frames of a video are STEM_000123."""
        if source not in self._stems:
            own = _stem_of(source, is_video=is_video)

            def is_free(stem: str) -> bool:
                key = stem.casefold()
                if key in self._taken or (stem != own and key in self._own):
                    return False
                frame = re.escape(key) + r"_\d{6,}"
                return not is_video or not any(re.fullmatch(frame, name) for name in self._own)

            stem = _numbered(safe_name(own), is_free)
            self._taken.add(stem.casefold())
            self._stems[source] = stem
            if stem != own and Path(source).stem == own:
                self.renamed[source] = stem
        return self._stems[source]


def _numbered(name: str, is_free: Callable[[str], bool]) -> str:
    """Returns ``name``, or the first of NAME-2, NAME-3, ... that is free."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(filter(is_free, names))


def _stem_of(source: str, *, is_video: bool) -> str:
    if source.isdigit():
        return f"webcam{source}"
    if "://" in source:
        name = Path(url_path(source)).stem
        return (source.split("://", 1)[1] if is_video or not name else name)[:100]
    path = Path(source)
    if path.is_dir():  # a sequence of images; MOT Challenge calls its folders SEQUENCE/img1
        return path.parent.name if path.name == "img1" else path.name
    return path.stem


def class_folders(names: Mapping[int, str]) -> dict[int, str]:
    """Returns a folder name for each class: its name, made safe, with a number if an earlier class has the same."""
    folders: dict[int, str] = {}
    taken: set[str] = set()
    for c, name in names.items():
        folders[c] = _numbered(safe_name(name), lambda folder: folder.casefold() not in taken)
        taken.add(folders[c].casefold())
    return folders


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
    folder: Path, stem: str, image: np.ndarray, boxes_xyxy_px: np.ndarray, *, folders: Sequence[str]
) -> None:
    """Writes the pixels of boxes (N, 4), as `crop_images` yields them, to FOLDER/CLASS/STEM_ROW.jpg. ``folders``: CLASS
    of each box, see `class_folders`."""
    for row, crop in crop_images(image, boxes_xyxy_px):
        path = folder / folders[row] / f"{stem}_{row}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
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
    columns = [table.classes[:, None], scale_boxes(xyxy_to_cxcywh(table.boxes_xyxy_px), 1 / width, 1 / height)]
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
    table: DetectionTable, *, common: dict[str, Any], names: Sequence[str], ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Converts the detections of an image or frame to rows of predictions.json. ``common``: their first entries.
    ``names``, ``ids``: names and category ids by class."""
    boxes = np.round(xyxy_to_xywh(table.boxes_xyxy_px), 3).tolist()
    return [
        {**common, "category_id": ids[c], "category": names[c], "bbox": box, "score": round(score, 6)}
        for c, box, score in zip(table.classes.tolist(), boxes, table.scores.tolist())
    ]
