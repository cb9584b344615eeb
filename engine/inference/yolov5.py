"""A model as programs for YOLOv5's torch.hub interface use it; its results are in yolov5_results.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.inference.open_model import open_weights
from engine.inference.predictor import Predictor
from engine.inference.results.yolov5_results import Yolov5Results
from engine.inference.sources.images import Color, Source
from utils.errors import UserError


def _setting(name: str) -> property:
    """Returns a field of `DetectionSettings` as an attribute that is checked when it is assigned. Reading ``conf`` or
    ``iou`` resolves None to the model's default."""

    def read(model: Yolov5Model) -> Any:
        has_default = name in ("conf", "iou")
        return getattr(model.settings.resolve(model.model) if has_default else model.settings, name)

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
        imgsz: int = 0,
        **settings: Any,
    ) -> Yolov5Results:
        """Returns the results of the images.

        Args:
            source: an image or a list of them, see `as_images`.
            size: longer side on the canvas, pixels, also called ``imgsz``; 0: the model's.
            augment, profile: must be False; there is no test-time augmentation here, and results always hold times.
            color: the order of channels in arrays; None: that of ``load``, or RGB.
            settings: see `Predictor.__call__`.

        Raises UserError for an image that cannot be used, or a setting that does not fit.
        """
        keywords = {"augment": augment, "profile": profile, "imgsz": size or imgsz, **settings}
        results = super().__call__(source, color=color or self.color or "rgb", **keywords)
        return Yolov5Results(results, self.names)

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
    model = open_weights(path, device="" if device is None else device, nms=nms, trust=trust)
    return Yolov5Model(model, **options)
