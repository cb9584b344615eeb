"""Settings of detection, which detect.py, `load`, a `Predictor` and its calls share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

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


class ResolvedSettings(NamedTuple):
    """`DetectionSettings` with the defaults of a model."""

    imgsz: int  # longer side of the scaled image, pixels
    selection: PostprocessSettings  # thresholds, classes and so on


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """Settings of detection that a user chooses. Numbers and arrays of NumPy and torch become plain values. Raises
    UserError for values that no model takes."""

    imgsz: Count = 0  # longer side of the scaled image, pixels; 0: the model's
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
            object.__setattr__(self, name, checked)  # the dataclass is frozen

    def changed(self, keywords: Mapping[str, Any]) -> DetectionSettings:
        """Returns the settings changed by ``keywords``; None and an ``imgsz`` of 0 change nothing. Keywords of other
        programs are accepted if they are False, 0 or None. Raises UserError for unknown ones."""
        known = [field.name for field in fields(self)]
        for name, value in keywords.items():
            is_off = value is None or (isinstance(value, int | float | np.generic) and not value)
            if name not in known and not is_off:
                hint = python_hint("argument", name) or f"the settings are {', '.join(known)}"
                raise UserError(f"{name}={value!r}: unknown{suggestion(name, known) or f'; {hint}'}")
        changed = replace(self, **{name: keywords[name] for name in known if keywords.get(name) is not None})
        return changed if changed.imgsz else replace(changed, imgsz=self.imgsz)

    def resolve(self, model: InferenceModel) -> ResolvedSettings:
        """Fills in the defaults of ``model``. Raises UserError for values that the model does not take."""
        imgsz = resolve_imgsz(self.imgsz, model)
        conf = self.conf
        if conf is None:
            conf = model.threshold(box_voting=self.box_voting)
            model.warn_of_size(imgsz)
        iou = self.iou
        if iou is None:
            iou = DETECTION_IOU if self.agnostic else detection_iou(model.nms_iou)
        selection = PostprocessSettings(
            conf_thres=conf,
            iou_thres=iou,
            max_det=self.max_det,
            agnostic=self.agnostic,
            multi_label=False,
            classes=class_numbers(self.classes or (), dict(enumerate(model.names)), "the model") or None,
            box_voting=self.box_voting,
        )
        return ResolvedSettings(imgsz, selection)


def _checked_classes(classes: Any) -> list[int | str] | None:
    """Converts ``classes`` to a list; a single number or name is a list of one. Raises UserError for anything else."""
    plain = plain_value("classes", classes)
    if plain is None:
        return None
    chosen = list(plain) if isinstance(plain, list | dict) else [plain]
    if not all(isinstance(c, int | str) and not isinstance(c, bool) for c in chosen):
        raise UserError(f"classes: must be a list of class numbers or names, got {classes!r}")
    return chosen


def warn_of_unused_flags(model: InferenceModel, *, nms: bool, box_voting: bool, iou: float | None) -> None:
    """Warns of ``--nms`` and ``--no-box-voting`` where they do nothing. ``iou``: threshold of NMS; None: no NMS."""
    if nms and model.ignores_nms:
        get_logger().warning("%s: --nms does nothing: the model has one branch", model.path)
    if not box_voting and iou is None:
        get_logger().warning("%s: --no-box-voting does nothing: its detections need no NMS", model.path)


def resolve_imgsz(imgsz: int, model: InferenceModel) -> int:
    """Returns the longer side of the scaled image, pixels. ``imgsz``: the wanted one, or 0 for the model's. Raises
    UserError for a size that the model does not take."""
    if model.input_hw is None:
        check_image_size(imgsz or model.imgsz, model.stride)
        return imgsz or model.imgsz
    if imgsz not in (0, max(model.input_hw)):
        height, width = model.input_hw
        raise UserError(
            f"--imgsz {imgsz}: {model.path} takes {height}x{width} pixels (height x width) only; leave --imgsz out"
        )
    return max(model.input_hw)
