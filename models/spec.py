"""A model YAML as a checked, plain description of its graph. Nothing is evaluated and no module is built.

The format is the public one: ``backbone`` and ``head`` are lists of ``[from, repeats, module, args]``; ``from`` is a
layer index, negative ones counted back from the row, or a list of such.
"""

from __future__ import annotations

import copy
import re
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.folders import CONFIGS
from utils.files.schema import Bounds, build, check, suggestion
from utils.logger import get_logger, log_when_configured
from utils.pixels import PixelFormat

MODEL_FOLDER = CONFIGS / "models"
DEEP_SCALES = ("m", "l", "x")  # public convention: at these scales every C3k2 is deep
IMAGE = -1  # as a source: the input image

PLAIN_KEYS = ("anchors", "activation", "reg_max", "end2end", "backbone", "head")  # kept as they are
Positive = Annotated[float, Bounds(1e-6, 1e6)]


@dataclass(frozen=True, kw_only=True)
class ModelYaml:
    """The keys of a model YAML."""

    backbone: list
    head: list
    anchors: Any = None  # see `checked_anchors`
    activation: str | None = None
    reg_max: Annotated[int, Bounds(1, 10**6)] = 16
    end2end: bool = False
    scales: dict[str, list[Positive]] | None = None
    scale: str | None = None
    depth_multiple: Positive = 1.0
    width_multiple: Positive = 1.0
    max_channels: Positive = float("inf")
    ch: Any = None  # or ``channels``, see `PixelFormat.checked`
    channels: Any = None
    nc: Any = None  # the data set has its own number of classes
    name: Any = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One row of the graph, its shape checked."""

    label: str  # the model's name, for messages
    section: str  # backbone or head
    index: int  # in the whole graph
    sources: tuple[int, ...]  # absolute, IMAGE for the input
    repeats: int
    module: str
    args: tuple[Any, ...]

    def where(self, field: str) -> str:
        return f"{self.label}: {self.section} layer {self.index} ({field})"

    def error(self, field: str, message: str) -> UserError:
        return UserError(f"{self.where(field)}: {message}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checked graph with its multiples."""

    label: str
    depth: float
    width: float
    max_channels: float
    deep: bool  # every C3k2 deep
    anchors: list[list[float]] | int | None  # rows in pixels, or how many per cell
    activation: str | None
    reg_max: int
    end2end: bool  # whether the head has a one-to-one branch and needs no NMS
    channels: int  # of an image
    layers: tuple[LayerSpec, ...]
    plain: dict[str, Any]  # what rebuilds this spec


@lru_cache(maxsize=1)
def _built_in() -> dict[str, dict[str, Any]]:
    """Parsed YAMLs by name: family and scale, as in ``yolov8n``, or the file's name if it has no scales. They are read
    once, so callers must copy them."""
    found = {}
    for path in sorted(MODEL_FOLDER.glob("*.yaml")):
        values = load_yaml(path)
        for scale in values.get("scales") or [""]:
            chosen = {"scale": scale} if scale else {}
            found[f"{path.stem}{scale}"] = values | chosen
    return found


def known_models() -> list[str]:
    """Names of the built-in models."""
    return list(_built_in())


def load_spec(model: str | Path | dict) -> ModelSpec:
    """A model by name (``yolov8n``, ``yolov8n.yaml``), by the path of a YAML, or from a plain ``Detector.spec``.

    Raises UserError for an unknown name (with a suggestion) or a mistake in the YAML (with file, layer and field).
    """
    if isinstance(model, dict):
        return parse_spec(model, str(model.get("name", "model")))
    path = Path(model)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if is_yaml and path.is_file():
        return _from_file(path)
    name = path.stem if is_yaml else str(model)
    for known in (name, re.sub("[-_]", "", name)):  # yolox-s and yolox_s are yoloxs
        if known in _built_in():
            if is_yaml and path.parent != Path("."):
                log_when_configured(f"{model}: no such file; the built-in model {known} is used")
            return parse_spec(copy.deepcopy(_built_in()[known]) | {"name": known}, known)
    from utils.config.other_programs import other_task  # what other programs would take here
    from utils.config.settings import WEIGHTS_SUFFIXES

    if text := other_task(str(model)):
        raise UserError(text)
    if path.suffix.lower() in WEIGHTS_SUFFIXES:
        instead = f"--weights {shlex.quote(str(model))}"
        raise UserError(f"--model {model}: is a file of weights; to start from it, write {instead}")
    if is_yaml:
        raise UserError(f"{model}: no such file; built-in models are named like yolov8n")
    hint = suggestion(name.lower(), known_models())
    raise UserError(f"--model {model}: unknown model{hint}; known: {', '.join(known_models())}, and YAML files")


def _from_file(path: Path) -> ModelSpec:
    values = load_yaml(path)
    if isinstance(values, dict) and isinstance(values.get("scales"), dict) and "scale" not in values:
        match = re.search(r"yolo(?:v?\d+|x)[-_]?([a-z]+)", path.stem.lower())
        named = match.group(1) if match else ""
        if named in values["scales"]:
            values = values | {"scale": named}
    return parse_spec(values, path.name)


def parse_spec(values: Any, label: str) -> ModelSpec:
    """A parsed YAML, checked. Raises UserError beginning with ``label``."""
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if value is not None}
    yaml = build(ModelYaml, values, label)
    channels = PixelFormat.checked(values.get("channels", values.get("ch", 3)), 8, label).channels
    scale = _scale(yaml, label)
    multiples = (yaml.depth_multiple, yaml.width_multiple, yaml.max_channels)
    if yaml.scales is not None:
        multiples = (*yaml.scales[scale], yaml.max_channels)[:3]
        if len(yaml.scales[scale]) not in (2, 3):
            raise UserError(f"{label}: scales: {scale}: must be [depth, width, max_channels], got {yaml.scales[scale]}")
    depth, width, max_channels = multiples
    plain = {key: values[key] for key in PLAIN_KEYS if key in values}
    plain |= {"depth_multiple": depth, "width_multiple": width, "name": label}
    plain |= {"channels": channels} if channels != 3 else {}
    plain |= {"max_channels": max_channels} if max_channels != float("inf") else {}
    plain |= {"scale": scale} if scale is not None else {}
    layers: list[LayerSpec] = []
    for section, rows in (("backbone", yaml.backbone), ("head", yaml.head)):
        if not rows:
            raise UserError(f"{label}: {section}: must be a list of [from, repeats, module, args] rows")
        for row in rows:
            layers.append(_layer(row, label, section, len(layers)))
    return ModelSpec(
        label=label,
        depth=depth,
        width=width,
        max_channels=max_channels,
        deep=scale in DEEP_SCALES,
        anchors=None if yaml.anchors is None else checked_anchors(yaml.anchors, f"{label}: anchors"),
        activation=yaml.activation,
        reg_max=yaml.reg_max,
        end2end=yaml.end2end,
        channels=channels,
        layers=tuple(layers),
        plain=plain,
    )


def _scale(yaml: ModelYaml, label: str) -> str | None:
    """The chosen scale, or the first one of ``scales``, with a warning if there are several; None without either."""
    scale, scales = yaml.scale, yaml.scales
    if scales is None:
        return scale
    if not scales:
        raise UserError(f"{label}: scales: must be lines like 'n: [depth, width, max_channels]', got {scales!r}")
    if scale is None:
        scale = next(iter(scales))
        if len(scales) > 1:
            note = "%s: no scale chosen, building '%s'; choose one with a line 'scale: %s'"
            get_logger().warning(note, label, scale, "|".join(scales))
    if scale not in scales:
        raise UserError(f"{label}: scale: '{scale}' is not in scales ({', '.join(scales)})")
    return scale


def checked_anchors(anchors: Any, where: str) -> list[list[float]] | int:
    """Rows w, h, w, h, ... in pixels, or the number of anchors per cell. Raises UserError beginning with ``where``."""
    if not isinstance(anchors, list):
        return check(anchors, Annotated[int, Bounds(1, 1000)], where)
    rows = check(anchors, list[list[Positive]], where)
    lengths = {len(row) for row in rows}
    if len(lengths) != 1 or 0 in lengths or sum(lengths) % 2:
        raise UserError(f"{where}: must be rows [w, h, w, h, ...] of one length, got {anchors!r}")
    return rows


def _layer(row: Any, label: str, section: str, index: int) -> LayerSpec:
    where = f"{label}: {section} layer {index}"
    if not isinstance(row, list) or len(row) != 4:
        raise UserError(f"{where}: must be [from, repeats, module, args], got {row!r}")
    source, repeats, module, args = row
    sources = check(source if isinstance(source, list) else [source], list[int], f"{where} (from)")
    check(repeats, Annotated[int, Bounds(1)], f"{where} (repeats)")
    check(module, str, f"{where} (module)")
    check(args, list, f"{where} (args)")
    if not sources:
        raise UserError(f"{where} (from): names no layer")
    absolute = tuple(index + source if source < 0 else source for source in sources)
    for number, source in zip(absolute, sources):
        if not 0 <= number < index and not (number == IMAGE and index == 0):
            before = f"0 to {index - 1}" if index else "-1, the image"
            raise UserError(f"{where} (from): {source} is not a layer before this one ({before})")
    args = tuple(None if arg == "None" else arg for arg in args)  # YAML writes null, model YAMLs write None
    return LayerSpec(label, section, index, absolute, repeats, module, args)
