"""The detections of one image, with the attributes that programs written for Ultralytics' results use, and the window
that shows them.

Frame: original pixels; values whose name ends in ``n`` are divided by the image's width and height. N detections of one
image, highest confidence first.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import cv2
import numpy as np
from torch import Tensor

from engine.inference.sources import Frame
from utils.boxes import scale_boxes, xyxy_to_cxcywh
from utils.config.words import attribute_error
from utils.drawing.draw import class_colors, draw_boxes, write_image
from utils.errors import UserError, one_line
from utils.files.new_folder import increment_path
from utils.files.safe_io import folder_below, write_whole
from utils.files.url import url_path
from utils.machine.packages import require_package
from utils.pixels import as_rgb8
from utils.strings import counted

Rows: TypeAlias = "Tensor | np.ndarray"
Index: TypeAlias = "int | slice | Sequence[int] | Tensor | np.ndarray"
DataFrame: TypeAlias = Any  # pandas.DataFrame; pandas is not required
WRITABLE = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
FRACTION_DIGITS = 9  # digits of fractions in YOLO's labels
CROP_GAIN = 1.02
CROP_MARGIN_PX = 10


class Boxes:
    """Boxes with confidences and classes, as one tensor or array. ``boxes[0]`` and the items of an iteration are
    `Boxes` with one row."""

    def __init__(self, data: Rows, orig_shape: tuple[int, int]) -> None:
        """``data``: float (N, 6) or (6,): x1, y1, x2, y2, confidence, class; of tracked objects (N, 7) or (7,): the id
        of the track before the confidence. ``orig_shape``: height and width of the image. Raises ValueError for another
        shape."""
        self.data = data[None] if data.ndim == 1 else data
        height, width = orig_shape
        self.orig_shape = (height, width)
        if self.data.ndim != 2 or self.data.shape[1] not in (6, 7):
            raise ValueError(f"rows of 6 or 7 numbers are expected, got the shape {tuple(data.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def xyxy(self) -> Rows:
        """Corners (N, 4)."""
        return self.data[:, :4]

    @property
    def xywh(self) -> Rows:
        """Center, width and height (N, 4)."""
        return xyxy_to_cxcywh(cast(Tensor, self.xyxy))  # or an array; mypy rejects a union of both

    @property
    def xyxyn(self) -> Rows:
        """Corners (N, 4), normalized."""
        return self._normalized(self.xyxy)

    @property
    def xywhn(self) -> Rows:
        """Center, width and height (N, 4), normalized."""
        return self._normalized(self.xywh)

    @property
    def conf(self) -> Rows:
        """Confidences (N,)."""
        return self.data[:, -2]

    @property
    def cls(self) -> Rows:
        """Classes (N,), whole numbers of the type of ``data``."""
        return self.data[:, -1]

    @property
    def is_track(self) -> bool:
        """True if objects were tracked."""
        return self.data.shape[1] == 7

    @property
    def id(self) -> Rows | None:
        """Ids of tracks (N,), whole numbers of the type of ``data``; None if objects were not tracked."""
        return self.data[:, 4] if self.is_track else None

    @property
    def track_ids(self) -> list[int] | None:
        """Ids of tracks as integers; None if objects were not tracked."""
        return self.array[:, 4].astype(int).tolist() if self.is_track else None

    @property
    def array(self) -> np.ndarray:
        """``data`` as an array."""
        return self.data if isinstance(self.data, np.ndarray) else self.data.numpy()

    @property
    def classes(self) -> list[int]:
        """Classes as integers."""
        return self.array[:, -1].astype(int).tolist()

    def cpu(self) -> Boxes:
        """Returns itself: detections are on the CPU."""
        return self

    def numpy(self) -> Boxes:
        """Returns the boxes with ``data`` as an array."""
        return Boxes(self.array, self.orig_shape)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Index) -> Boxes:
        return Boxes(self.data[index], self.orig_shape)

    def __iter__(self) -> Iterator[Boxes]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Boxes(shape={self.shape}, orig_shape={self.orig_shape}, data={self.data})"

    def _normalized(self, boxes: Rows) -> Rows:
        height, width = self.orig_shape
        return scale_boxes(cast(Tensor, boxes), 1 / width, 1 / height)


class Results:
    """The detections of one image, uint8 (H, W, 3) RGB, on the CPU.

    ``frame``: the image as it was read. ``path``: path of the file, or a name by position. ``speed``: milliseconds by
    stage (preprocess, inference, postprocess); times of a batch are divided by its size. ``time_s``: seconds from the
    first frame of a video or stream; None for images.
    """

    masks = keypoints = probs = obb = None  # a detector of boxes finds none of these

    def __init__(self, frame: Frame, names: Mapping[int, str], boxes: Boxes, speed: Mapping[str, float]) -> None:
        self.frame = frame
        self.image = as_rgb8(frame.image)
        self.path = frame.path
        self.time_s = frame.time_s if frame.is_video else None
        self.names = dict(names)
        self.boxes = boxes
        self.orig_shape = boxes.orig_shape
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

    def _with(self, boxes: Boxes) -> Results:
        return Results(self.frame, self.names, boxes, self.speed)

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: Index) -> Results:
        return self._with(self.boxes[index])

    def __iter__(self) -> Iterator[Results]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Results({self.path}: {self.verbose()})"

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError naming the replacement, if there is one. Python calls it for missing attributes."""
        raise attribute_error("result", "a result", name)

    def verbose(self) -> str:
        """Returns the number of detections by class, such as ``person 2, bus 1``."""
        return describe_counts(Counter(self.boxes.classes), self.names)

    def drawn(self, *, conf: bool = True, line_width: int | None = None, labels: bool = True) -> np.ndarray:
        """Draws the boxes into a copy of the image: uint8 (H, W, 3) RGB. Labels are such as ``#3 person 0.85``, with
        the id of a track, and each track or else each class has its own color. ``conf``: whether labels show the
        confidence; ``line_width``: pixels, None: by image size."""
        boxes = self.boxes
        texts = [self.names[c] for c in boxes.classes]
        if boxes.track_ids is not None:
            texts = [f"#{track} {text}" for track, text in zip(boxes.track_ids, texts)]
        if conf:
            texts = [f"{text} {score:.2f}" for text, score in zip(texts, boxes.array[:, -2])]
        colors = class_colors(np.array(boxes.classes if boxes.track_ids is None else boxes.track_ids, np.int64))
        return draw_boxes(self.image, boxes.array[:, :4], texts if labels else None, colors, thickness=line_width or 0)

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
        """Writes YOLO rows, replacing the file: class, cx, cy, w, h normalized, then the confidence with ``save_conf``,
        and the track id if objects were tracked."""
        boxes = Boxes(self.boxes.array.astype(np.float64), self.orig_shape)
        columns = [boxes.array[:, -1:], boxes.xywhn]
        template = "%d" + f" %.{FRACTION_DIGITS}f" * 4
        if save_conf:
            columns.append(boxes.array[:, -2:-1])
            template += " %.6f"
        if boxes.is_track:
            columns.append(boxes.array[:, 4:5])
            template += " %d"
        Path(txt_file).parent.mkdir(parents=True, exist_ok=True)
        write_whole(txt_file, "".join(template % tuple(row) + "\n" for row in np.concatenate(columns, 1).tolist()))
        return str(txt_file)

    def crops(self) -> list[np.ndarray]:
        """Cuts out the pixels of each box, uint8 (h, w, 3) RGB; without pixels for boxes outside the image. Crops have
        the margin of YOLOv5 and Ultralytics: a side is multiplied by `CROP_GAIN` and lengthened by `CROP_MARGIN_PX`;
        fractions of pixels are cut off."""
        center, side = np.split(xyxy_to_cxcywh(self.boxes.array[:, :4].astype(np.float64)), 2, 1)
        half = (side * CROP_GAIN + CROP_MARGIN_PX) / 2
        corners = np.concatenate([center - half, center + half], 1).astype(int)  # rounds towards zero
        return [self.image[y0:y1, x0:x1] for x0, y0, x1, y1 in corners.clip(0).tolist()]

    def save_crop(self, save_dir: str | Path, file_name: str | Path = "im.jpg") -> None:
        """Writes `crops` to SAVE_DIR/CLASS/STEM_ROW.jpg, with the stem of ``file_name``."""
        for row, (c, crop) in enumerate(zip(self.boxes.classes, self.crops())):
            if crop.size:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                folder = folder_below(save_dir, safe_name(self.names[c]))
                write_image(folder / f"{Path(file_name).stem}_{row}.jpg", crop)

    def summary(self, normalize: bool = False, decimals: int = 5) -> list[dict[str, Any]]:
        """Returns a record of each detection: name, class, confidence, and box with x1, y1, x2, y2; with ``track_id``
        if objects were tracked. Numbers are rounded; with ``normalize``, corners are fractions of the image."""
        boxes = self.boxes.numpy()
        corners = np.round(cast(np.ndarray, boxes.xyxyn if normalize else boxes.xyxy).astype(np.float64), decimals)
        scores = np.round(boxes.array[:, -2].astype(np.float64), decimals)
        records: list[dict[str, Any]] = [
            {"name": self.names[c], "class": c, "confidence": score, "box": dict(zip(("x1", "y1", "x2", "y2"), box))}
            for c, score, box in zip(boxes.classes, scores.tolist(), corners.tolist())
        ]
        for record, track in zip(records, boxes.track_ids or ()):
            record["track_id"] = track
        return records

    def to_df(self, normalize: bool = False, decimals: int = 5) -> DataFrame:
        """Converts `summary` to a pandas DataFrame. Raises UserError if pandas is not installed."""
        pandas = require_package("pandas", "to_df()", "use summary(), a list of records")
        columns = ["name", "class", "confidence", "box", *(["track_id"] if self.boxes.is_track else [])]
        return pandas.DataFrame(self.summary(normalize, decimals), columns=columns)

    def to_json(self, normalize: bool = False, decimals: int = 5) -> str:
        """Converts `summary` to JSON."""
        return json.dumps(self.summary(normalize, decimals), ensure_ascii=False, indent=2)


class ResultList(list[Results]):
    """Results of several images, with the methods of YOLOv5's results that programs use most."""

    @property
    def xyxy(self) -> list[Rows]:
        """Boxes of each image (N, 6): x1, y1, x2, y2, confidence, class."""
        return [result.boxes.data for result in self]

    pred = xyxy  # supervision reads it

    def pandas(self) -> SimpleNamespace:
        """Returns ``xyxy`` as DataFrames, with the names of the classes. Raises UserError if pandas is not
        installed."""
        pandas = require_package("pandas", "pandas()", "use xyxy, whose rows are tensors")
        columns = ["xmin", "ymin", "xmax", "ymax", "confidence", "class"]
        tables = []
        for result in self:
            table = pandas.DataFrame(result.boxes.array, columns=columns)
            table["class"] = result.boxes.classes
            table["name"] = [result.names[c] for c in result.boxes.classes]
            tables.append(table)
        return SimpleNamespace(xyxy=tables)

    def print(self) -> None:
        """Prints the size and the detections of each image."""
        for number, result in enumerate(self, 1):
            height, width = result.orig_shape
            print(one_line(f"image {number}/{len(self)}: {height}x{width} {result.verbose()}"))

    def save(self, labels: bool = True, save_dir: str | Path = "runs/detect/exp", exist_ok: bool = False) -> None:
        """Writes each image with its boxes into a new folder: ``save_dir`` or, unless ``exist_ok``, the first of
        SAVE_DIR2, SAVE_DIR3, ... that does not exist. Images of equal names get their position in the list."""
        folder = increment_path(Path(save_dir).parent, Path(save_dir).name, exist_ok)
        stems = [Path(result.path).stem for result in self]
        for number, (result, stem) in enumerate(zip(self, stems)):
            name = stem if stems.count(stem) == 1 else f"{stem}_{number}"
            write_image(folder / (name + written_suffix(result.path)), result.drawn(labels=labels))
        print(f"Saved {counted(len(self), 'image')} to {folder}")

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError naming the replacement, if there is one. Python calls it for missing attributes."""
        raise attribute_error("result", "a list of results, one for each image,", name)


def describe_counts(counts: Mapping[int, int], names: Mapping[int, str]) -> str:
    """Lists detections by class, such as ``person 2, bus 1``. Names are not inflected: they may be in any language."""
    return ", ".join(f"{names[c]} {count:,}" for c, count in sorted(counts.items())) or "nothing found"


def safe_name(name: str) -> str:
    """Converts ``name`` to a file name without separators, control characters, and characters that some systems
    forbid."""
    return re.sub(r'[\x00-\x1f/\\:*?"<>|@]+', "_", name).strip(". ") or "_"


def written_suffix(path: str) -> str:
    """Returns the suffix of an image's drawing: the image's own, or .jpg for formats that cannot be written."""
    suffix = Path(url_path(path) if "://" in path else path).suffix
    return suffix if suffix.lower() in WRITABLE else ".jpg"


class Window:
    """A window on the screen that shows one image at a time. Raises UserError where none can be opened."""

    NAME = "lockstep"

    def __init__(self) -> None:
        # Without a display, some builds of OpenCV end the process instead of raising.
        has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        try:
            if sys.platform.startswith("linux") and not has_display:
                raise UserError("no window can be opened: there is no display; images can be saved instead")
            cv2.namedWindow(self.NAME, cv2.WINDOW_NORMAL)
        except cv2.error:
            raise UserError(
                "this OpenCV cannot open windows (a headless build?); images can be saved instead"
            ) from None

    def show(self, image: np.ndarray, *, wait: bool) -> bool:
        """Shows ``image`` (RGB); with ``wait``, until a key is pressed. Returns False if the key is q or Esc."""
        cv2.imshow(self.NAME, image[..., ::-1])
        return cv2.waitKey(0 if wait else 1) & 0xFF not in (ord("q"), 27)

    def close(self) -> None:
        cv2.destroyWindow(self.NAME)
