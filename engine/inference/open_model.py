"""Opens any model for inference: a checkpoint, or a file that export.py or another program has exported."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.inference.exported_model import open_exported_model
from engine.inference.model import CheckpointModel, InferenceModel
from models.weights.download import fetch_weights
from models.weights.load import load_detector
from utils.config.export_formats import format_of
from utils.config.plain_values import checked_value
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import configure_logging, get_logger
from utils.machine.devices import parse_devices


def is_exported(path: str | Path) -> bool:
    """Returns whether a path is an exported file or folder, by its name, and not a checkpoint."""
    return format_of(path) is not None


def open_model(path: str | Path, *, device: torch.device, nms: bool = False, trust: bool = False) -> InferenceModel:
    """Opens a model for inference on ``device``.

    Args:
        path: a checkpoint (.pt, .pth, .safetensors), or a file or folder of one of `EXPORT_FORMATS`. ``~`` is the
            user's home.
        nms: use the one-to-many branch of an NMS-free head, whose detections need NMS. Exported files have one branch.
        trust: open files of formats whose files may run code.

    Raises UserError for a missing, damaged, unfit or untrusted file, a package that is not installed, and ``nms`` for
    an exported file that needs none.
    """
    path = Path(os.path.expanduser(path))
    if is_exported(path):
        return open_exported_model(path, device=device, nms=nms, trust=trust)
    if path.is_dir():
        raise UserError(f"{path}: is a folder without an exported model")
    detector, info = load_detector(path)
    return CheckpointModel(detector.fuse(one_to_one=not nms), info, path, device)


def open_weights(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "",
    nms: bool = False,
    trust: bool = False,
    offline: bool = False,
) -> InferenceModel:
    """Opens a file, or public weights, which are downloaded unless ``offline``. ``nms``, ``trust``: see `open_model`.
    Raises UserError for values that are not true or false: "no" must not trust a file."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(f"{path!r}: is not a path; give a checkpoint, an exported file, or the name of public weights")
    devices = parse_devices(str(device))
    if len(devices) > 1:
        raise UserError(f"--device {device}: detection runs on one device; name one")
    path = os.fspath(path)
    if not os.path.exists(path) and not is_exported(path):
        if not get_logger().hasHandlers():
            configure_logging(True)  # a download prints its address and license
        path = fetch_weights(path, ctx=DistributedContext.single(), offline=offline)
    return open_model(
        path,
        device=devices[0],
        nms=bool(checked_value("nms", nms, bool | None)),
        trust=bool(checked_value("trust", trust, bool | None)),
    )
