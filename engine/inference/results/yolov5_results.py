"""The results of several images, as programs for YOLOv5's torch.hub interface use them.

Frame: original pixels; values whose name ends in ``n`` are divided by the image's width and height. N detections of one
image, highest confidence first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.inference.results.detection_writer import crop_images, write_crops
from engine.inference.results.drawing import label_texts
from engine.inference.results.result_boxes import Boxes
from engine.inference.results.result_names import UniqueStems, class_folders, written_suffix
from engine.inference.results.result_records import DataFrame
from engine.inference.results.results import ResultList, Results
from engine.inference.results.window import Window
from utils.drawing.draw import write_image
from utils.errors import UserError
from utils.files.new_folder import increment_path
from utils.machine.packages import require_package
from utils.strings import counted

SAVE_DIR = "runs/detect/exp"
_CORNERS = ["xmin", "ymin", "xmax", "ymax"]
_CENTERS = ["xcenter", "ycenter", "width", "height"]
_COLUMNS = {"xyxy": _CORNERS, "xyxyn": _CORNERS, "xywh": _CENTERS, "xywhn": _CENTERS}


@dataclass(frozen=True)
class PandasTables:
    """Detections as pandas DataFrames, one for each image. Columns: the box, confidence, class, name."""

    xyxy: list[DataFrame]
    xyxyn: list[DataFrame]
    xywh: list[DataFrame]
    xywhn: list[DataFrame]


class Yolov5Results(ResultList):
    """The results of several images: a list of `Results` with the attributes of YOLOv5's ``Detections``.

    ``names``: class names by number. ``ims``: the images, uint8 (H, W, 3) RGB, with boxes after `render`.
    """

    def __init__(self, results: Sequence[Results], names: dict[int, str]) -> None:
        super().__init__(results)
        self.names = names
        self.ims = [result.image for result in results]

    @property
    def n(self) -> int:
        """Number of images."""
        return len(self)

    @property
    def files(self) -> list[str]:
        """File names of the images, with the suffix .jpg."""
        return [Path(result.path).with_suffix(".jpg").name for result in self]

    @property
    def imgs(self) -> list[np.ndarray]:
        """``ims`` under its name in older versions of YOLOv5."""
        return self.ims

    @property
    def t(self) -> tuple[float, ...]:
        """Mean milliseconds per image of preprocessing, inference and postprocessing."""
        speeds = [list(result.speed.values()) for result in self]
        return tuple(np.mean(speeds, axis=0).tolist()) if speeds else (0.0, 0.0, 0.0)

    @property
    def xyxy(self) -> list[Tensor]:
        """Corners, confidence and class: float32 (N, 6) for each image."""
        return self._rows("xyxy")

    @property
    def xyxyn(self) -> list[Tensor]:
        """Like `xyxy`, with corners as fractions of the image."""
        return self._rows("xyxyn")

    @property
    def xywh(self) -> list[Tensor]:
        """Center, width, height, confidence and class: float32 (N, 6) for each image."""
        return self._rows("xywh")

    @property
    def xywhn(self) -> list[Tensor]:
        """Like `xywh`, with boxes as fractions of the image."""
        return self._rows("xywhn")

    @property
    def pred(self) -> list[Tensor]:
        return self.xyxy

    def pandas(self) -> PandasTables:
        """Returns the detections as tables. Raises UserError if pandas is not installed."""
        module = require_package("pandas", "pandas()", "use xyxy, whose rows are tensors")
        tables = {
            form: [self._table(module, rows, columns) for rows in self._rows(form)]
            for form, columns in _COLUMNS.items()
        }
        return PandasTables(**tables)

    def tolist(self) -> list[Yolov5Results]:
        """Returns a `Yolov5Results` for each image."""
        return [Yolov5Results([result], self.names) for result in self]

    def render(self, labels: bool = True) -> list[np.ndarray]:
        """Draws the boxes, and returns the images, which are ``ims`` from then on."""
        self.ims = [result.drawn(labels=labels) for result in self]
        return self.ims

    def print(self) -> None:
        """Prints the detections in each image, and the mean times."""
        print(self)

    def show(self, labels: bool = True) -> None:
        """Shows each image with its boxes in a window until a key is pressed; q or Esc ends it. Raises UserError
        without a display."""
        window = Window()
        for result in self:
            if not window.show(result.drawn(labels=labels), wait=True):
                break
        window.close()

    def save(self, labels: bool = True, save_dir: str | Path = SAVE_DIR, exist_ok: bool = False) -> None:
        """Writes each image with its boxes into a new folder: ``save_dir`` or, unless ``exist_ok``, the first of
        SAVE_DIR2, SAVE_DIR3, ... that does not exist."""
        folder = _new_folder(save_dir, exist_ok)
        stem_of = UniqueStems(result.path for result in self)
        for result in self:
            path = folder / (stem_of(result.path) + written_suffix(result.path))
            write_image(str(path), result.drawn(labels=labels))
        print(f"Saved {counted(len(self), 'image')} to {folder}")

    def crop(self, save: bool = True, save_dir: str | Path = SAVE_DIR, exist_ok: bool = False) -> list[dict[str, Any]]:
        """Returns a record of each detection: ``box`` (x1, y1, x2, y2), ``conf``, ``cls``, ``label``, and ``im``, its
        pixels, uint8 BGR, see `crop_images`. With ``save``, the crops are also written to crops/CLASS/STEM_ROW.jpg in a
        new folder, which is named as by the method `save`."""
        folder = _new_folder(save_dir, exist_ok) if save else None
        stem_of = UniqueStems(result.path for result in self)
        folder_of_class = class_folders(self.names)
        records: list[dict[str, Any]] = []
        for result in self:
            boxes = result.boxes.numpy()
            classes = boxes.cls.astype(int).tolist()
            labels = label_texts(self.names, classes, boxes.conf)
            for row, image in crop_images(result.image, boxes.xyxy):
                *box, conf, cls = result.boxes.data[row]
                pixels = np.ascontiguousarray(image[..., ::-1])
                records.append({"box": box, "conf": conf, "cls": cls, "label": labels[row], "im": pixels})
            if folder:
                folders = [folder_of_class[c] for c in classes]
                write_crops(folder / "crops", stem_of(result.path), result.image, boxes.xyxy, folders=folders)
        if folder:
            print(f"Saved {counted(len(records), 'crop')} to {folder}")
        return records

    def __str__(self) -> str:
        lines = []
        for number, result in enumerate(self, 1):
            height, width = result.orig_shape
            lines.append(f"image {number}/{len(self)}: {height}x{width} {result.verbose()}")
        times = "{:.1f}ms pre-process, {:.1f}ms inference, {:.1f}ms NMS per image".format(*self.t)
        return "\n".join([*lines, f"Speed: {times}"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{self}"

    def _rows(self, form: str) -> list[Tensor]:
        """Returns boxes in a form of `Boxes`, confidence and class: float32 (N, 6) for each image."""
        return [_with_scores(result.boxes, form) for result in self]

    def _table(self, module: Any, rows: Tensor, columns: list[str]) -> DataFrame:
        """Converts rows (N, 6) to a table; ``module``: pandas."""
        table = module.DataFrame(rows.numpy(), columns=[*columns, "confidence", "class"])
        table["class"] = table["class"].astype(int)
        table["name"] = [self.names[c] for c in table["class"]]
        return table


def _with_scores(boxes: Boxes, form: str) -> Tensor:
    columns = [getattr(boxes, form), boxes.conf[:, None], boxes.cls[:, None]]
    return torch.cat(columns, 1)


def _new_folder(save_dir: str | Path, exist_ok: bool) -> Path:
    folder = Path(save_dir)
    if folder.name in ("", ".."):
        raise UserError(f"save_dir={str(save_dir)!r}: is not the name of a new folder")
    return increment_path(folder.parent, folder.name, exist_ok)
