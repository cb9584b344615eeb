"""Settings with which detections are selected from decoded boxes and scores.

A validation selects from the same boxes what AP needs, nearly all boxes with every class of a box, and what detect.py
finds, one class of a box and NMS at 0.45 (`ValidationSettings.selections`). F1 chooses a confidence threshold for the
second selection. It holds for this decoding alone: a checkpoint stores it as the default of detect.py
(`InferenceModel.threshold`), and the check of an exported file chooses another one for a graph with NMS, which does not
vote (engine/commands/export.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from utils.config.settings import MAX_DETECTIONS

DETECTION_IOU = 0.45  # NMS threshold of detect.py, lower than in validation, as in YOLOv5 and YOLOv8
DEFAULT_CONFIDENCE = 0.25  # confidence threshold of detect.py if validation has found none


@dataclass(frozen=True, kw_only=True)
class PostprocessSettings:
    """Settings of the selection of detections from decoded boxes and scores."""

    conf_thres: float  # only detections with a higher score (after box voting) are returned
    iou_thres: float | None  # NMS suppresses a box if its IoU with a better one of its class is higher; None: no NMS
    # Maximum number of detections per image, or per view of an image in tiles, counted after filtering by ``classes``.
    max_det: int = MAX_DETECTIONS
    agnostic: bool = False  # boxes also suppress boxes of other classes
    multi_label: bool = True  # every class above the threshold makes a detection of a box; False: only its best class
    # Classes to return; None: all. They are filtered after NMS over all classes, which therefore does not depend on
    # this. Without ``multi_label``, a box whose best class is another one is dropped.
    classes: Sequence[int] | None = None
    # Suppressed boxes move the box that suppresses them and raise its score, see `vote`. Not for models whose
    # detections need no NMS, even if the user wants one: few boxes are left that could vote.
    box_voting: bool = True


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Settings with which a validation selects detections. The default confidence keeps nearly the whole PR curve."""

    conf_thres: float = 0.001
    iou_thres: float | None = None  # None: the model's for AP, `detection_iou` for what detect.py finds
    max_det: int = MAX_DETECTIONS
    single_cls: bool = False  # treat all classes as one
    classes: Sequence[int] | None = None  # the model's classes to detect, renumbered in this order; None: all
    box_voting: bool = True

    def selections(self, nms_iou: float | None) -> tuple[PostprocessSettings, PostprocessSettings]:
        """Returns the settings for AP and those of detect.py, as `Selected` has their detections. ``nms_iou``: the
        model's."""
        for_ap = PostprocessSettings(
            conf_thres=self.conf_thres,
            iou_thres=nms_iou if self.iou_thres is None else self.iou_thres,
            max_det=self.max_det,
            classes=None if self.single_cls else self.classes,
            box_voting=self.box_voting and nms_iou is not None,
        )
        iou_thres = detection_iou(nms_iou) if self.iou_thres is None else self.iou_thres
        return for_ap, replace(for_ap, iou_thres=iou_thres, multi_label=False)


def detection_iou(nms_iou: float | None) -> float | None:
    """Returns the default NMS threshold of detect.py; None: no NMS. ``nms_iou``: the model's."""
    return None if nms_iou is None else DETECTION_IOU
