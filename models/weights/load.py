"""Detectors from checkpoint files, ours and public ones.

The model of a foreign file is recognized: its family and size by tensor names and shapes, its classes by the head.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from models.detector import Detector, build_detector, build_on_meta
from models.registry import build_layer
from models.spec import KEYS, ModelSpec, known_models, load_spec, parse_spec
from models.weights.read import StoredWeights, read_weights, shapes_of
from utils.config.yaml_files import load_yaml
from utils.errors import UserError, errors_of
from utils.files.folders import CONFIGS
from utils.logger import get_logger

COCO = CONFIGS / "data" / "coco.yaml"
USUAL_ACTIVATION = "nn.SiLU()"


def names_for(count: int, names: tuple[str, ...] | None, source: str | Path) -> tuple[str, ...] | None:
    """``names`` if there are ``count``. YOLOX's files and bare state dicts have no names; then 80 classes are taken to
    be COCO's, which is logged. Otherwise None."""
    if names is not None:
        return names if len(names) == count else None
    coco = load_yaml(COCO)["names"]
    if count != len(coco):
        return None
    get_logger().info("%s: no class names in the file; its %d classes are taken to be COCO's", source, count)
    return tuple(coco[i] for i in range(count))


def recognize(stored: StoredWeights) -> tuple[ModelSpec, int]:
    """The model whose tensors have exactly these names and shapes, and its number of classes.

    Built-in models are tried first, then the YAML that some foreign files contain. Raises UserError if none fits.
    """
    shapes = stored.shapes
    for spec in map(load_spec, known_models()):
        if num_classes := _matching_classes(spec, shapes):
            return _with_activation(spec, stored.activation), num_classes
    reason = ""
    try:
        spec = _stored_graph(stored)
        if spec and (num_classes := _matching_classes(spec, shapes)):
            return _with_activation(spec, stored.activation), num_classes
    except UserError as error:
        reason = f"; its stored graph: {error}"
    families = ", ".join(dict.fromkeys(re.match(r"yolo(v?\d+|x)", name)[0] for name in known_models()))
    raise UserError(f"{stored.path}: its tensors match no known model ({families}; unfused){reason}")


def model_of(stored: StoredWeights) -> dict[str, Any]:
    """The spec of the model that the weights belong to, for `build_detector`."""
    return stored.content["model_spec"] if stored.is_ours else recognize(stored)[0].plain


def _matching_classes(spec: ModelSpec, shapes: Mapping[str, torch.Size]) -> int:
    """The number of classes with which a model has exactly these shapes; 0 for none. Only the head depends on it, so
    the other layers rule out most models."""
    head = f"model.{len(spec.layers) - 1}."
    if not any(name.startswith(head) for name in shapes) or not _has_first_layer(spec, shapes):
        return 0
    with_one = build_on_meta(spec, 1)
    body = {name: shape for name, shape in shapes.items() if not name.startswith(head)}
    if body != {name: shape for name, shape in shapes_of(with_one.state_dict()).items() if not name.startswith(head)}:
        return 0
    count = class_count(with_one, shapes)
    return count if count and shapes_of(build_on_meta(spec, count).state_dict()) == shapes else 0


def _has_first_layer(spec: ModelSpec, shapes: Mapping[str, torch.Size]) -> bool:
    """Whether the first layer has these shapes. Most models differ there, and one layer is quick to build."""
    with torch.device("meta"):
        first = build_layer(spec.layers[0], spec, (spec.channels,))
    expected = {f"model.0.{name}": shape for name, shape in shapes_of(first.state_dict()).items()}
    return expected == {name: shape for name, shape in shapes.items() if name.startswith("model.0.")}


def class_count(detector: Detector, shapes: Mapping[str, torch.Size]) -> int:
    """The number of classes that tensors of these shapes have in the output layers of the detector's head; 0 if none
    fits. The detector's own number of classes does not matter."""
    head = len(detector.model) - 1
    for layer, (groups, before) in detector.head.class_rows().items():
        shape = shapes.get(f"model.{head}.{layer}.weight")
        if shape and shape[0] % groups == 0 and shape[0] // groups > before:
            return shape[0] // groups - before
    return 0


def _stored_graph(stored: StoredWeights) -> ModelSpec | None:
    """The graph in the file, checked; None without one. Raises UserError if it is invalid."""
    if stored.graph is None:
        return None
    graph = {key: value for key, value in stored.graph.items() if key in KEYS and key != "name"}
    file = stored.graph.get("yaml_file")
    name = re.sub(r".*[/\\]|\.ya?ml$", "", file)[:60] if isinstance(file, str) and file else stored.path.stem
    return parse_spec(graph, name)


def _with_activation(spec: ModelSpec, activation: str | None) -> ModelSpec:
    """The spec with the file's activation, if the file has one: shapes do not show it."""
    if activation in (None, USUAL_ACTIVATION, spec.activation):
        return spec
    return parse_spec(spec.plain | {"activation": activation}, spec.label)


def load_detector(path: str | Path) -> tuple[Detector, dict[str, Any]]:
    """A detector in eval mode, float32 on the CPU, and its checkpoint's content.

    EMA weights are preferred. A foreign file is recognized by its tensors; its content has only ``format`` ("foreign"),
    ``names`` and ``imgsz``. Raises UserError for a file that is missing, damaged, not a checkpoint, or of an unknown
    model.
    """
    stored = read_weights(path)
    with _default_dtype_and_device():
        detector = detector_of(stored)
    return detector, stored.content | {"names": list(detector.names)}


@contextlib.contextmanager
def _default_dtype_and_device() -> Iterator[None]:
    """What torch makes in the block is float32 and on the CPU by default, whatever the caller's program has set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def detector_of(stored: StoredWeights) -> Detector:
    """The detector with the stored weights, in eval mode. Raises UserError as `load_detector` does."""
    if stored.is_ours:
        names = stored.names or ()
        with errors_of(stored.path):
            detector = build_detector(stored.content["model_spec"], len(names), names=names)
    else:
        spec, num_classes = recognize(stored)
        names = names_for(num_classes, stored.names, stored.path)
        detector = build_detector(spec.plain, num_classes, names=names)
    if problem := _misfit(detector, stored):
        raise UserError(f"{stored.path}: its weights do not fit its model ({problem})")
    try:
        detector.load_state_dict(stored.tensors, strict=False)  # names were checked; counters may be missing
    except RuntimeError as error:  # a counter with a wrong shape
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{stored.path}: its weights do not fit its model ({reason})") from None
    return detector.eval()


def _misfit(detector: Detector, stored: StoredWeights) -> str:
    """The first difference in names, shapes or strides; empty if there is none."""
    wanted, found = shapes_of(detector.state_dict()), stored.shapes
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            expected, has = (str(list(s[name])) if name in s else "nothing" for s in (wanted, found))
            return f"{name}: the model has {expected}, the file {has}"
    if stored.strides not in (None, detector.strides):
        return f"strides: the model has {list(detector.strides)}, the file {list(stored.strides)}"
    return ""
