"""The detections of one image, with the attributes that programs written for Ultralytics' results use.

A `Results` holds the data: an image and its `Boxes` (result_boxes.py). Its methods convert them (result_records.py),
draw them (drawing.py), write them (detection_writer.py) and show them (window.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from torch import Tensor

from engine.inference.results.detection_writer import write_crops, write_yolo_labels
from engine.inference.results.drawing import describe_counts, draw_detections
from engine.inference.results.result_boxes import Boxes
from engine.inference.results.result_names import WRITABLE, class_folders
from engine.inference.results.result_records import DataFrame, records_of, records_to_pandas
from engine.inference.results.window import Window
from utils.config.aliases import attribute_error
from utils.drawing.draw import write_image
from utils.errors import UserError

_OF_ONE_RESULT = ("boxes", "image", "names", "orig_shape", "path", "speed")


class Results:
    """The detections of one image, uint8 (H, W, 3) RGB, on the CPU.

    ``path``: path of the file, or a name by position. ``speed``: milliseconds by stage (preprocess, inference,
    postprocess); times of a batch are divided by its size.
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
        """Returns the number of detections by class, such as ``person 2, bus 1``."""
        return describe_counts(Counter(self.boxes.class_numbers), self.names)

    def drawn(self, *, conf: bool = True, line_width: int | None = None, labels: bool = True) -> np.ndarray:
        """Draws the boxes into a copy of the image: uint8 (H, W, 3) RGB. ``conf``: whether labels show the confidence;
        ``line_width``: pixels, None: by image size."""
        return draw_detections(
            self.image,
            self.boxes.array[:, :4],
            classes=np.array(self.boxes.class_numbers),
            scores=self.boxes.array[:, -2] if conf else None,
            tracks=self.boxes.track_ids,
            names=self.names if labels else None,
            line_width=line_width or 0,
        )

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
        boxes = self.boxes
        write_yolo_labels(Path(txt_file), self.orig_shape, boxes.table(), scores=save_conf, tracks=boxes.track_ids)
        return str(txt_file)

    def save_crop(self, save_dir: str | Path, file_name: str | Path = "im.jpg") -> None:
        """Writes each box's pixels, with a margin, to SAVE_DIR/CLASS/STEM_ROW.jpg, with the stem of ``file_name``."""
        folder_of_class = class_folders(self.names)
        folders = [folder_of_class[c] for c in self.boxes.class_numbers]
        write_crops(Path(save_dir), Path(file_name).stem, self.image, self.boxes.array[:, :4], folders=folders)

    def summary(self, normalize: bool = False, decimals: int = 5) -> list[dict[str, Any]]:
        """Returns a record of each detection: name, class, confidence, and box with x1, y1, x2, y2; with ``track_id``
        if objects were tracked."""
        return records_of(self.boxes, self.names, normalize=normalize, decimals=decimals)

    def to_df(self, normalize: bool = False, decimals: int = 5) -> DataFrame:
        """Converts `summary` to a pandas DataFrame. Raises UserError if pandas is not installed."""
        return records_to_pandas(self.summary(normalize, decimals), has_tracks=self.boxes.is_track)

    def to_json(self, normalize: bool = False, decimals: int = 5) -> str:
        """Converts `summary` to JSON."""
        return json.dumps(self.summary(normalize, decimals), ensure_ascii=False, indent=2)

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
