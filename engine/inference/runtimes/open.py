"""Opens any model for inference: a checkpoint, or a file that export.py or another program has exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from engine.inference.model import CheckpointModel, ExportedModel, InferenceModel
from engine.inference.runtimes.backends import open_onnx, open_openvino, open_pt2, open_torchscript
from engine.inference.runtimes.metadata import parse_metadata
from engine.inference.runtimes.own_exports import is_own_export
from models.weights.load import load_detector
from utils.errors import UserError, errors_of

_BACKENDS = {".onnx": open_onnx, ".xml": open_openvino, ".torchscript": open_torchscript, ".pt2": open_pt2}
OPENVINO_FOLDER = "_openvino_model"  # how the name of a folder with an OpenVINO model ends


def is_exported(path: str | Path) -> bool:
    """Whether a path is an exported file, by its name, or a folder with an OpenVINO model, and not a checkpoint."""
    path = Path(path)
    if path.suffix.lower() in _BACKENDS:
        return True
    return path.is_dir() and (path.name.endswith(OPENVINO_FOLDER) or any(path.glob("*.xml")))


def open_model(
    path: str | Path, *, device: torch.device, nms: bool = False, threads: int = 0, trust: bool = False
) -> InferenceModel:
    """A model for inference on ``device``.

    Args:
        path: a checkpoint (.pt, .pth, .safetensors), .onnx, .xml or its folder, .torchscript or .pt2.
        nms: use the one-to-many branch of a head with two; its detections need NMS. Exported files have one branch.
        threads: CPU threads of the runtime; 0: as many as torch uses. With torch's own formats and checkpoints it sets
            torch's number, which holds for the whole process.
        trust: open TorchScript, .pt2 and OpenVINO files that this user has not exported; they may run code in them.

    Raises:
        UserError: a missing, damaged, unfit or untrusted file; a package that is not installed; ``nms`` for an exported
            file that needs none.
    """
    path = Path(path)
    if not is_exported(path):
        detector, info = load_detector(path)
        if threads:
            torch.set_num_threads(threads)
        return CheckpointModel(detector.fuse(one_to_one=not nms), info, path, device)
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: {'is a pipe or device, not a file' if path.exists() else 'no such file'}")
    with errors_of(path):
        open_file = open_openvino if path.is_dir() else _BACKENDS[path.suffix.lower()]
        # The runtimes read the file again: one that another process replaces in between is opened unchecked.
        if not (trust or open_file is open_onnx or is_own_export(path)):
            raise UserError(
                f"{path}: opening a TorchScript, .pt2 or OpenVINO file may run code in it, and you have not exported "
                "this one here; if you trust its source, use --trust (in Python: trust=True)"
            )
        session = open_file(path, device, threads or torch.get_num_threads())
        reopen = partial(open_model, path.absolute(), device=device, nms=nms, threads=threads, trust=trust)
        model = ExportedModel(session, parse_metadata(session.metadata), path, device, reopen)
    if nms and model.nms_iou is None:
        raise UserError(f"{path}: --nms: its detections need no NMS; export the other branch with export.py --nms")
    return model
