"""Reads the weights of checkpoint files: ours, public ones of other trainers, and safetensors.

None of them can run code (utils/files/torch_file.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.weights.layouts import to_public_names, usual_image_size
from utils.config.export_formats import format_of
from utils.errors import UserError
from utils.files.torch_file import (
    FORMAT,
    VERSION,
    CheckpointContent,
    StandIn,
    checked_content,
    is_safetensors,
    read_any,
    read_safetensors,
)
from utils.machine.limits import raise_if_limit
from utils.schema import check
from utils.strings import counted

COUNTERS = "num_batches_tracked"  # batch norm's step counters, used only with momentum=None
METADATA_KEY = "lockstep"  # key of the `MODEL_KEYS` of a checkpoint, as JSON, in our safetensors files
MODEL_KEYS = ("model_spec", "names", "imgsz")  # keys of a checkpoint from which the detector is rebuilt
FOUR_LEVEL_IMAGE_SIZE = 1280  # training size of public models with a fourth level, pixels
MAX_IMAGE_SIZE = 2**14


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights of a file, and its statements about their model."""

    path: Path
    tensors: dict[str, Tensor]  # EMA weights if there are any, float32, with the names of the public convention
    names: tuple[str, ...] | None  # class names
    content: dict[str, Any]  # our checkpoint; for a foreign one, only what val.py and detect.py need
    graph: dict[str, Any] | None = None  # model YAML in a foreign module
    activation: str | None = None  # activation of a foreign module, as in a model YAML; None if unknown
    strides: tuple[int, ...] | None = None  # pixels per cell; None if unknown

    def __post_init__(self) -> None:
        """Raises UserError if weights are not finite, since such a model detects nothing."""
        bad = [name for name, tensor in self.tensors.items() if not tensor.isfinite().all()]
        if bad:
            tensors = f"{counted(len(bad), 'tensor')} (first: {bad[0]})"
            raise UserError(
                f"{self.path}: its weights contain non-finite values in {tensors}; use an earlier checkpoint"
            )

    @property
    def is_ours(self) -> bool:
        """True if this program wrote the file."""
        return self.content.get("format") == FORMAT

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the tensors by name, without batch counters."""
        return shapes_of(self.tensors)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Returns shapes by name, without batch counters."""
    return {name: tensor.shape for name, tensor in tensors.items() if not name.endswith(COUNTERS)}


def read_weights(path: str | Path) -> StoredWeights:
    """Reads the weights of a checkpoint, ours or foreign, without running code in it. Raises UserError for other
    files."""
    path = Path(path)
    if format_of(path) is not None:
        raise UserError(f"{path}: is an exported model; name a checkpoint, such as the .pt that it was made from")
    try:
        if path.suffix == ".safetensors" or is_safetensors(path):
            return _read_safetensors(path)
        content = read_any(path)
        if isinstance(content, dict) and content.get("format") == FORMAT:
            content = checked_content(content, path)
            weights = content.get("ema") or content.get("model")  # best.pt has EMA weights only
            return _own_weights(path, weights, content, f"{path}: damaged checkpoint")
        return _read_foreign_checkpoint(path, content)
    except (RuntimeError, ArithmeticError, ValueError) as error:  # also torch's, for a shape that no tensor can have
        raise_if_limit(error, path)
        raise UserError(f"{path}: damaged checkpoint ({error})") from None


def _own_weights(
    path: Path, weights: Mapping[str, Tensor] | None, content: dict[str, Any], location: str
) -> StoredWeights:
    """Returns the weights of a file of this program. Raises UserError if a detector cannot be rebuilt from them."""
    missing = [key for key in MODEL_KEYS if not content.get(key)]
    if not weights:
        missing.append("weights")
    if missing or not weights:
        raise UserError(f"{location}: has no {', '.join(missing)}")
    tensors = to_public_names(_as_float32(weights))
    return StoredWeights(path, tensors, tuple(content["names"]), {**content, "format": FORMAT})


def _read_safetensors(path: Path) -> StoredWeights:
    tensors, metadata = read_safetensors(path)
    if METADATA_KEY not in metadata:
        content = _foreign_content(None, usual_image_size(tensors))
        return StoredWeights(path, to_public_names(_as_float32(tensors)), None, content)
    location = f"{path}: damaged checkpoint: {METADATA_KEY}"
    try:
        stored = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError):
        raise UserError(f"{location}: not JSON") from None
    version = check(check(stored, dict, location).get("version", 0), int, f"{location}: version")
    if version > VERSION:
        raise UserError(f"{path}: written by a newer version (format {version}); update this program")
    return _own_weights(path, tensors, check(stored, CheckpointContent, location), location)


def _read_foreign_checkpoint(path: Path, stored: Any) -> StoredWeights:
    content = stored if isinstance(stored, dict) else {}
    model = _model_in(content) or stored
    file_tensors = _state_dict(model)
    tensors = to_public_names(file_tensors)
    if not tensors:
        raise UserError(f"{path}: no detector weights in the file (neither 'model' nor 'ema' nor a state dict)")
    names = _class_names(model, content)
    module = model if _is_module(model) else StandIn()  # of a state dict: states nothing
    graph = module.get("yaml")
    stride = module.get("stride")
    strides = None
    if isinstance(stride, Tensor) and stride.ndim == 1 and 1 <= len(stride) <= 8:
        strides = tuple(stride.round().long().tolist())
    imgsz = _stored_image_size(content)
    if imgsz is None:
        imgsz = FOUR_LEVEL_IMAGE_SIZE if strides and max(strides) > 32 else usual_image_size(file_tensors)
    return StoredWeights(
        path=path,
        tensors=tensors,
        names=names,
        content=_foreign_content(names, imgsz),
        graph=dict(graph) if isinstance(graph, dict) else None,
        activation=_activation(path, model),
        strides=strides,
    )


def _is_module(value: Any) -> bool:
    """Returns whether ``value`` stands for an `nn.Module`."""
    return isinstance(value, StandIn) and isinstance(value.get("_modules"), dict)


def _modules(module: Any, name: str = "") -> Iterator[tuple[str, StandIn]]:
    """Yields the modules in ``module``, itself first, with their dotted names; none if it is not a module."""
    if _is_module(module):
        yield name, module
        for child_name, child in module.get("_modules").items():
            yield from _modules(child, f"{name}.{child_name}".lstrip("."))


def _state_dict(value: Any) -> dict[str, Tensor]:
    """Returns the parameters and persistent buffers by name, floating ones as float32, of a module or a mapping from
    names to tensors."""
    named = dict(value) if isinstance(value, dict) else {}
    for prefix, module in _modules(value):
        leaves = (module.get("_parameters") or {}) | (module.get("_buffers") or {})
        excluded = module.get("_non_persistent_buffers_set") or ()
        named |= {f"{prefix}.{name}".lstrip("."): leaf for name, leaf in leaves.items() if name not in excluded}
    tensors = {name: leaf for name, leaf in named.items() if isinstance(name, str) and isinstance(leaf, Tensor)}
    return {name: leaf.contiguous() for name, leaf in _as_float32(tensors).items()}


def _model_in(content: dict[str, Any]) -> Any:
    """Finds the module or state dict in the content of a checkpoint, EMA weights first; None without one."""
    for key in ("ema", "model", "state_dict"):
        value = content.get(key)
        if _is_module(value) or (isinstance(value, dict) and value):
            return value
    return None


def _stored_image_size(content: dict[str, Any]) -> int | None:
    """Returns the training size in pixels that YOLOv5 and Ultralytics store among their settings; None without it."""
    imgsz = None
    for key in ("opt", "train_args"):
        settings = content.get(key)
        size = settings.get("imgsz") if isinstance(settings, dict | StandIn) else None
        if type(size) is int and 0 < size < MAX_IMAGE_SIZE:
            imgsz = size
    return imgsz


def _foreign_content(names: tuple[str, ...] | None, imgsz: int) -> dict[str, Any]:
    """Builds the part of a checkpoint's content that validation and detection need."""
    return {"format": "foreign", "names": list(names or ()), "imgsz": imgsz}


def _as_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _class_names(model: Any, content: dict[str, Any]) -> tuple[str, ...] | None:
    """Returns the class names, which public files store in the module or next to it, as a list or by number."""
    for holder in (model, content):
        names = holder.get("names") if isinstance(holder, dict | StandIn) else None
        if isinstance(names, dict) and sorted(map(str, names)) == sorted(map(str, range(len(names)))):
            names = [name for _, name in sorted(names.items(), key=lambda item: int(item[0]))]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None


def _activation(path: Path, model: Any) -> str | None:
    """Returns the activation of a model's convolutions. Raises UserError if they differ, which no YAML can express."""
    activations = set()
    for _, record in _modules(model):
        act = record.get("_modules").get("act")
        if isinstance(act, StandIn) and not act.kind.endswith(".Identity"):
            slope = act.get("negative_slope")
            activations.add(f"nn.{act.kind.rpartition('.')[2]}({slope if isinstance(slope, float) else ''})")
    if len(activations) > 1:
        different = ", ".join(sorted(activations))
        raise UserError(f"{path}: its convolutions have different activations ({different})")
    return activations.pop() if activations else None
