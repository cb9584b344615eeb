"""Opens any model for inference: a checkpoint, or a file that export.py or another program has exported."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.inference.model import CheckpointModel, InferenceModel
from engine.inference.runtimes.exported import open_exported
from models.weights.load import load_detector

EXPORTED = {".onnx": "onnx", ".xml": "openvino", ".torchscript": "torchscript", ".pt2": "pt2"}  # runtimes by suffix
OPENVINO_FOLDER = "_openvino_model"  # how the name of a folder with an OpenVINO model ends


def is_exported(path: str | Path) -> bool:
    """Whether a path is an exported file, by its name, or a folder with an OpenVINO model, and not a checkpoint."""
    path = Path(path)
    if path.suffix.lower() in EXPORTED:
        return True
    return path.is_dir() and (path.name.endswith(OPENVINO_FOLDER) or any(path.glob("*.xml")))


def open_model(path: str | Path, *, device: torch.device, nms: bool = False, trust: bool = False) -> InferenceModel:
    """A model for inference on ``device``.

    Args:
        path: a checkpoint (.pt, .pth, .safetensors), .onnx, .xml or its folder, .torchscript or .pt2.
        nms: use the one-to-many branch of a head with two; its detections need NMS. Exported files have one branch.
        trust: open TorchScript, .pt2 and OpenVINO files; they may run code in them.

    Raises UserError for a missing, damaged, unfit or untrusted file, a package that is not installed, and ``nms`` for
    an exported file that needs none.
    """
    path = Path(path)
    if not is_exported(path):
        detector, info = load_detector(path)
        return CheckpointModel(detector.fuse(one_to_one=not nms), info, path, device)
    runtime = "openvino" if path.is_dir() else EXPORTED[path.suffix.lower()]
    return open_exported(path, runtime, device=device, nms=nms, trust=trust)
