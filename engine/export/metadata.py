"""What an export says about itself: its metadata, the list of its classes and its model card."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.export.options import ExportOptions, remaining_nms
from engine.export.parity import Parity
from engine.inference.model import CheckpointModel
from engine.inference.runtimes.metadata import ExportMetadata, preprocessing
from utils.config.pixels import PixelFormat
from utils.distributed.agreement import product_version
from utils.files.folders import PROJECT, UNKNOWN, Origin
from utils.program import COMMANDS, VERSION
from utils.strings import counted


def export_metadata(
    model: CheckpointModel, options: ExportOptions, *, data: dict[str, str], license: str
) -> ExportMetadata:
    """The metadata of a model, before its check.

    Args:
        model: the checkpoint.
        data: where the data set is, see `describe_location`; empty: unknown.
        license: of the weights, as far as it is known.
    """
    nms_iou, detector, info = remaining_nms(options), model.detector, model.info
    return ExportMetadata(
        names=detector.names,
        stride=detector.stride,
        imgsz_hw=options.imgsz_hw,
        batch=options.batch,
        dynamic=options.dynamic,
        channels=model.pixels.channels,
        bits=model.pixels.bits,
        # Readers of YOLO exports take an end-to-end output for rows of detections.
        end2end=options.layout == "end2end",
        layout=options.layout,
        nms_iou=nms_iou,
        box_voting=options.box_voting,
        validation_iou=detector.head.validation_iou,
        squares=detector.head.squares,
        confidence=model.confidence,
        data=data,
        description=f"{detector.spec.get('name', 'detector')}, {counted(detector.num_classes, 'class')}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        author="Lockstep",
        version=f"{VERSION}+{product_version()}",
        license=license,
        details={
            "half": options.half,
            "int8": options.int8,
            "classes": info.get("config", {}).get("classes", []),
            "keep_old": info.get("config", {}).get("keep_old", False),
            "tile": info.get("tile", 0),
            "val_images": info.get("val_images", []),
            "data_fingerprint": info.get("data", {}).get("fingerprint"),
            "ap": _training_ap(info),
            "checked": "no",
        },
    )


def _training_ap(info: Mapping[str, Any]) -> float | None:
    """AP on the validation set in training; None if it is not stored."""
    value = info.get("progress", {}).get("best_fitness")
    if str(info.get("config", {}).get("fitness", "AP")).upper() != "AP":
        return None
    return value if isinstance(value, float) and 0 <= value <= 1 else None


def checked(metadata: ExportMetadata, parity: Parity) -> dict[str, Any]:
    """``metadata.details`` after a check."""
    result = {"images": parity.images, "ap": parity.ap, "ap_checkpoint": parity.ap_checkpoint}
    return metadata.details | {"checked": "yes", "check": result | {"f1": parity.f1, "threshold": parity.threshold}}


def git_commit() -> str:
    """The commit of this program; "unknown" without git or outside a repository."""
    if shutil.which("git") is None or not (PROJECT / ".git").exists():
        return UNKNOWN
    found = subprocess.run(["git", "-C", PROJECT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or UNKNOWN


def model_card(
    weights: Path,
    info: Mapping[str, Any],
    metadata: ExportMetadata,
    results: Mapping[str, Parity | None],
    origin: Origin,
) -> str:
    """Markdown about exported files.

    Args:
        weights: the checkpoint.
        results: for each file its check; None: not checked.
        origin: of the checkpoint.
    """
    config, progress = info.get("config", {}), info.get("progress", {})
    ap = metadata.details["ap"]
    confidence = UNKNOWN if metadata.confidence is None else f"{metadata.confidence:.3f}"
    needs = "no NMS" if metadata.nms_iou is None else f"NMS with IoU {metadata.nms_iou:g}"
    needs += " (NMS and box voting are inside)" * metadata.box_voting
    steps = preprocessing(PixelFormat(metadata.channels, metadata.bits))
    canvases = "square" if metadata.squares else "rectangular"
    rows = {
        "Model": metadata.description,
        "Exported from": weights.name,
        "Command": " ".join([COMMANDS["export"].typed, *sys.argv[1:]]),
        "Program": f"Lockstep {VERSION}, commit {git_commit()}",
        "Data set": f"{Path(info.get('data', {}).get('source', UNKNOWN)).name}, "
        f"fingerprint {info.get('data', {}).get('fingerprint', UNKNOWN)}",
        "Epochs": f"{progress.get('epoch', UNKNOWN)} of {config.get('epochs', UNKNOWN)}",
        "AP in training": f"{UNKNOWN if ap is None else f'{ap:.4f}'} "
        f"(COCO's AP50-95 on the validation set, {canvases} canvases, in training's autocast type)",
        "Confidence with the best F1": confidence,
        "Input": _input_text(metadata),
        "Preprocessing": f"{steps['colors']}, times {steps['scale']}; letterbox: scaled to fit, "
        f"centered, padded with {steps['pad_value']}",
        "Output": f"layout {metadata.layout}; needs {needs}",
        "Precision": "int8" if metadata.details["int8"] else "float16" if metadata.details["half"] else "float32",
        "Starting weights": origin.weights,
        "License of the weights": origin.license,
    }
    lines = [f"# {weights.stem}", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in rows.items()]
    lines += ["", "## Checks", ""]
    lines += [f"- `{name}`: {'not checked' if found is None else found.line}" for name, found in results.items()]
    return "\n".join(lines) + "\n"


def _input_text(metadata: ExportMetadata) -> str:
    (height, width), channels = metadata.imgsz_hw, metadata.channels
    if metadata.dynamic:
        sides = f"H and W multiples of {metadata.stride}, meant for {height} x {width}"
        return f"`images`, float32 (B, {channels}, H, W), {sides}"
    return f"`images`, float32 ({metadata.batch}, {channels}, {height}, {width})"


def labels_text(names: Sequence[str]) -> str:
    """One class name a line."""
    return "\n".join(" ".join(name.split()) for name in names) + "\n"
