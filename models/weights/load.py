"""Detectors from checkpoint files, ours and public ones.

The model of a foreign file is recognized: its family and size by tensor names and shapes, its classes by the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from models.detector import Detector, build_detector, build_on_meta
from models.registry import build_layer
from models.spec import ModelSpec, ModelYaml, known_models, load_spec, parse_spec
from models.weights.read import StoredWeights, read_weights, shapes_of
from utils.config.yaml_files import load_yaml
from utils.errors import UserError, errors_of
from utils.files.folders import CONFIGS
from utils.logger import get_logger

COCO = CONFIGS / "data" / "coco.yaml"


def names_for(count: int, names: tuple[str, ...] | None, source: str | Path) -> tuple[str, ...] | None:
    """``names`` if there are ``count``, else None. Without names (YOLOX, bare state dicts), 80 classes are taken to be
    COCO's, which is logged."""
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

    def candidates() -> Iterator[ModelSpec]:
        yield from map(load_spec, known_models())
        if stored.graph is not None:
            file = stored.graph.get("yaml_file")
            name = re.sub(r".*[/\\]|\.ya?ml$", "", file)[:60] if isinstance(file, str) and file else stored.path.stem
            known = {field.name for field in fields(ModelYaml)} - {"name"}
            yield parse_spec({key: value for key, value in stored.graph.items() if key in known}, name)

    reason = ""
    try:
        for spec in candidates():
            if num_classes := _matching_classes(spec, stored.shapes):
                if stored.activation not in (None, "nn.SiLU()", spec.activation):  # shapes do not show it
                    spec = parse_spec(spec.plain | {"activation": stored.activation}, spec.label)
                return spec, num_classes
    except UserError as error:
        reason = f"; its stored graph: {error}"
    families = ", ".join(dict.fromkeys(re.match(r"yolo(v?\d+|x)", name)[0] for name in known_models()))
    raise UserError(f"{stored.path}: its tensors match no known model ({families}; unfused){reason}")


def model_of(stored: StoredWeights) -> dict[str, Any]:
    """The spec of the model that the weights belong to, for `build_detector`. Raises UserError if they do not fit."""
    if not stored.is_ours:
        return recognize(stored)[0].plain
    spec = stored.content["model_spec"]
    check_shapes(stored.path, spec, stored.names or (), stored.shapes)
    return spec


def check_shapes(
    path: Path, spec: dict[str, Any], names: Sequence[str], shapes: Mapping[str, torch.Size], strides: Any = None
) -> None:
    """Raises UserError unless the file ``path`` has weights of the ``shapes``, and if given the ``strides``, that its
    model has. Needs no memory for the model: a file may describe one that is far larger than its weights."""
    with errors_of(path):
        if not names:
            raise UserError("a detector needs at least one class, got 0")
        model = build_on_meta(load_spec(spec), len(names), names)
    wanted = shapes_of(model.state_dict())
    found = dict(shapes)
    if strides is not None:
        wanted["strides"] = model.strides
        found["strides"] = strides
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            expected, has = (str(list(s[name])) if name in s else "nothing" for s in (wanted, found))
            problem = f"{name}: the model has {expected}, the file {has}"
            raise UserError(f"{path}: its weights do not fit its model ({problem})")


def _matching_classes(spec: ModelSpec, shapes: Mapping[str, torch.Size]) -> int:
    """The number of classes with which a model has exactly these shapes; 0 for none. The first layer, which is quick to
    build, rules out most models, and the layers before the head nearly all."""
    with torch.device("meta"):
        first = build_layer(spec.layers[0], spec, (spec.channels,))
    expected = {f"model.0.{name}": shape for name, shape in shapes_of(first.state_dict()).items()}
    if expected != {name: shape for name, shape in shapes.items() if name.startswith("model.0.")}:
        return 0
    head, with_one = f"model.{len(spec.layers) - 1}.", build_on_meta(spec, 1)
    found, expected = (
        {name: shape for name, shape in of_model.items() if not name.startswith(head)}
        for of_model in (shapes, shapes_of(with_one.state_dict()))
    )
    count = class_count(with_one, shapes) if found == expected else 0
    return count if count and shapes_of(build_on_meta(spec, count).state_dict()) == shapes else 0


def class_count(detector: Detector, shapes: Mapping[str, torch.Size]) -> int:
    """The number of classes that tensors of these shapes have in the output layers of the detector's head, whatever its
    own number is; 0 if none fits."""
    head = len(detector.model) - 1
    for layer, (groups, before) in detector.head.class_rows().items():
        shape = shapes.get(f"model.{head}.{layer}.weight")
        if shape and shape[0] % groups == 0 and shape[0] // groups > before:
            return shape[0] // groups - before
    return 0


def load_detector(path: str | Path) -> tuple[Detector, dict[str, Any]]:
    """A detector in eval mode, float32 on the CPU, and its checkpoint's content, which of a foreign file is only
    ``format`` ("foreign"), ``names`` and ``imgsz``. Raises UserError for a file that is missing, damaged, not a
    checkpoint, or of an unknown model."""
    stored = read_weights(path)
    with torch.device("cpu"):  # whatever default the caller's program has set
        detector = detector_of(stored)
    return detector, stored.content | {"names": list(detector.names)}


def detector_of(stored: StoredWeights) -> Detector:
    """The detector with the stored weights, in eval mode. Raises UserError as `load_detector` does."""
    if stored.is_ours:
        spec = stored.content["model_spec"]
        names = stored.names or ()
        num_classes = len(names)
    else:
        recognized, num_classes = recognize(stored)
        spec = recognized.plain
        names = names_for(num_classes, stored.names, stored.path) or tuple(map(str, range(num_classes)))
    check_shapes(stored.path, spec, names, stored.shapes, stored.strides)
    detector = build_detector(spec, num_classes, names=names)
    # Counters may be missing, and are not used.
    detector.load_state_dict({name: stored.tensors[name] for name in stored.shapes}, strict=False)
    return detector.eval()
