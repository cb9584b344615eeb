"""Settings of detection, which detect.py, `load`, a `Predictor` and its calls share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np

from engine.inference.model import InferenceModel
from models.postprocess.selection import DETECTION_IOU, PostprocessSettings, detection_iou
from utils.class_names import class_numbers
from utils.config.aliases import python_hint
from utils.config.checks import check_image_size
from utils.config.plain_values import checked_value, plain_value
from utils.config.settings import MAX_CANDIDATES, MAX_DETECTIONS
from utils.errors import UserError
from utils.logger import get_logger
from utils.schema import Bounds, Count, Fraction, hints_of, suggestion


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """Settings of detection that a user chooses. Numbers and arrays of NumPy and torch become plain values. Raises
    UserError for values that no model takes."""

    imgsz: Count = 0  # longer side of the canvas, pixels; 0: the model's
    # Confidence threshold. None: the one with the best F1 in the validation of the checkpoint's epoch, with box voting
    # or without, if the checkpoint stores it, else 0.25.
    conf: Fraction | None = None
    # IoU threshold of NMS. None: 0.45; for NMS-free models no NMS, unless ``agnostic``.
    iou: Fraction | None = None
    max_det: Annotated[int, Bounds(1, MAX_CANDIDATES)] = MAX_DETECTIONS  # per image or, with tiles, per tile
    classes: Sequence[int | str] | None = None  # return only these, by number or name; empty or None: all
    agnostic: bool = False  # boxes also suppress boxes of other classes
    box_voting: bool = True  # boxes suppressed by NMS refine the kept box and raise its score

    def __post_init__(self) -> None:
        for name, hint in hints_of(DetectionSettings).items():
            value = getattr(self, name)
            checked = _checked_classes(value) if name == "classes" else checked_value(name, value, hint)
            # The dataclass is frozen.
            object.__setattr__(self, name, checked)

    @classmethod
    def of_model(cls, model: InferenceModel, keywords: Mapping[str, Any]) -> DetectionSettings:
        """Returns the settings with ``keywords``, as `changed`, at the image size of ``model`` if none is given. Raises
        UserError for values that do not fit the model."""
        chosen = cls().changed(keywords)
        return replace(chosen, imgsz=chosen.resolve(model).imgsz)

    def changed(self, keywords: Mapping[str, Any]) -> DetectionSettings:
        """Returns the settings changed by ``keywords``; None and an ``imgsz`` of 0 change nothing. Keywords of other
        programs are accepted if they are False or None. Raises UserError for unknown ones."""
        known = [field.name for field in fields(self)]
        for name, value in keywords.items():
            if name not in known and not _is_off(value):
                hint = python_hint("argument", name) or f"the settings are {', '.join(known)}"
                raise UserError(f"{name}={value!r}: unknown{suggestion(name, known) or f'; {hint}'}")
        changes = {name: value for name, value in keywords.items() if name in known and value is not None}
        changed = replace(self, **changes)
        return changed if changed.imgsz else replace(changed, imgsz=self.imgsz)

    def resolve(self, model: InferenceModel) -> ResolvedSettings:
        """Fills in the defaults of ``model``. Raises UserError for values that the model does not take."""
        iou = self.iou
        if iou is None:
            iou = DETECTION_IOU if self.agnostic else detection_iou(model.nms_iou)
        return ResolvedSettings(
            imgsz=resolve_imgsz(self.imgsz, model),
            conf=model.threshold(box_voting=self.box_voting) if self.conf is None else self.conf,
            iou=iou,
            max_det=self.max_det,
            classes=class_numbers(self.classes or (), dict(enumerate(model.names)), "the model"),
            agnostic=self.agnostic,
            box_voting=self.box_voting,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings:
    """`DetectionSettings` with the defaults of a model."""

    imgsz: int
    conf: float
    iou: float | None  # None: no NMS
    max_det: int
    classes: Sequence[int]  # empty: all
    agnostic: bool
    box_voting: bool

    @property
    def postprocess(self) -> PostprocessSettings:
        """Settings with which detections are selected."""
        return PostprocessSettings(
            conf_thres=self.conf,
            iou_thres=self.iou,
            max_det=self.max_det,
            agnostic=self.agnostic,
            multi_label=False,
            classes=self.classes or None,
            box_voting=self.box_voting,
        )


def _checked_classes(classes: Any) -> list[int | str] | None:
    """Converts ``classes`` to a list; a single number or name is a list of one. Raises UserError for anything else."""
    plain = plain_value("classes", classes)
    if plain is None:
        return None
    chosen = list(plain) if isinstance(plain, list | dict) else [plain]
    if not all(isinstance(c, int | str) and not isinstance(c, bool) for c in chosen):
        raise UserError(f"classes: must be a list of class numbers or names, got {classes!r}")
    return chosen


def _is_off(value: Any) -> bool:
    """Returns whether a keyword asks for nothing: None, False or 0."""
    return value is None or (isinstance(value, int | float | np.generic) and not value)


def warn_of_unused_flags(model: InferenceModel, *, nms: bool, box_voting: bool, iou: float | None) -> None:
    """Warns of ``--nms`` and ``--no-box-voting`` where they do nothing. ``iou``: threshold of NMS; None: no NMS."""
    if nms and model.ignores_nms:
        get_logger().warning("%s: --nms does nothing: the model has one branch", model.path)
    if not box_voting and iou is None:
        get_logger().warning("%s: --no-box-voting does nothing: its detections need no NMS", model.path)


def resolve_imgsz(imgsz: int, model: InferenceModel) -> int:
    """Returns the longer side of the canvas, pixels. ``imgsz``: the wanted one, or 0 for the model's. Raises UserError
    for a size that the model does not take."""
    if model.input_hw is None:
        check_image_size(imgsz or model.imgsz, model.stride)
        return imgsz or model.imgsz
    if imgsz not in (0, max(model.input_hw)):
        height, width = model.input_hw
        raise UserError(
            f"--imgsz {imgsz}: {model.path} takes {height}x{width} pixels (height x width) only; leave --imgsz out"
        )
    return max(model.input_hw)
