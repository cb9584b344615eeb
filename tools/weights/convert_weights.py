"""Converts the weights of a checkpoint, even of another program, to safetensors or to a checkpoint of this program."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.train.checkpoint import RunDescription
from models.detector import Detector
from models.weights.download import fetch_weights
from models.weights.load import detector_of
from models.weights.read import COUNTERS, METADATA_KEY, read_weights
from utils import program
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import check_new_path
from utils.files.torch_file import VERSION, write_checkpoint, write_safetensors
from utils.strings import counted

# Keys of our checkpoints that are copied: what describes the detector and how it was trained, but not a run's state.
COPIED = {"metrics", *(field.name for field in fields(RunDescription))} - {"config"}


def convert(source: str, target: str | Path, *, offline: bool = False) -> str:
    """Converts weights, as ``python -m tools.weights`` does, and returns a line about the result.

    ``source``: a file, or the name of public weights, which are downloaded unless ``offline``.

    The file contains float32 weights and the description of the detector, but not the state of a run. Weights of an
    unknown model are written to safetensors under their own names. Raises UserError, for example if ``target`` exists.
    """
    target = Path(target)
    _check_target(target, source)
    path = fetch_weights(source, ctx=DistributedContext.single(), offline=offline)
    stored = read_weights(path)
    try:
        detector = detector_of(stored)
    except UserError as error:
        if stored.is_ours or target.suffix == ".pt":
            raise
        target.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(target, stored.tensors, {"format": "pt"})
        return f"{error}; {counted(len(stored.tensors), 'tensor')} written to {target} under their own names"
    copied = {key: value for key, value in stored.content.items() if key in COPIED}
    description = copied | {"model_spec": detector.spec, "names": list(detector.names)}
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".pt":
        write_checkpoint({**description, "model": {}, "ema": detector.state_dict()}, target)
    else:
        _write_safetensors(detector, description, target)
    return f"{path}: {_describe(detector)} -> {target}"


def _check_target(target: Path, source: str) -> None:
    """Raises UserError, before anything is downloaded or read, if ``target`` exists or cannot be created, or its suffix
    names no format."""
    if target.suffix not in (".safetensors", ".pt"):
        raise UserError(f"{target}: must end in .safetensors or .pt")
    if os.path.exists(target) and os.path.exists(source) and target.samefile(source):
        raise UserError(f"{target}: source and target are the same file")
    check_new_path(target)


def _describe(detector: Detector) -> str:
    count = sum(parameter.numel() for parameter in detector.parameters())
    classes = counted(detector.num_classes, "class")
    strides = ", ".join(map(str, detector.strides))
    return f"{detector.spec['name']}, {count:,} parameters, {classes}, strides {strides}"


def _write_safetensors(detector: Detector, description: Mapping[str, Any], target: Path) -> None:
    """Writes the weights, with the ``description`` of the detector as metadata."""
    metadata = json.dumps({"version": VERSION, "program": program.VERSION, **description}, ensure_ascii=False)
    weights = {name: tensor for name, tensor in detector.state_dict().items() if not name.endswith(COUNTERS)}
    write_safetensors(target, weights, {"format": "pt", METADATA_KEY: metadata})
