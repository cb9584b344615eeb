"""Opens a file that export.py or another program has exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from engine.inference.model import InferenceModel
from engine.inference.runtimes.backends import open_onnx, open_openvino, open_pt2, open_torchscript
from engine.inference.runtimes.exported import ExportedModel
from engine.inference.runtimes.metadata import parse_metadata
from engine.inference.runtimes.own_exports import is_own_export
from utils.errors import UserError, errors_of

_BACKENDS = {".onnx": open_onnx, ".xml": open_openvino, ".torchscript": open_torchscript, ".pt2": open_pt2}


def open_exported(path: Path, *, device: torch.device, nms: bool, threads: int, trust: bool) -> InferenceModel:
    """Arguments and errors as of `engine.inference.runtimes.open.open_model`."""
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
        reopen = partial(open_exported, path.absolute(), device=device, nms=nms, threads=threads, trust=trust)
        model = ExportedModel(session, parse_metadata(session.metadata), path, device, reopen)
    if nms and model.nms_iou is None:
        raise UserError(f"{path}: --nms: its detections need no NMS; export the other branch with export.py --nms")
    return model
