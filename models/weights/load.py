"""Builds detectors from checkpoint files, ours and public ones.

Weights get from ``--weights`` to a model in these steps:

- catalog.py: public weights, by name or URL; download.py: `fetch_weights` returns the file, which it may download;
- read.py: `read_weights` reads a file, ours or of another program, as `StoredWeights`: tensors, class names, and its
  statements about the model; layouts.py renames the tensors to our names;
- this module: val.py, detect.py and export.py call `load_detector`, which builds the model that the file describes, or
  the one that its tensors fit (`recognize`);
- transfer.py: train.py builds the model of its own settings and classes, and `transfer_weights` copies the tensors that
  fit, and the rows of classes by their names;
- origin.py: the weights that these were trained from, and their license. Our checkpoints and exported files store both.

The model of a foreign file is recognized: family and size by tensor names and shapes, the number of classes by the
head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from models.detector import Detector, build_detector, build_on_meta
from models.registry import build_layer
from models.spec import ModelSpec, ModelYaml, built_in_models, load_spec, parse_spec
from models.weights.read import StoredWeights, read_weights, shapes_of
from utils.config.yaml_files import load_yaml
from utils.errors import UserError, errors_of
from utils.logger import get_logger
from utils.program_folders import CONFIGS
from utils.strings import counted

COCO = CONFIGS / "data" / "coco.yaml"


def names_for(count: int, names: tuple[str, ...] | None, source: str | Path) -> tuple[str, ...] | None:
    """Returns ``names`` if there are ``count``; otherwise warns and returns None. A file without names (YOLOX, bare
    state dicts) but with 80 classes is assumed to have COCO's, which is logged."""
    if names is not None and len(names) != count:
        get_logger().warning(
            "%s: has %s for %s; the names are not used", source, counted(len(names), "name"), counted(count, "class")
        )
        return None
    if names is not None:
        return names
    coco = load_yaml(COCO)["names"]
    if count != len(coco):
        return None
    get_logger().info("%s: no class names in the file; its %d classes are assumed to be COCO's", source, count)
    return tuple(coco[i] for i in range(count))


def recognize(stored: StoredWeights) -> tuple[ModelSpec, int]:
    """Finds the model whose tensors have exactly these names and shapes, and its number of classes.

    Built-in models are tried first, then the YAML that some foreign files contain. Raises UserError if none matches.
    """
    graph_error = ""
    try:
        for spec in _candidates(stored):
            num_classes = _matching_classes(spec, stored.shapes)
            if not num_classes:
                continue
            if stored.activation not in (None, "nn.SiLU()", spec.activation):  # no tensor depends on it
                spec = parse_spec(spec.plain | {"activation": stored.activation}, spec.label)
            return spec, num_classes
    except UserError as error:
        graph_error = f"; its stored graph: {error}"
    families = dict.fromkeys(re.sub(r"^(yolo(?:v?\d+|x)).*", r"\1", name) for name in built_in_models())
    known = ", ".join(families)
    raise UserError(f"{stored.path}: its tensors match no known model ({known}; unfused){graph_error}")


def _candidates(stored: StoredWeights) -> Iterator[ModelSpec]:
    """Yields the models that weights may belong to. Raises UserError for a mistake in the graph of the file."""
    yield from map(load_spec, built_in_models())
    if stored.graph is not None:
        yaml_file = stored.graph.get("yaml_file")
        label = stored.path.stem
        if isinstance(yaml_file, str) and yaml_file:
            label = re.sub(r".*[/\\]|\.ya?ml$", "", yaml_file)[:60]
        known_keys = {field.name for field in fields(ModelYaml)} - {"name"}
        yield parse_spec({key: value for key, value in stored.graph.items() if key in known_keys}, label)


def model_of(stored: StoredWeights) -> dict[str, Any]:
    """Returns the spec of the model that the weights belong to, for `build_detector` with any number of classes: its
    class layers stay as wide as those of the weights. Raises UserError if they do not match it."""
    spec, num_classes = _model_and_classes(stored)
    return {"classes_of_width": num_classes} | spec


def _model_and_classes(stored: StoredWeights) -> tuple[dict[str, Any], int]:
    if stored.is_ours:
        spec = stored.content["model_spec"]
        names = stored.names or ()
        check_shapes(stored.path, spec, names, stored.shapes)
        return spec, len(names)
    recognized, num_classes = recognize(stored)
    return recognized.plain, num_classes


def check_shapes(path: Path, spec: dict[str, Any], names: Sequence[str], shapes: Mapping[str, torch.Size]) -> None:
    """Raises UserError unless the weights of the file ``path`` have the shapes of its model.

    Needs no memory for the model: a file may describe one that is far larger than its weights.
    """
    with errors_of(path):
        if not names:
            raise UserError("a detector needs at least one class, got 0")
        model = build_on_meta(load_spec(spec), len(names), names)
    expected = shapes_of(model.state_dict())
    for name in [*expected, *shapes]:
        if expected.get(name) != shapes.get(name):
            in_model, in_file = (str(list(each[name])) if name in each else "nothing" for each in (expected, shapes))
            raise _mismatch(path, name, in_model, in_file)


def _mismatch(path: Path, name: str, in_model: object, in_file: object) -> UserError:
    return UserError(
        f"{path}: its weights do not match its model ({name}: the model has {in_model}, the file {in_file})"
    )


def _matching_classes(spec: ModelSpec, shapes: Mapping[str, torch.Size]) -> int:
    """Returns the number of classes with which a model has exactly these shapes; 0 if there is none.

    `build_on_meta` takes some 50 ms. The numbers of the layers, the last of which is the head's, and the shapes of the
    first one, which are quick to compare, rule out nearly all others.
    """
    numbers = [str(number) for number in range(len(spec.layers))]
    layers = {name.removeprefix("model.").partition(".")[0] for name in shapes}
    if numbers[-1] not in layers or not layers.issubset(numbers):
        return 0
    with torch.device("meta"):
        first_layer = build_layer(spec.layers[0], spec, (spec.channels,))
    expected = {f"model.0.{name}": shape for name, shape in shapes_of(first_layer.state_dict()).items()}
    if expected != {name: shape for name, shape in shapes.items() if name.startswith("model.0.")}:
        return 0
    count = class_count(build_on_meta(spec, 1), shapes)
    return count if count and shapes_of(build_on_meta(spec, count).state_dict()) == shapes else 0


def class_count(detector: Detector, shapes: Mapping[str, torch.Size]) -> int:
    """Returns the number of classes for which the output layers of a head like the detector's have these shapes,
    whatever its own number is; 0 if there is none."""
    head = len(detector.model) - 1
    for layer, (groups, before) in detector.head.class_rows().items():
        shape = shapes.get(f"model.{head}.{layer}.weight")
        if shape and shape[0] % groups == 0 and shape[0] // groups > before:
            return shape[0] // groups - before
    return 0


def load_detector(path: str | Path) -> tuple[Detector, dict[str, Any]]:
    """Loads a detector, in eval mode and float32 on the CPU, and the content of its checkpoint.

    The content of a foreign file is reduced to ``format`` ("foreign"), ``names`` and ``imgsz``, which is rounded up to
    whole strides, as in YOLOv5.

    Raises UserError for a file that is missing, damaged, not a checkpoint, or of an unknown model.
    """
    stored = read_weights(path)
    with torch.device("cpu"):  # the caller may have set another default
        detector = detector_of(stored)
    content = stored.content | {"names": list(detector.names)}
    if not stored.is_ours:
        content["imgsz"] = math.ceil(content["imgsz"] / detector.stride) * detector.stride
    return detector, content


def detector_of(stored: StoredWeights) -> Detector:
    """Builds the detector with the stored weights, in eval mode. Raises UserError as `load_detector` does."""
    spec, num_classes = _model_and_classes(stored)
    names = names_for(num_classes, stored.names, stored.path) or tuple(map(str, range(num_classes)))
    with errors_of(stored.path):
        detector = build_detector(spec, len(names), names=names)
    if stored.strides is not None and stored.strides != detector.strides:
        raise _mismatch(stored.path, "strides", list(detector.strides), list(stored.strides))
    # Not strict: batch counters may be missing, and are not used.
    detector.load_state_dict({name: stored.tensors[name] for name in stored.shapes}, strict=False)
    return detector.eval()
