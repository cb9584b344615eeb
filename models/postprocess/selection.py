"""Settings with which detections are selected from decoded boxes and scores.

A validation selects detections from the same boxes in three ways (`ValidationSettings.selections`). Each has a
confidence threshold with the best F1; a checkpoint stores them, and a `CheckpointModel` and an `EvalResult` have them:

    SCORED          what AP needs: nearly all boxes, every class of a box      scored_confidence
    SHOWN           what detect.py shows: one class of a box, NMS at 0.45      confidence (`EvalResult.threshold`)
    SHOWN_UNVOTED   the same without box voting                                plain_confidence

detect.py shows detections that score above ``confidence`` or, without box voting, above ``plain_confidence``, unless
the user chooses another threshold (`InferenceModel.threshold`). An exported file states the one that fits its output
(engine/commands/export.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from utils.config.settings import MAX_DETECTIONS

DETECTION_IOU = 0.45  # NMS threshold of detect.py, lower than in validation, as in YOLOv5 and YOLOv8
DEFAULT_CONFIDENCE = 0.25  # confidence threshold of detect.py if validation has found none
SCORED = "scored"
SHOWN = "shown"
SHOWN_UNVOTED = "shown_unvoted"
SELECTIONS = (SCORED, SHOWN, SHOWN_UNVOTED)


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
    box_voting: bool = True  # suppressed boxes move the box that suppresses them and raise its score, see `vote`


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Settings with which a validation selects detections. The default confidence keeps nearly the whole PR curve."""

    conf_thres: float = 0.001
    iou_thres: float | None = None  # None: the model's for `SCORED`, `detection_iou` for the other selections
    max_det: int = MAX_DETECTIONS
    single_cls: bool = False  # treat all classes as one
    classes: Sequence[int] | None = None  # the model's classes to detect, renumbered in this order; None: all
    box_voting: bool = True

    def selections(self, nms_iou: float | None) -> dict[str, PostprocessSettings]:
        """Returns the settings of each of `SELECTIONS`. ``nms_iou``: the model's."""
        scored_iou = nms_iou if self.iou_thres is None else self.iou_thres
        shown_iou = detection_iou(nms_iou) if self.iou_thres is None else self.iou_thres
        scored = PostprocessSettings(
            conf_thres=self.conf_thres,
            iou_thres=scored_iou,
            max_det=self.max_det,
            classes=None if self.single_cls else self.classes,
            box_voting=self.box_voting,
        )
        shown = replace(scored, iou_thres=shown_iou, multi_label=False)
        return {SCORED: scored, SHOWN: shown, SHOWN_UNVOTED: replace(shown, box_voting=False)}


VALIDATION_DEFAULTS = ValidationSettings()


def detection_iou(nms_iou: float | None) -> float | None:
    """Returns the default NMS threshold of detect.py; None: no NMS. ``nms_iou``: the model's."""
    return None if nms_iou is None else DETECTION_IOU
