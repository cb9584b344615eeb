"""Reads a model YAML into a checked, plain description of its graph. Nothing is evaluated and no module is built.

The format is the public one: ``backbone`` and ``head`` are lists of ``[from, repeats, module, args]``. ``from`` is a
layer index or a list of them; negative ones count back from the row.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from utils.config.words import other_task
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.logger import get_logger, log_when_configured
from utils.pixels import PixelFormat
from utils.program_folders import CONFIGS
from utils.schema import Bounds, build, check, suggestion

MODEL_FOLDER = CONFIGS / "models"
DEEP_SCALES = ("m", "l", "x")  # public convention: at these scales every C3k2 is deep
WEIGHTS_SUFFIXES = (".pt", ".pth", ".safetensors")
IMAGE = -1  # the source that stands for the input image

# Keys that are copied to a plain spec unchanged.
PLAIN_KEYS = ("anchors", "activation", "reg_max", "classes_of_width", "end2end", "backbone", "head")
Positive = Annotated[float, Bounds(1e-6, 1e6)]


@dataclass(frozen=True, kw_only=True)
class ModelYaml:
    """Keys of a model YAML."""

    backbone: list
    head: list
    anchors: Any = None  # see `checked_anchors`
    activation: str | None = None
    reg_max: Annotated[int, Bounds(1, 256)] = 16
    classes_of_width: Annotated[int, Bounds(0)] = 0
    end2end: bool = False
    scales: dict[str, list[Positive]] | None = None
    scale: str | None = None
    depth_multiple: Positive = 1.0
    width_multiple: Positive = 1.0
    max_channels: Positive = float("inf")
    ch: Any = None  # another name for ``channels``
    channels: Any = None  # see `PixelFormat.checked`
    nc: Any = None  # not used: the data set gives the number of classes
    name: Any = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One row of the graph, with its form checked."""

    label: str  # the model's name, for messages
    section: str  # backbone or head
    index: int  # index in the whole graph
    sources: tuple[int, ...]  # absolute indices, IMAGE for the input
    repeats: int
    module: str
    args: tuple[Any, ...]

    def location(self, field: str) -> str:
        """Names a field of the row, for messages."""
        return f"{self.label}: {self.section} layer {self.index} ({field})"

    def error(self, field: str, message: str) -> UserError:
        """Creates the error for a mistake in a field of the row."""
        return UserError(f"{self.location(field)}: {message}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checked graph with its multiples."""

    label: str
    depth: float
    width: float
    max_channels: float
    deep: bool  # whether every C3k2 is deep
    anchors: list[list[float]] | int | None  # rows in pixels, or the number per cell
    activation: str | None
    reg_max: int
    classes_of_width: int  # number of classes from which the width of class layers follows; 0: the model's
    end2end: bool  # whether the head has a one-to-one branch and needs no NMS
    channels: int  # per image
    layers: tuple[LayerSpec, ...]
    plain: dict[str, Any]  # plain data from which `parse_spec` rebuilds this spec


@lru_cache(maxsize=1)
def _built_in_models() -> dict[str, dict[str, Any]]:
    """Reads the built-in YAMLs, once, by name: family and scale, as in ``yolov8n``, or the file's name if it has no
    scales. Callers must copy them."""
    models = {}
    for path in sorted(MODEL_FOLDER.glob("*.yaml")):
        values = load_yaml(path)
        for scale in values.get("scales") or [""]:
            scale_key = {"scale": scale} if scale else {}
            models[f"{path.stem}{scale}"] = values | scale_key
    return models


def built_in_models() -> list[str]:
    """Returns the names of the built-in models."""
    return list(_built_in_models())


def load_spec(model: str | Path | dict) -> ModelSpec:
    """Loads a model by name (``yolov8n``, ``yolov8n.yaml``), from the path of a YAML (``~`` is the user's home), or
    from a plain ``Detector.spec``.

    Raises UserError for an unknown name (with a suggestion) or a mistake in the YAML (with file, layer and field).
    """
    if isinstance(model, dict):
        return parse_spec(model, str(model.get("name", "model")))
    path = Path(os.path.expanduser(model))
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if is_yaml and path.is_file():
        return _load_file(path)
    name = path.stem if is_yaml else str(model)
    for built_in in (name, re.sub("[-_]", "", name)):  # yolox-s and yolox_s are yoloxs
        if built_in in _built_in_models():
            if is_yaml and path.parent != Path("."):
                log_when_configured(f"{model}: no such file; using the built-in model {built_in}")
            return parse_spec(copy.deepcopy(_built_in_models()[built_in]) | {"name": built_in}, built_in)
    raise _unknown_model(str(model))


def _unknown_model(model: str) -> UserError:
    """Creates the error for a name or path that is not a model, with a suggestion."""
    path = Path(model)
    other_task_message = other_task(model)
    if other_task_message:
        return UserError(other_task_message)
    if path.suffix.lower() in WEIGHTS_SUFFIXES:
        instead = f"--weights {shlex.quote(model)}"
        return UserError(f"--model {model}: is a weights file; to start from it, use {instead}")
    if path.suffix.lower() in (".yaml", ".yml"):
        return UserError(f"{model}: no such file; built-in models have names like yolov8n")
    hint = model_name_hint(model.lower(), built_in_models())
    return UserError(f"--model {model}: unknown model{hint}; known: {', '.join(built_in_models())}, and YAML files")


def model_name_hint(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a misspelled name of a model or its weights; "" if there is none. ``yolov12n`` is of another
    family than ``yolov8n``, not misspelled."""
    known = list(known)
    match = re.fullmatch(r"(.*\d)[a-z]", name)
    rests = [other.removeprefix(match[1]) for other in known if match and other.startswith(match[1])]
    sizes = [rest for rest in rests if rest.isalpha()]  # "yolo1" also begins "yolo11n"
    if match and sizes:
        return f" ({match[1]} has the sizes {', '.join(sizes)})"
    numbers = re.findall(r"\d+", name)
    return suggestion(name, [other for other in known if re.findall(r"\d+", other) == numbers])


def _load_file(path: Path) -> ModelSpec:
    """Loads a model YAML, whose scale may be part of the file's name, as in yolov8s.yaml."""
    values = load_yaml(path)
    if isinstance(values, dict) and isinstance(values.get("scales"), dict) and "scale" not in values:
        match = re.search(r"yolo(?:v?\d+|x)[-_]?([a-z]+)", path.stem.lower())
        name_scale = match.group(1) if match else ""
        if name_scale in values["scales"]:
            values = values | {"scale": name_scale}
    return parse_spec(values, path.name)


def parse_spec(values: Any, label: str) -> ModelSpec:
    """Checks a parsed YAML. Raises UserError beginning with ``label``."""
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if value is not None}
    yaml = build(ModelYaml, values, label)
    channels = PixelFormat.checked(values.get("channels", values.get("ch", 3)), 8, label).channels
    scale, multiples = _scale_and_multiples(yaml, label)
    plain = {key: values[key] for key in PLAIN_KEYS if key in values}
    plain |= {"depth_multiple": multiples.depth, "width_multiple": multiples.width, "name": label}
    if channels != 3:
        plain["channels"] = channels
    if multiples.max_channels != float("inf"):
        plain["max_channels"] = multiples.max_channels
    if scale is not None:
        plain["scale"] = scale
    return ModelSpec(
        label=label,
        depth=multiples.depth,
        width=multiples.width,
        max_channels=multiples.max_channels,
        deep=scale in DEEP_SCALES,
        anchors=None if yaml.anchors is None else checked_anchors(yaml.anchors, f"{label}: anchors"),
        activation=yaml.activation,
        reg_max=yaml.reg_max,
        classes_of_width=yaml.classes_of_width,
        end2end=yaml.end2end,
        channels=channels,
        layers=_parse_layers(yaml, label),
        plain=plain,
    )


class _Multiples(NamedTuple):
    """The changes that a scale makes to the graph."""

    depth: float
    width: float
    max_channels: float


def _scale_and_multiples(yaml: ModelYaml, label: str) -> tuple[str | None, _Multiples]:
    """Returns the chosen scale and its multiples. Without a choice it is the first of ``scales``, with a warning if
    there are several; without ``scales`` the YAML's own multiples count."""
    scale = yaml.scale
    scales = yaml.scales
    if scales is None:
        return scale, _Multiples(yaml.depth_multiple, yaml.width_multiple, yaml.max_channels)
    if not scales:
        raise UserError(f"{label}: scales: must be lines like 'n: [depth, width, max_channels]', got {scales!r}")
    if scale is None:
        scale = next(iter(scales))
        if len(scales) > 1:
            warning = "%s: no scale chosen, building '%s'; choose one with a line 'scale: %s'"
            get_logger().warning(warning, label, scale, "|".join(scales))
    if scale not in scales:
        raise UserError(f"{label}: scale: '{scale}' is not in scales ({', '.join(scales)})")
    multiples = scales[scale]
    if len(multiples) not in (2, 3):
        raise UserError(f"{label}: scales: {scale}: must be [depth, width, max_channels], got {multiples}")
    max_channels = multiples[2] if len(multiples) == 3 else yaml.max_channels
    return scale, _Multiples(multiples[0], multiples[1], max_channels)


def checked_anchors(anchors: Any, location: str) -> list[list[float]] | int:
    """Returns anchors as rows w, h, w, h, ... in pixels, or as the number per cell. Raises UserError beginning with
    ``location``."""
    if not isinstance(anchors, list):
        return check(anchors, Annotated[int, Bounds(1, 1000)], location)
    rows = check(anchors, list[list[Positive]], location)
    lengths = {len(row) for row in rows}
    if len(lengths) != 1 or 0 in lengths or sum(lengths) % 2:
        raise UserError(f"{location}: must be rows [w, h, w, h, ...] of equal length, got {anchors!r}")
    return rows


def _parse_layers(yaml: ModelYaml, label: str) -> tuple[LayerSpec, ...]:
    """Checks the rows of both sections, and numbers them consecutively."""
    layers: list[LayerSpec] = []
    for section, rows in (("backbone", yaml.backbone), ("head", yaml.head)):
        if not rows:
            raise UserError(f"{label}: {section}: must be a list of [from, repeats, module, args] rows")
        for row in rows:
            layers.append(_parse_row(row, label, section, len(layers)))
    return tuple(layers)


def _parse_row(row: Any, label: str, section: str, index: int) -> LayerSpec:
    """Checks row ``index`` of the graph. Raises UserError naming the layer and the field."""
    location = f"{label}: {section} layer {index}"
    if not isinstance(row, list) or len(row) != 4:
        raise UserError(f"{location}: must be [from, repeats, module, args], got {row!r}")
    source, repeats, module, args = row
    sources = check(source if isinstance(source, list) else [source], list[int], f"{location} (from)")
    check(repeats, Annotated[int, Bounds(1)], f"{location} (repeats)")
    check(module, str, f"{location} (module)")
    check(args, list, f"{location} (args)")
    if not sources:
        raise UserError(f"{location} (from): is empty; name at least one layer")
    absolute_sources = tuple(_absolute_source(source, index, location) for source in sources)
    plain_args = tuple(None if arg == "None" else arg for arg in args)  # YAML's null; model YAMLs write None
    return LayerSpec(label, section, index, absolute_sources, repeats, module, plain_args)


def _absolute_source(source: int, index: int, location: str) -> int:
    """Returns the layer that a ``source`` of row ``index`` names; negative ones count back from the row."""
    absolute = index + source if source < 0 else source
    if 0 <= absolute < index or (absolute == IMAGE and index == 0):
        return absolute
    before = f"0 to {index - 1}" if index else "-1, the image"
    raise UserError(f"{location} (from): {source} is not a layer before this one ({before})")
