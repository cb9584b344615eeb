"""The detections of one image, with the attributes that programs written for Ultralytics' results use.

Frame: original pixels; values whose name ends in ``n`` are divided by the image's width and height. N detections of one
image, highest confidence first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from torch import Tensor

from engine.inference.detection_writer import WRITABLE, Window, write_crops, write_yolo_labels
from utils.boxes import scale_boxes, xyxy_to_cxcywh
from utils.config.other_programs.table import python_hint
from utils.detections import DetectionTable
from utils.drawing.draw import class_colors, draw_boxes, write_image
from utils.errors import UserError
from utils.machine.packages import require_package

DataFrame: TypeAlias = Any  # of pandas, which is not required
_OF_ONE_RESULT = ("boxes", "image", "names", "orig_shape", "path", "speed")
SUMMARY_COLUMNS = ["name", "class", "confidence", "box"]
COLUMNS = 6  # x1, y1, x2, y2, confidence, class
TRACKED_COLUMNS = 7  # x1, y1, x2, y2, id of the track, confidence, class


def attribute_error(kind: str, owner: str, name: str) -> AttributeError:
    """Makes the error for a missing attribute, with the replacement if other programs have the attribute. ``kind``: see
    `python_hint`."""
    hint = "" if name.startswith("_") else python_hint(kind, name)
    return AttributeError(f"{owner} has no attribute {name!r}" + (f": {hint}" if hint else ""), name=name)


class Boxes:
    """Boxes with confidences and classes, as one tensor or array. ``boxes[0]`` and the items of an iteration are
    `Boxes` with one row."""

    def __init__(self, data: Tensor | np.ndarray, orig_shape: tuple[int, int]) -> None:
        """``data``: float (N, 6) or (6,): x1, y1, x2, y2, confidence, class; of tracked objects (N, 7) or (7,): the id
        of the track before the confidence. ``orig_shape``: height and width of the image."""
        self.data = data[None] if data.ndim == 1 else data
        height, width = orig_shape
        self.orig_shape = (height, width)
        if self.data.ndim != 2 or self.data.shape[1] not in (COLUMNS, TRACKED_COLUMNS):
            raise ValueError(
                f"rows of {COLUMNS} or {TRACKED_COLUMNS} numbers are expected, got the shape {tuple(data.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def xyxy(self) -> Tensor | np.ndarray:
        """Corners (N, 4)."""
        return self.data[:, :4]

    @property
    def xywh(self) -> Tensor | np.ndarray:
        """Center, width and height (N, 4)."""
        return _to_centers(self.xyxy)

    @property
    def xyxyn(self) -> Tensor | np.ndarray:
        """Corners (N, 4), normalized."""
        return self._normalized(self.xyxy)

    @property
    def xywhn(self) -> Tensor | np.ndarray:
        """Center, width and height (N, 4), normalized."""
        return self._normalized(self.xywh)

    @property
    def conf(self) -> Tensor | np.ndarray:
        """Confidences (N,)."""
        return self.data[:, -2]

    @property
    def cls(self) -> Tensor | np.ndarray:
        """Classes (N,), whole numbers of the type of ``data``."""
        return self.data[:, -1]

    @property
    def is_track(self) -> bool:
        """Whether objects were tracked."""
        return self.data.shape[1] == TRACKED_COLUMNS

    @property
    def id(self) -> Tensor | np.ndarray | None:
        """Ids of tracks (N,), whole numbers of the type of ``data``; None if objects were not tracked."""
        return self.data[:, 4] if self.is_track else None

    def cpu(self) -> Boxes:
        """Returns itself: detections are on the CPU."""
        return self

    def numpy(self) -> Boxes:
        """Returns the boxes with ``data`` as an array."""
        return Boxes(self.array, self.orig_shape)

    @property
    def array(self) -> np.ndarray:
        """``data`` as an array."""
        return self.data if isinstance(self.data, np.ndarray) else self.data.numpy()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | np.ndarray) -> Boxes:
        return Boxes(self.data[index], self.orig_shape)

    def __iter__(self) -> Iterator[Boxes]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Boxes(shape={self.shape}, orig_shape={self.orig_shape}, data={self.data})"

    def _normalized(self, boxes: Tensor | np.ndarray) -> Tensor | np.ndarray:
        height, width = self.orig_shape
        if isinstance(boxes, np.ndarray):
            return scale_boxes(boxes, 1 / width, 1 / height)
        return scale_boxes(boxes, 1 / width, 1 / height)


def _to_centers(boxes: Tensor | np.ndarray) -> Tensor | np.ndarray:
    if isinstance(boxes, np.ndarray):
        return xyxy_to_cxcywh(boxes)
    return xyxy_to_cxcywh(boxes)


class Results:
    """The detections of one image, uint8 (H, W, 3) RGB, on the CPU.

    ``path``: of the file, or a name by position. ``speed``: milliseconds by stage (preprocess, inference, postprocess);
    those of a batch are divided by its size.
    """

    masks = keypoints = probs = obb = None  # a detector of boxes finds none of these

    def __init__(
        self, image: np.ndarray, path: str, names: Mapping[int, str], boxes: Boxes, speed: Mapping[str, float]
    ) -> None:
        self.image = image
        self.path = path
        self.names = dict(names)
        self.boxes = boxes
        height, width = image.shape[:2]
        self.orig_shape = (height, width)
        self.speed = dict(speed)

    @cached_property
    def orig_img(self) -> np.ndarray:
        """The image, uint8 (H, W, 3) BGR."""
        return cv2.cvtColor(self.image, cv2.COLOR_RGB2BGR)

    def cpu(self) -> Results:
        """Returns itself: detections are on the CPU."""
        return self

    def numpy(self) -> Results:
        """Returns the result with its boxes as an array."""
        return self._with(self.boxes.numpy())

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | np.ndarray) -> Results:
        return self._with(self.boxes[index])

    def __iter__(self) -> Iterator[Results]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Results({self.path}: {self.verbose()})"

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError naming the replacement, if there is one. Python calls it for missing attributes."""
        raise attribute_error("result", "a result", name)

    def verbose(self) -> str:
        """Returns the number of detections by class, as ``person 2, bus 1``."""
        return describe_counts(Counter(self._classes()), self.names)

    def drawn(self, *, conf: bool = True, line_width: int | None = None, labels: bool = True) -> np.ndarray:
        """Draws the boxes into a copy of the image: uint8 (H, W, 3) RGB. ``conf``: whether labels show the confidence;
        ``line_width``: pixels, None: by image size."""
        classes = self._classes()
        tracks = self._tracks()
        texts = None
        if labels:
            texts = label_texts(self.names, classes, self.boxes.array[:, -2] if conf else None, tracks)
        colors = class_colors(np.array(classes if tracks is None else tracks))
        return draw_boxes(self.image, self.boxes.array[:, :4], texts, colors, thickness=line_width or 0)

    def plot(self, *, conf: bool = True, line_width: int | None = None, labels: bool = True) -> np.ndarray:
        """Returns the image of `drawn` as BGR, as OpenCV shows and writes images."""
        return cv2.cvtColor(self.drawn(conf=conf, line_width=line_width, labels=labels), cv2.COLOR_RGB2BGR)

    def save(self, filename: str | Path | None = None) -> str:
        """Writes the image with its boxes and returns the file's name, by default results_STEM.jpg. Raises UserError
        for a format that cannot be written."""
        filename = str(filename or f"results_{Path(self.path).stem}.jpg")
        if Path(filename).suffix.lower() not in WRITABLE:
            raise UserError(f"{filename}: images are written as {', '.join(sorted(WRITABLE))}")
        write_image(filename, self.drawn())
        return filename

    def show(self) -> None:
        """Shows the image with its boxes in a window, until a key is pressed. Raises UserError without a display; in a
        notebook, a result that ends a cell is shown there."""
        window = Window()
        window.show(self.drawn(), wait=True)
        window.close()

    def _repr_png_(self) -> bytes:
        """Returns the picture that notebooks show."""
        return cv2.imencode(".png", self.plot())[1].tobytes()

    def save_txt(self, txt_file: str | Path, save_conf: bool = False) -> str:
        """Writes YOLO rows, replacing the file: class, cx, cy, w, h normalized, with ``save_conf`` the confidence, and
        the id of the track if objects were tracked."""
        write_yolo_labels(Path(txt_file), self.orig_shape, self._table(), scores=save_conf, tracks=self._tracks())
        return str(txt_file)

    def save_crop(self, save_dir: str | Path, file_name: str | Path = "im.jpg") -> None:
        """Writes each box's pixels, with a margin, to SAVE_DIR/CLASS/STEM_ROW.jpg, with the stem of ``file_name``."""
        names = [self.names[c] for c in self._classes()]
        write_crops(Path(save_dir), Path(file_name).stem, self.image, self.boxes.array[:, :4], names)

    def summary(self, normalize: bool = False, decimals: int = 5) -> list[dict[str, Any]]:
        """Returns a record of each detection: name, class, confidence, and box with x1, y1, x2, y2; with ``track_id``
        if objects were tracked."""
        boxes = self.boxes.array[:, :4]
        if normalize:
            height, width = self.orig_shape
            boxes = scale_boxes(boxes, 1 / width, 1 / height)
        corners = np.round(boxes.astype(np.float64), decimals).tolist()
        scores = np.round(self._table().scores, decimals).tolist()
        records: list[dict[str, Any]] = [
            {"name": self.names[c], "class": c, "confidence": score, "box": dict(zip(("x1", "y1", "x2", "y2"), box))}
            for c, score, box in zip(self._classes(), scores, corners)
        ]
        tracks = self._tracks()
        if tracks is not None:
            for record, track in zip(records, tracks):
                record["track_id"] = track
        return records

    def to_df(self, normalize: bool = False, decimals: int = 5) -> DataFrame:
        """Converts `summary` to a table of pandas. Raises UserError without pandas."""
        pandas = require_package("pandas", "to_df()", "use summary(), a list of records")
        columns = [*SUMMARY_COLUMNS, "track_id"] if self.boxes.is_track else SUMMARY_COLUMNS
        return pandas.DataFrame(self.summary(normalize, decimals), columns=columns)

    def to_json(self, normalize: bool = False, decimals: int = 5) -> str:
        """Converts `summary` to JSON."""
        return json.dumps(self.summary(normalize, decimals), ensure_ascii=False, indent=2)

    def _classes(self) -> list[int]:
        return self.boxes.array[:, -1].astype(int).tolist()

    def _table(self) -> DetectionTable:
        boxes = self.boxes.array
        return DetectionTable(
            image_index=np.zeros(len(boxes), np.int64),
            boxes_xyxy_px=boxes[:, :4].astype(np.float64),
            scores=boxes[:, -2].astype(np.float64),
            classes=boxes[:, -1].astype(np.int64),
        )

    def _tracks(self) -> list[int] | None:
        """Returns the ids of tracks; None if objects were not tracked."""
        return self.boxes.array[:, 4].astype(int).tolist() if self.boxes.is_track else None

    def _with(self, boxes: Boxes) -> Results:
        return Results(self.image, self.path, self.names, boxes, self.speed)


class ResultList(list):
    """Results of several images. In YOLOv5 they are one object, so an error names the replacement of its attributes."""

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError naming the replacement, if there is one. Python calls it for missing attributes."""
        if not name.startswith("_") and (hasattr(Results, name) or name in _OF_ONE_RESULT):
            raise AttributeError(f"a list of results has no attribute {name!r}; each result has: results[0].{name}")
        error = attribute_error("result", "a list of results", name)
        raise AttributeError(f"{error}, for each result") if ": " in str(error) else error


def boxes_of(table: DetectionTable, image_hw: tuple[int, int], tracks: np.ndarray | None = None) -> Boxes:
    """Converts the detections of one image to float32 on the CPU. ``tracks``: ids (N,) of their tracks."""
    ids = [] if tracks is None else [tracks[:, None]]
    columns = [table.boxes_xyxy_px, *ids, table.scores[:, None], table.classes[:, None]]
    return Boxes(torch.from_numpy(np.concatenate(columns, 1).astype(np.float32)), image_hw)


def label_texts(
    names: Mapping[int, str] | Sequence[str],
    classes: Iterable[int],
    scores: Iterable[float] | None,
    tracks: Iterable[int] | None = None,
) -> list[str]:
    """Makes the texts next to boxes, as ``#3 person 0.85``; ``scores`` None: without confidences; ``tracks`` None:
    without ids."""
    texts = [names[c] for c in classes]
    if tracks is not None:
        texts = [f"#{track} {text}" for track, text in zip(tracks, texts)]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores)]
    return texts


def describe_counts(counts: Mapping[int, int], names: Mapping[int, str] | Sequence[str]) -> str:
    """Lists detections by class, as ``person 2, bus 1``. Names are not inflected: they may be in any language."""
    return ", ".join(f"{names[c]} {count:,}" for c, count in sorted(counts.items())) or "nothing found"
