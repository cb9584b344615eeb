"""A model and results as programs for YOLOv5's torch.hub interface use them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.inference.detect_files import result_names
from engine.inference.images import Color, Source
from engine.inference.model import open_model
from engine.inference.predictor import Predictor
from engine.inference.results import ResultList, Results, Window, written_suffix
from utils.drawing.draw import write_image
from utils.errors import UserError
from utils.files.new_folder import increment_path
from utils.files.safe_io import folder_below
from utils.machine.packages import require_package
from utils.strings import counted

SAVE_DIR = "runs/detect/exp"
_CORNERS = ["xmin", "ymin", "xmax", "ymax"]
_CENTERS = ["xcenter", "ycenter", "width", "height"]
_COLUMNS = {"xyxy": _CORNERS, "xyxyn": _CORNERS, "xywh": _CENTERS, "xywhn": _CENTERS}


class Yolov5Results(ResultList):
    """The results of several images: a list of `Results` with the attributes of YOLOv5's ``Detections``.

    ``xyxy``, ``xyxyn``, ``xywh``, ``xywhn``, ``pred`` (xyxy): box, confidence and class, a tensor float32 (N, 6) for
    each image. ``n``: number of images. ``names``: class names by number. ``ims``: the images, uint8 (H, W, 3) RGB,
    with boxes after `render`. ``t``: mean milliseconds per image of preprocessing, inference and postprocessing.
    """

    def __init__(self, results: Sequence[Results], names: dict[int, str]) -> None:
        super().__init__(results)
        self.names = names
        self.n = len(self)
        self.ims = [result.image for result in results]
        self.xyxy, self.xyxyn, self.xywh, self.xywhn = (self._rows(form) for form in _COLUMNS)
        self.pred = self.xyxy
        speeds = [list(result.speed.values()) for result in self]
        self.t = tuple(np.mean(speeds, axis=0).tolist()) if speeds else (0.0, 0.0, 0.0)

    def _rows(self, form: str) -> list[Tensor]:
        """Returns boxes in a form of `Boxes`, confidence and class."""
        all_boxes = [result.boxes for result in self]
        return [torch.cat([getattr(boxes, form), torch.as_tensor(boxes.data[:, -2:])], 1) for boxes in all_boxes]

    def pandas(self) -> SimpleNamespace:
        """Returns ``xyxy``, ``xyxyn``, ``xywh`` and ``xywhn`` as DataFrames, one for each image. Columns: the box,
        confidence, class, name. Raises UserError if pandas is not installed."""
        module = require_package("pandas", "pandas()", "use xyxy, whose rows are tensors")

        def table(rows: Tensor, columns: list[str]) -> Any:
            frame = module.DataFrame(rows.numpy(), columns=[*columns, "confidence", "class"])
            frame["class"] = frame["class"].astype(int)
            frame["name"] = [self.names[c] for c in frame["class"]]
            return frame

        return SimpleNamespace(
            **{form: [table(rows, columns) for rows in getattr(self, form)] for form, columns in _COLUMNS.items()}
        )

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
        for image in self.render(labels):
            if not window.show(image, wait=True):
                break
        window.close()

    def save(self, labels: bool = True, save_dir: str | Path = SAVE_DIR, exist_ok: bool = False) -> None:
        """Writes each image with its boxes into a new folder: ``save_dir`` or, unless ``exist_ok``, the first of
        SAVE_DIR2, SAVE_DIR3, ... that does not exist."""
        folder = _new_folder(save_dir, exist_ok)
        names = result_names(result.path for result in self)
        for result in self:
            path = folder / (names[result.path] + written_suffix(result.path))
            folder_below(folder, path.relative_to(folder).parent)
            write_image(str(path), result.drawn(labels=labels))
        print(f"Saved {counted(len(self), 'image')} to {folder}")

    def crop(self, save: bool = True, save_dir: str | Path = SAVE_DIR, exist_ok: bool = False) -> list[dict[str, Any]]:
        """Returns each detection as a dict: ``box`` (4,), ``conf`` and ``cls``, tensors as in ``xyxy``; ``label``; and
        ``im``, its `Results.crops` as BGR. With ``save``, also writes them into ``crops`` of a folder as in `save`."""
        if save:
            folder = _new_folder(save_dir, exist_ok)
            names = result_names(result.path for result in self)
            for result in self:
                path = folder / "crops" / names[result.path]
                folder_below(folder, path.relative_to(folder).parent)
                result.save_crop(path.parent, f"{path.name}.jpg")
            print(f"Saved the crops of {counted(len(self), 'image')} to {folder}")
        return [
            {
                "box": row[:4],
                "conf": row[4],
                "cls": row[5],
                "label": f"{self.names[int(row[5])]} {row[4]:.2f}",
                "im": crop[..., ::-1],
            }
            for result, rows in zip(self, self.xyxy)
            for row, crop in zip(rows, result.crops())
        ]

    def tolist(self) -> list[Yolov5Results]:
        """Returns the results of each image."""
        return [Yolov5Results([result], self.names) for result in self]

    def __str__(self) -> str:
        lines = []
        for number, result in enumerate(self, 1):
            height, width = result.orig_shape
            lines.append(f"image {number}/{len(self)}: {height}x{width} {result.verbose()}")
        times = "{:.1f}ms pre-process, {:.1f}ms inference, {:.1f}ms NMS per image".format(*self.t)
        return "\n".join([*lines, f"Speed: {times}"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{self}"


def _new_folder(save_dir: str | Path, exist_ok: bool) -> Path:
    """Creates the folder of `Yolov5Results.save`. Raises UserError for a path that ends without a name."""
    folder = Path(save_dir)
    if folder.name in ("", ".."):
        raise UserError(f"save_dir={str(save_dir)!r}: is not the name of a new folder")
    return increment_path(folder.parent, folder.name, exist_ok)


def _setting(name: str) -> property:
    """Returns a field of `DetectionSettings` as an attribute that is checked when it is assigned. Reading ``conf`` or
    ``iou`` resolves None to the model's default."""

    def read(model: Yolov5Model) -> Any:
        selection = model.settings.resolve(model.model).selection
        defaults = {"conf": selection.conf_thres, "iou": selection.iou_thres}
        return defaults[name] if name in defaults else getattr(model.settings, name)

    def write(model: Yolov5Model, value: Any) -> None:
        settings = replace(model.settings, **{name: value})
        settings.resolve(model.model)
        model.settings = settings

    return property(read, write)


class Yolov5Model(Predictor):
    """A predictor whose numpy arrays are RGB and whose settings are attributes, as in YOLOv5's models.

    Calls return `Yolov5Results`.
    """

    conf = _setting("conf")
    iou = _setting("iou")
    classes = _setting("classes")
    max_det = _setting("max_det")
    agnostic = _setting("agnostic")

    def __call__(
        self,
        source: Source | Sequence[Source],
        size: int = 0,
        augment: bool = False,
        profile: bool = False,
        *,
        color: Color | None = None,
        **settings: Any,
    ) -> Yolov5Results:
        """Returns the results of the images.

        Args:
            source: an image or a list of them, see `as_images`.
            size: longer side of the scaled image, pixels, also called ``imgsz``; 0: the model's.
            augment, profile: must be False; there is no test-time augmentation here, and results always hold times.
            color: the order of channels in arrays; None: that of ``load``, or RGB.
            settings: see `Predictor.__call__`.

        Raises UserError for an image that cannot be used, or a setting that does not fit.
        """
        unknown = {"augment": augment, "profile": profile}
        settings |= {name: value for name, value in unknown.items() if value}
        settings["imgsz"] = size or settings.get("imgsz")
        return Yolov5Results(super().__call__(source, color=color or self.color or "rgb", **settings), self.names)

    def eval(self) -> Yolov5Model:
        """Returns itself: a model is ready for inference when it is opened."""
        return self

    def to(self, device: str | int | torch.device) -> Yolov5Model:
        """Returns itself. Raises UserError for another device than the model's."""
        self.check_device(device)
        return self

    def cpu(self) -> Yolov5Model:
        """Returns itself. Raises UserError if the model is on another device."""
        return self.to("cpu")

    def cuda(self, device: str | int | torch.device = "cuda") -> Yolov5Model:
        """Returns itself. Raises UserError if the model is on another device."""
        return self.to(device)


def load_yolov5(
    path: str | os.PathLike[str],
    autoshape: bool = True,
    _verbose: bool = True,
    device: str | int | torch.device | None = None,
    *,
    nms: bool = False,
    trust: bool = False,
    pretrained: bool = True,
    **options: Any,
) -> Yolov5Model:
    """Opens a model with the arguments of YOLOv5's entry points of torch.hub.

    Args:
        path: a checkpoint, an exported file, or the name of public weights.
        autoshape, pretrained: must be True.
        _verbose: without effect; nothing is printed about the model.
        device: None: the best available one.
        nms, trust, options: see `engine.inference.predictor.load`.

    Raises UserError for a file, name, device or settings that cannot be used.
    """
    if not autoshape:
        raise UserError("autoshape=False: models take images here; the network is their attribute model.model")
    if not pretrained:
        raise UserError("pretrained=False: models are opened for detection; train.py --model trains a new one")
    model = open_model(path, device="" if device is None else device, nms=nms, trust=trust)
    return Yolov5Model(model, **options)
