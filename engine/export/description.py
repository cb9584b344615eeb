"""Metadata of an exported file: from the checkpoint and the settings of the export."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from data.dataset.spec import DatasetSpec
from engine.export.thresholds import Thresholds
from engine.formats.metadata import ExportMetadata
from engine.formats.resolved_export import ResolvedExport
from engine.inference.model import CheckpointModel
from models.weights.origin import origin_of
from utils.distributed.join import product_version
from utils.files.paths import normal_path
from utils.program import VERSION
from utils.strings import counted

CheckOutcome: TypeAlias = Literal["yes", "no", "failed"]  # passed, not run, or failed: the file is NAME.failed


@dataclass(frozen=True, kw_only=True)
class ExportDetails:
    """`ExportMetadata.details` of files that this program writes. val.py and detect.py read the entries about the
    training."""

    half: bool
    int8: bool
    used_classes: list[str]  # see `InferenceModel.trained_classes`
    keep_old: bool
    single_cls: bool
    tile: int  # side of the tiles that the model was trained on, pixels; 0: whole images
    val_images: list[str]  # validation images that the training held out
    ap: float | None  # best AP in training; None: unknown, such as for a branch that training does not validate
    checked: CheckOutcome


def describe_file(
    model: CheckpointModel,
    options: ResolvedExport,
    spec: DatasetSpec | None,
    thresholds: Thresholds,
    *,
    checked: CheckOutcome,
) -> ExportMetadata:
    """Returns the metadata of a file.

    Args:
        model: the checkpoint.
        options: result of `resolve_options`.
        spec: the data of the check or calibration; None: the file names the data set of the training.
        checked: outcome of the check; "yes" also before the check, because only a file that passes gets its name.
    """
    detector = model.detector
    is_end2end = options.layout == "end2end"
    return ExportMetadata(
        is_ours=True,
        names=detector.names,
        stride=detector.stride,
        imgsz_hw=options.imgsz_hw,
        batch=options.batch,
        dynamic=options.dynamic,
        channels=model.pixels.channels,
        bits=model.pixels.bits,
        end2end=is_end2end,  # readers of YOLO exports take such an output for rows of detections
        nms_iou=None if is_end2end else options.nms_iou,
        box_voting=options.box_voting,
        validation_iou=detector.head.validation_iou,
        squares=detector.head.squares,
        confidence=thresholds.output,
        voting_confidence=None if is_end2end else thresholds.voting,
        data=_data_location(model, spec),
        description=f"{detector.spec.get('name', 'detector')}, {counted(detector.num_classes, 'class')}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        author="Lockstep",
        version=f"{VERSION}+{product_version()}",
        license=origin_of(model.info, model.path).license,
        details=asdict(_details(model, options, checked)),
    )


def _details(model: CheckpointModel, options: ResolvedExport, checked: CheckOutcome) -> ExportDetails:
    return ExportDetails(
        half=options.half,
        int8=options.int8,
        used_classes=model.trained_classes,
        keep_old=model.has_kept_classes,
        single_cls=model.has_merged_classes,
        tile=model.tile,
        val_images=model.stored_words("val_images"),
        ap=None if model.is_unscored_branch else _best_ap(model.info),
        checked=checked,
    )


def _best_ap(info: dict[str, Any]) -> float | None:
    """Returns the best AP in training; None if the checkpoint does not store it."""
    is_ap = str(info.get("config", {}).get("fitness", "AP")).upper() == "AP"
    best = info.get("progress", {}).get("best_fitness")
    return best if is_ap and isinstance(best, float) and 0 <= best <= 1 else None


def _data_location(model: CheckpointModel, spec: DatasetSpec | None) -> dict[str, str]:
    if spec is not None:
        return {"source": str(normal_path(spec.source)), "root": str(normal_path(spec.root))}
    stored = model.info.get("data", {})
    return {name: str(stored[name]) for name in ("source", "root") if name in stored}
