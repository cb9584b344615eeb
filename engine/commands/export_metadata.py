"""Decides what an exported file says about its model, its data set and itself."""

from __future__ import annotations

from datetime import UTC, datetime

from data.dataset.spec import DatasetSpec
from engine.export.graphs import ResolvedExport
from engine.export.metadata import ExportMetadata
from engine.export.parity import Reference
from engine.inference.model import CheckpointModel
from models.weights.origin import origin_of
from utils.distributed.agreement import product_version
from utils.files.checksum import sha256_of
from utils.files.paths import normal_path
from utils.logger import get_logger
from utils.program import VERSION
from utils.strings import counted


def describe_file(
    model: CheckpointModel,
    options: ResolvedExport,
    spec: DatasetSpec | None,
    reference: Reference | None,
    *,
    by_training: bool,
) -> ExportMetadata:
    """Returns the metadata of the files of an export.

    Args:
        spec: the data of the check or calibration; None: the files name the data set of the training.
        reference: the checkpoint's scores on the canvas of the files; None: they are not checked.
        by_training: whether ``train.py --export`` writes the files, and may replace them.
    """
    detector = model.detector
    confidence, voting_confidence = _thresholds(model, options, reference)
    if confidence is None and model.is_unscored_branch:
        get_logger().info("--nms: the files state no confidence threshold: training's is of the one-to-one branch")
    stored = model.info.get("data", {})
    data = {name: str(stored[name]) for name in ("source", "root") if name in stored}
    if spec is not None:
        data = {"source": str(normal_path(spec.source)), "root": str(normal_path(spec.root))}
    return ExportMetadata(
        names=detector.names,
        stride=detector.stride,
        imgsz_hw=options.imgsz_hw,
        batch=options.batch,
        dynamic=options.dynamic,
        channels=model.pixels.channels,
        bits=model.pixels.bits,
        end2end=options.end2end,  # readers of YOLO exports take such an output for rows of detections
        nms_iou=options.nms_iou,
        validation_iou=detector.head.validation_iou,
        squares=detector.head.squares,
        confidence=confidence,
        voting_confidence=voting_confidence,
        data=data,
        description=f"{detector.spec.get('name', 'detector')}, {counted(detector.num_classes, 'class')}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        author="Lockstep",
        version=f"{VERSION}+{product_version()}",
        license=origin_of(model.info, model.path).license,
        details={  # val.py and detect.py read the entries about the training, `InferenceModel.stored`
            "half": options.half,
            "int8": options.int8,
            "used_classes": model.trained_classes,
            "keep_old": model.has_kept_classes,
            "single_cls": model.has_merged_classes,
            "tile": model.tile,
            "val_images": model.stored_words("val_images"),
            "unchecked": reference is None,
            "by_training": by_training,
            "weights_sha256": sha256_of(model.path),
        },
    )


def _thresholds(
    model: CheckpointModel, options: ResolvedExport, reference: Reference | None
) -> tuple[float | None, float | None]:
    """Returns the thresholds, chosen by F1, of the output as it is, after NMS if it needs one, and of the output after
    NMS with box voting; None: unknown, or rows of detections, for which nothing votes.

    A file of fixed size sees other canvases than most checkpoints were validated on, rectangles, so its thresholds are
    those of the checkpoint on its canvas. They are training's without a check, if no detection of the check is correct,
    on the canvases of the training, and with tiles, which training joins to images.
    """
    is_trained_size = options.imgsz_hw == (model.imgsz, model.imgsz)
    has_trained_canvas = options.dynamic or model.tile > 0 or (model.squares and is_trained_size)
    plain = model.confidence if model.plain_confidence is None else model.plain_confidence
    voting = model.confidence
    result = None if reference is None else reference.result
    if result and result.threshold is not None and (voting is None or not has_trained_canvas):
        plain = result.plain_confidence
        voting = result.threshold
    return plain, None if options.end2end else voting
