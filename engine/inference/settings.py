"""Which boxes are detections: the settings that detect.py, `load`, a `Predictor`, its calls and hub models share."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from engine.inference.model import InferenceModel
from models.postprocess.detections import DETECTION_IOU
from utils.config.settings import check_image_size, class_numbers
from utils.config.yaml_files import suggestion
from utils.errors import UserError

CONFIDENCE = 0.25  # threshold for a model that does not store one
_ELSEWHERE = {  # what to use for a keyword of Ultralytics' models
    "save": "call save() of a result, or use detect.py",
    "save_txt": "call save_txt(FILE) of a result",
    "save_crop": "call save_crop(FOLDER) of a result",
    "show": "call show() of a result",
    "stream": "call model.stream(SOURCE), which yields results one by one",
    "vid_stride": "call model.stream(SOURCE, vid_stride=N)",
    "augment": "val.py --tta evaluates a model with test-time augmentation",
    "half": "give amp='fp16' to load()",
    "agnostic_nms": "write agnostic=True",
    "batch": "write batch_size=N",
    "tracker": "object tracking is not supported",
}


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """Attributes:

    imgsz: pixels of the longer side on the canvas; 0: the model's.
    conf: scores must be above it; None: the threshold with the best F1 in training's last validation if the checkpoint
        stores it, else 0.25.
    iou: a box is suppressed by a better one that it overlaps by more; None: 0.45, no NMS for NMS-free models.
    max_det: maximum number of detections per image.
    classes: keep only these, given by number or name; empty or None: all.
    agnostic: boxes of different classes suppress each other too.
    box_voting: let boxes suppressed by NMS refine the kept box and raise its score.
    """

    imgsz: int = 0
    conf: float | None = None
    iou: float | None = None
    max_det: int = 300
    classes: Sequence[int | str] | None = None
    agnostic: bool = False
    box_voting: bool = True

    def changed(self, keywords: Mapping[str, Any]) -> DetectionSettings:
        """With ``keywords``, of which None and an ``imgsz`` of 0 change nothing. Those of other programs may be given
        if they are switched off; raises UserError for other ones."""
        known = [field.name for field in fields(self)]
        for name, value in keywords.items():
            if name not in known and value not in (False, None):
                raise UserError(f"{name}={value!r}: {_ELSEWHERE.get(name) or f'unknown{suggestion(name, known)}'}")
        given = {name: value for name, value in keywords.items() if name in known and value is not None}
        return replace(self, **given | {"imgsz": given.get("imgsz") or self.imgsz})

    def fitted(self, model: InferenceModel) -> DetectionSettings:
        """As ``model`` takes them: with an image size, a threshold and classes by number; ``iou`` None: no NMS. Raises
        UserError for settings that do not fit."""
        names, iou = dict(enumerate(model.names)), self.iou
        try:
            imgsz = operator.index(self.imgsz)
        except TypeError:
            text = f"imgsz: must be one whole number, the pixels of the longer side, got {self.imgsz!r}"
            raise UserError(text) from None
        try:
            if isinstance(self.classes, str):
                raise TypeError
            classes = class_numbers(() if self.classes is None else self.classes, names, "the model")
            max_det = operator.index(self.max_det)
        except TypeError:
            raise UserError(
                "classes, max_det: must be a list of class numbers or names, and a number, got "
                f"{self.classes!r} and {self.max_det!r}"
            ) from None
        for name, value in (("conf", self.conf), ("iou", iou)):
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{name}: must be between 0 and 1, got {value!r}")
        if max_det < 1:
            raise UserError(f"max_det: must be at least 1, got {max_det}")
        if model.votes and not self.box_voting:
            raise UserError(f"{model.path}: box voting is part of the file; export it with --no-box-voting")
        if model.input_hw is None:
            imgsz = imgsz or model.imgsz
            check_image_size(imgsz, model.stride)
        elif imgsz not in (0, max(model.input_hw)):
            size = "{}x{}".format(*model.input_hw)
            raise UserError(f"--imgsz {imgsz}: {model.path} takes {size} pixels (height x width) only")
        conf = CONFIDENCE if model.confidence is None else model.confidence
        if iou is None and (self.agnostic or model.nms_iou is not None):
            iou = DETECTION_IOU
        return replace(
            self,
            imgsz=max(model.input_hw) if model.input_hw else imgsz,
            conf=conf if self.conf is None else self.conf,
            iou=iou,
            max_det=max_det,
            classes=classes,
        )
