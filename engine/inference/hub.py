"""The objects that `torch.hub.load` returns (hubconf.py), with the attributes that users of YOLOv5's hub models know.

As there, arrays and drawn images are RGB: ``model(cv2.imread(path)[..., ::-1])``. Unlike there, each image has a canvas
of its own size also in a batch, so that its detections do not depend on the others, and no image is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.inference.images import Source
from engine.inference.pipeline import CONFIDENCE
from engine.inference.predictor import load
from engine.inference.results import Results, label_texts, show_images
from models.postprocess.detections import DETECTION_IOU
from utils.drawing.detection_writer import UniqueStems
from utils.drawing.draw import write_image
from utils.errors import UserError
from utils.files.folders import increment_path
from utils.logger import get_logger
from utils.machine.devices import parse_devices
from utils.machine.limits import require_package
from utils.strings import counted

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_DET = 1000
_SETTINGS = ("conf", "iou", "classes", "max_det", "agnostic", "box_voting")
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_CENTERS = ("xcenter", "ycenter", "width", "height")
_TABLES = {"xyxy": _CORNERS, "xyxyn": _CORNERS, "xywh": _CENTERS, "xywhn": _CENTERS}


class HubModel:
    """A model for detection. The attributes conf, iou, classes, max_det, agnostic and box_voting, and no others, may be
    set between calls; see `DetectionSettings`. At first ``conf`` is 0.25, ``iou`` 0.45 (None, which means no NMS, for
    NMS-free models), and ``max_det`` 1000."""

    def __init__(
        self, path: str | os.PathLike[str], device: str | int | torch.device | None = None, trust: bool = False
    ) -> None:
        """``path``, ``device``, ``trust``: as of `load`."""
        predictor = load(path, device="" if device is None else device, color="rgb", trust=trust)
        iou = None if predictor.model.nms_iou is None else DETECTION_IOU
        predictor.settings = replace(predictor.settings, conf=CONFIDENCE, iou=iou, max_det=MAX_DET)
        # `__setattr__` is for settings.
        vars(self).update(_path=path, _trust=trust, _predictor=predictor)

    def __getattr__(self, name: str) -> Any:
        if name in _SETTINGS:
            return getattr(self._predictor.settings, name)
        raise AttributeError(f"no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            raise AttributeError(f"{name!r} cannot be set; the settings are {', '.join(_SETTINGS)}")
        self._predictor.settings = replace(self._predictor.settings, **{name: value})

    @property
    def names(self) -> dict[int, str]:
        return self._predictor.names

    @property
    def stride(self) -> int:
        return self._predictor.model.stride

    @property
    def device(self) -> torch.device:
        return self._predictor.device

    def __call__(self, imgs: Source | Sequence[Source], size: int = 0) -> HubDetections:
        """The detections in an image or a list of images: paths, RGB arrays, PIL images, tensors.

        ``size``: pixels of the longer side on the canvas, rounded up to whole strides; 0: the size of the training.
        Raises UserError for images that cannot be used.
        """
        if not isinstance(size, int | np.integer) or size < 0:
            raise UserError(f"size: must be one whole number, the pixels of the longer side, got {size!r}")
        results = self._predictor(imgs, imgsz=-(-size // self.stride) * self.stride)
        return HubDetections(results, self.names)

    def to(self, device: str | int | torch.device) -> HubModel:
        """Moves the model to ``device`` by opening its file again."""
        if parse_devices(str(device)) != (self.device,):
            predictor = load(self._path, device=device, color="rgb", trust=self._trust)
            predictor.settings = self._predictor.settings
            vars(self).update(_predictor=predictor)
        return self

    def cpu(self) -> HubModel:
        return self.to("cpu")

    def cuda(self, device: int = 0) -> HubModel:
        return self.to(f"cuda:{device}")

    def eval(self) -> HubModel:
        """Does nothing: the model is for inference only."""
        return self


class HubDetections:
    """The detections in a list of images, highest confidence first.

    ``ims`` has the images, uint8 (H, W, 3) RGB; `render` draws into them. ``files`` has their names. ``xyxy`` (or
    ``pred``), ``xyxyn``, ``xywh`` and ``xywhn`` are for each image float32 (N, 6): corners or center, width and height,
    in pixels or divided by the width and height of the image; confidence; class.
    """

    def __init__(self, results: Sequence[Results], names: dict[int, str]) -> None:
        self._results, self.names = list(results), names
        self.files = [Path(result.path).with_suffix(".jpg").name for result in results]
        self.ims: list[np.ndarray] = [result.image for result in results]
        self.xyxy, self.xyxyn, self.xywh, self.xywhn = (
            [torch.cat((getattr(r.boxes, form), r.boxes.data[:, 4:]), 1) for r in results] for form in _TABLES
        )
        self.pred = self.xyxy

    @property
    def n(self) -> int:
        """The number of images."""
        return len(self._results)

    def __len__(self) -> int:
        return self.n

    def __str__(self) -> str:
        lines = [
            f"image {number}/{self.n}: {result.orig_shape[0]}x{result.orig_shape[1]} {result.verbose()}"
            for number, result in enumerate(self._results, 1)
        ]
        if self._results:
            mean = {name: sum(r.speed[name] for r in self._results) / self.n for name in self._results[0].speed}
            lines.append("Speed: " + ", ".join(f"{ms:.1f} ms {name}" for name, ms in mean.items()) + " per image")
        return "\n".join(lines)

    def print(self) -> None:
        """Prints what was found in each image, and the speed."""
        print(self)

    def tolist(self) -> list[HubDetections]:
        """One object for each image."""
        return [HubDetections([result], self.names) for result in self._results]

    def pandas(self) -> SimpleNamespace:
        """The attributes ``xyxy``, ``xyxyn``, ``xywh`` and ``xywhn``: for each image a table with the columns of the
        box, confidence, class and name. Raises UserError if pandas is not installed."""
        require_package("pandas", "pandas()", "use xyxy, or tolist()")
        tables = {name: [self._table(rows, box) for rows in getattr(self, name)] for name, box in _TABLES.items()}
        return SimpleNamespace(**tables)

    def _table(self, rows: Tensor, box: Sequence[str]) -> DataFrame:
        from pandas import DataFrame

        records = [[*row[:5], int(row[5]), self.names[int(row[5])]] for row in rows.tolist()]
        return DataFrame(records, columns=[*box, "confidence", "class", "name"])

    def render(self, labels: bool = True) -> list[np.ndarray]:
        """Draws the boxes; returns ``ims``, which are then the drawn images, uint8 (H, W, 3) RGB."""
        self.ims = [result.drawn(labels=labels) for result in self._results]
        return self.ims

    def save(self, labels: bool = True, save_dir: str | Path = "runs/detect/exp", exist_ok: bool = False) -> Path:
        """Writes the images with their boxes into a new folder (exp, exp2, ...) and returns it."""
        folder = _new_folder(save_dir, exist_ok)
        for name, image in zip(self._unique_names(), self.render(labels)):
            write_image(folder / name, image)
        get_logger().info("%s in %s", counted(self.n, "image"), folder)
        return folder

    def show(self, labels: bool = True) -> None:
        """Shows each image with its boxes in a window, until a key is pressed. Raises UserError without a display."""
        show_images(self.render(labels))

    def crop(
        self, save: bool = True, save_dir: str | Path = "runs/detect/exp", exist_ok: bool = False
    ) -> list[dict[str, Any]]:
        """A record of each detection: box (4,), conf, cls, label and im, its pixels, uint8 (h, w, 3) RGB.

        With ``save`` they are also written to SAVE_DIR/crops/CLASS/STEM_ROW.jpg.
        """
        found = [record for result in self._results for record in _crops(result)]
        if save:
            folder = _new_folder(save_dir, exist_ok)
            for name, result in zip(self._unique_names(), self._results):
                result.save_crop(folder / "crops", name)
            get_logger().info("%s in %s", counted(len(found), "crop"), folder)
        return found

    def _unique_names(self) -> list[str]:
        stem_of = UniqueStems()
        return [f"{stem_of(result.path)}.jpg" for result in self._results]


def _crops(result: Results) -> Iterator[dict[str, Any]]:
    labels = label_texts(result.names, result.boxes.cls.int().tolist(), result.boxes.conf.tolist())
    for row, pixels in result.crops():
        box = result.boxes[row]
        yield {"box": box.xyxy[0], "conf": box.conf[0], "cls": box.cls[0], "label": labels[row], "im": pixels}


def _new_folder(save_dir: str | Path, exist_ok: bool) -> Path:
    return increment_path(Path(save_dir).parent, Path(save_dir).name, exist_ok)
