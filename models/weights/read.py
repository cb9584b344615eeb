"""Reads the weights of checkpoint files: ours, public ones of other trainers, and safetensors.

All are read as inert data (utils/files/torch_file.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.weights.layouts import to_public_names, usual_image_size
from models.weights.safe_torch_file import ForeignFile, is_module
from utils.errors import UserError
from utils.files.checkpoint_file import (
    FORMAT,
    VERSION,
    CheckpointContent,
    checkpoint_in,
    is_safetensors,
    read_safetensors,
)
from utils.files.schema import check
from utils.files.torch_file import Record
from utils.strings import counted

COUNTERS = "num_batches_tracked"  # batch norm's step counters, used only with momentum=None
METADATA_KEY = "lockstep"  # in a safetensors file of ours: the `MODEL_KEYS` of a checkpoint as JSON
MODEL_KEYS = ("model_spec", "names", "imgsz")  # of a checkpoint: what rebuilds the detector
FOUR_LEVEL_IMAGE_SIZE = 1280  # pixels, at which public models with a fourth level are trained
MAX_IMAGE_SIZE = 2**14


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights, and what the file says about their model."""

    path: Path
    tensors: dict[str, Tensor]  # EMA weights if there are any, float32, with the names of the public convention
    names: tuple[str, ...] | None  # of the classes
    content: dict[str, Any]  # our checkpoint; for a foreign one, only what val.py and detect.py need
    graph: dict[str, Any] | None = None  # model YAML in a foreign module
    activation: str | None = None  # of a foreign module, as in a model YAML; None if unknown
    strides: tuple[int, ...] | None = None  # pixels per cell; None if unknown

    def __post_init__(self) -> None:
        """Raises UserError if the weights are not finite: the model would find nothing."""
        if bad := [name for name, tensor in self.tensors.items() if not tensor.isfinite().all()]:
            where = f"{counted(len(bad), 'tensor')} (first: {bad[0]})"
            raise UserError(f"{self.path}: its weights contain non-finite values in {where}; use an earlier checkpoint")

    @property
    def is_ours(self) -> bool:
        return self.content.get("format") == FORMAT

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return shapes_of(self.tensors)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Shapes by name, without counters."""
    return {name: tensor.shape for name, tensor in tensors.items() if not name.endswith(COUNTERS)}


def read_weights(path: str | Path) -> StoredWeights:
    """The weights in a checkpoint, ours or foreign; no code in it is run. Raises UserError for other files."""
    path = Path(path)
    if path.suffix == ".safetensors" or is_safetensors(path):
        return _read_safetensors(path)
    with ForeignFile(path) as file:
        if isinstance(file.content, dict) and file.content.get("format") == FORMAT:
            return _read_own(file)
        return _read_foreign(file)


def _read_own(file: ForeignFile) -> StoredWeights:
    content = checkpoint_in(file)
    path = file.path
    weights = content.get("ema") or content.get("model")  # best.pt has EMA weights alone
    missing = _missing_keys(content)
    if not weights:
        missing.append("weights")
    if missing:
        raise UserError(f"{path}: damaged checkpoint (no {', '.join(missing)})")
    return StoredWeights(path, _as_float32(to_public_names(weights)), tuple(content["names"]), content)


def _missing_keys(content: Mapping[str, Any]) -> list[str]:
    return [key for key in MODEL_KEYS if not content.get(key)]


def _read_safetensors(path: Path) -> StoredWeights:
    tensors, metadata = read_safetensors(path)
    imgsz, tensors = usual_image_size(tensors), to_public_names(_as_float32(tensors))
    if METADATA_KEY not in metadata:
        return StoredWeights(path, tensors, None, _foreign_content(None, imgsz))
    prefix = f"{path}: damaged checkpoint: {METADATA_KEY}"
    try:
        content = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError):
        raise UserError(f"{prefix}: not JSON") from None
    version = check(check(content, dict, prefix).get("version", 0), int, f"{prefix}: version")
    if version > VERSION:
        raise UserError(f"{path}: written by a newer version (format {version}); update this program")
    content = check(content, CheckpointContent, prefix)
    missing = _missing_keys(content)
    if missing:
        raise UserError(f"{prefix}: has no {', '.join(missing)}")
    return StoredWeights(path, tensors, tuple(content["names"]), {**content, "format": FORMAT})


def _read_foreign(file: ForeignFile) -> StoredWeights:
    content, path = file.content, file.path
    module = content  # or the module or state dict in it, EMA weights preferred
    stored = content if isinstance(content, dict) else {}
    for key in ("state_dict", "model", "ema"):
        if is_module(stored.get(key)) or (isinstance(stored.get(key), dict) and stored[key]):
            module = stored[key]
    written = file.state_dict(module)
    tensors = to_public_names(written)
    if not tensors:
        raise UserError(f"{path}: no detector weights in the file (neither 'model' nor 'ema' nor a state dict)")
    graph, strides = None, None
    if is_module(module):
        graph = dict(module.get("yaml")) if isinstance(module.get("yaml"), dict) else None
        stride = file.tensor(module.get("stride"))
        if stride is not None and stride.ndim == 1 and 1 <= len(stride) <= 8:
            strides = tuple(stride.round().long().tolist())
    names = _class_names(module, stored)
    imgsz = FOUR_LEVEL_IMAGE_SIZE if strides and max(strides) > 32 else usual_image_size(written)
    for key in ("opt", "train_args"):  # where YOLOv5 and Ultralytics store the training size
        settings = stored.get(key)
        size = settings.get("imgsz") if isinstance(settings, dict | Record) else None
        if type(size) is int and 0 < size < MAX_IMAGE_SIZE:
            imgsz = size
    activation = _activation(file, module)
    return StoredWeights(path, tensors, names, _foreign_content(names, imgsz), graph, activation, strides)


def _foreign_content(names: tuple[str, ...] | None, imgsz: int) -> dict[str, Any]:
    return {"format": "foreign", "names": list(names or ()), "imgsz": imgsz}


def _as_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _class_names(module: Any, stored: dict[str, Any]) -> tuple[str, ...] | None:
    """Class names, which public files store in the module or next to it, as a list or by number."""
    for holder in (module, stored):
        names = holder.get("names") if isinstance(holder, dict | Record) else None
        if isinstance(names, dict) and sorted(map(str, names)) == sorted(map(str, range(len(names)))):
            names = [text for _, text in sorted(names.items(), key=lambda item: int(item[0]))]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None


def _activation(file: ForeignFile, module: Any) -> str | None:
    """The activation of a module's convolutions. Raises UserError if they differ, which no YAML can express."""
    found = set()
    for _, part in file.modules(module):
        act = part.get("_modules").get("act")
        if isinstance(act, Record) and act.kind.name != "Identity":
            slope = act.get("negative_slope")
            found.add(f"nn.{act.kind.name}({slope if isinstance(slope, float) else ''})")
    if len(found) > 1:
        raise UserError(f"{file.path}: its convolutions have different activations ({', '.join(sorted(found))})")
    return found.pop() if found else None
