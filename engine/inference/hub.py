"""Models of torch.hub: predictors that programs for YOLOv5 can call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.inference.images import Source
from engine.inference.model import open_model
from engine.inference.predict import DetectionSettings, Predictor
from engine.inference.results import ResultList
from utils.errors import UserError


def _setting(name: str, resolved_name: str) -> property:
    """Returns a field of `DetectionSettings` as an attribute that is checked when it is assigned. Reading it resolves
    None to the model's default."""

    def read(model: HubModel) -> Any:
        return getattr(model.settings.resolve(model.model).selection, resolved_name)

    def write(model: HubModel, value: Any) -> None:
        default = getattr(DetectionSettings, name)  # which None restores
        settings = replace(model.settings, **{name: default}).changed({name: value})
        settings.resolve(model.model)
        model.settings = settings

    return property(read, write)


class HubModel(Predictor):
    """A predictor whose settings are attributes, as those of YOLOv5's models."""

    __slots__ = ()
    conf = _setting("conf", "conf_thres")
    iou = _setting("iou", "iou_thres")
    classes = _setting("classes", "classes")
    max_det = _setting("max_det", "max_det")
    agnostic = _setting("agnostic", "agnostic")

    def __call__(self, source: Source | Sequence[Source], size: int = 0, **settings: Any) -> ResultList:
        """Returns the results of the images. ``size``: longer side of the scaled image in pixels, also called
        ``imgsz``; 0: the model's. See `Predictor.__call__`."""
        settings["imgsz"] = size or settings.get("imgsz")
        return super().__call__(source, **settings)

    def eval(self) -> HubModel:
        """Returns itself: a model is ready for inference when it is opened."""
        return self

    def to(self, device: str | int | torch.device) -> HubModel:
        """Returns itself. Raises UserError for another device than the model's."""
        self.check_device(device)
        return self

    def cpu(self) -> HubModel:
        """Returns itself. Raises UserError if the model is on another device."""
        return self.to("cpu")

    def cuda(self, device: str | int | torch.device = "cuda") -> HubModel:
        """Returns itself. Raises UserError if the model is on another device."""
        return self.to(device)


def load_from_hub(
    path: str | os.PathLike[str],
    autoshape: bool = True,
    _verbose: bool = True,
    device: str | int | torch.device | None = None,
    *,
    pretrained: bool = True,
    nms: bool = False,
    trust: bool = False,
    **options: Any,
) -> HubModel:
    """Opens a model with the arguments of YOLOv5's entry points of torch.hub. Arrays are RGB unless ``color`` is given.

    Args:
        path: a checkpoint, an exported file, or the name of public weights.
        autoshape, pretrained: must be True.
        _verbose: without effect; nothing is printed about the model.
        device: None: the best available one.
        nms, trust, options: see `engine.inference.predict.load`.

    Raises UserError for a file, name, device or settings that cannot be used.
    """
    if not autoshape:
        raise UserError("autoshape=False: models take images here; the network is their attribute model.model")
    if not pretrained:
        raise UserError("pretrained=False: models are opened for detection; train.py --model trains a new one")
    model = open_model(path, device="" if device is None else device, nms=nms, trust=trust)
    return HubModel(model, **{"color": "rgb", **options})
