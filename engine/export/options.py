"""The flags of export.py: their checks, and their meaning for a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.formats.resolved_export import ResolvedExport
from utils.config.checks import check_image_size
from utils.config.export_formats import EXPORT_FORMATS, formats_with
from utils.config.settings import ExportConfig
from utils.errors import UserError, all_mistakes
from utils.machine.packages import require_installed

if TYPE_CHECKING:
    from models.detector import Detector


def require_packages(formats: Iterable[str]) -> None:
    """Raises UserError, naming all of them, if packages that write or run the formats are missing."""
    packages = dict.fromkeys(package for name in formats for package in EXPORT_FORMATS[name].packages)
    require_installed(packages, "export", "choose other formats")


def check_flags(config: ExportConfig) -> None:
    """Raises UserError for flags that are wrong for any model."""
    with all_mistakes() as mistakes:
        if len(config.imgsz) > 2:
            mistakes.add(f"--imgsz: one number or two (height, width), got {len(config.imgsz)}")
        if config.half and config.int8:
            mistakes.add("--half and --int8: a file has one of these precisions; choose one")
        for flag in _flags_of_some_formats(config):
            lacking = [name for name in dict.fromkeys(config.format) if flag in EXPORT_FORMATS[name].unsupported]
            if lacking:
                *others, last = formats_with(flag)
                usable = " or ".join(filter(None, (", ".join(others), last)))
                mistakes.add(f"{flag}: not for {' and '.join(lacking)}; use --format {usable}")
        if not config.box_voting and config.layout != "end2end":
            mistakes.add(f"--no-box-voting: the layout {config.layout} has no NMS inside; leave it out")
        if config.dynamic and config.batch > 1:
            mistakes.add(f"--dynamic and --batch {config.batch}: a dynamic model takes any batch; leave --batch out")


def _flags_of_some_formats(config: ExportConfig) -> list[str]:
    """Returns the flags of ``config`` that `ExportFormat.unsupported` may name."""
    is_used = {
        "--int8": config.int8,
        "--dynamic": config.dynamic,
        "--batch": config.batch > 1,
        "--layout end2end": config.layout == "end2end",
    }
    return [flag for flag, used in is_used.items() if used]


def resolve_options(config: ExportConfig, detector: Detector, imgsz: int) -> ResolvedExport:
    """Fills in the settings that the flags leave to the model. Raises UserError for flags that do not fit it.

    ``detector``: fused. ``imgsz``: the checkpoint's image size, pixels.
    """
    sides = config.imgsz or [imgsz]
    for side in sides:
        check_image_size(side, detector.stride)
    if config.dynamic and min(sides) < 2 * detector.stride:
        raise UserError(f"--imgsz {min(sides)}: too small for --dynamic; use {2 * detector.stride} or more")
    nms_flags = {"--iou-thres": config.iou_thres is not None, "--no-box-voting": not config.box_voting}
    for flag, is_given in nms_flags.items():
        if is_given and detector.nms_iou is None:
            raise UserError(
                f"{flag}: the model's detections need no NMS; leave it out, or export the one-to-many branch with --nms"
            )
    nms_iou = detector.nms_iou if config.iou_thres is None else config.iou_thres
    return ResolvedExport(
        imgsz_hw=(sides[0], sides[-1]),
        batch=config.batch,
        dynamic=config.dynamic,
        half=config.half,
        int8=config.int8,
        layout=config.layout,
        nms=config.nms,
        nms_iou=nms_iou,
        box_voting=config.box_voting and config.layout == "end2end" and nms_iou is not None,
        opset=config.opset,
    )
