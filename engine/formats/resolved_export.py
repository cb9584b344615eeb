"""The flags of an export, filled in for a model. Does not import torch: export.py checks its flags first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResolvedExport:
    """The flags of export.py on which a file's computation depends, resolved for a model by `resolve_options`."""

    imgsz_hw: tuple[int, int]  # canvas that the file takes, or with ``dynamic`` is meant for, pixels
    batch: int  # images that the file takes at once
    dynamic: bool  # any batch, and any canvas of whole strides
    half: bool  # float16
    int8: bool  # 8-bit convolutions
    layout: str  # see `make_layout`
    nms: bool  # the one-to-many branch of an NMS-free head
    nms_iou: float | None  # IoU threshold of the NMS that the detections need, in the file or after it; None: no NMS
    box_voting: bool  # whether the NMS in the file uses box voting
    opset: int  # for ONNX
