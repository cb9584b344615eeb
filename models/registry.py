"""Registry of the modules that a model YAML may name, and their construction from rows.

The graph supplies the first arguments of a constructor; the row's args fill the other parameters, which must be
annotated. So one line registers most blocks and heads. `Detect` and the C3k2 blocks also depend on the rest of the
graph.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated

from torch import nn

from models.heads.base import DetectionHead
from models.spec import LayerSpec, ModelSpec, checked_anchors
from utils.errors import UserError, first_line
from utils.schema import Bounds, check, hints_of, suggestion

MAX_REPEATS = 1000  # repeats of a row; more would take hours to build
MAX_LAYERS = 2000  # rows, repeats included; each may have several modules
MAX_CHANNELS = 1 << 16


class ModuleKind(Enum):
    """Parameters that the graph supplies to a constructor, before the row's args."""

    CONVOLUTION = auto()  # (in, out); a repeated row is a sequence of modules
    STACK = auto()  # (in, out, repeats)
    CHANNELWISE = auto()  # none; the number of channels stays the same
    MERGE = auto()  # none; the module takes a list of inputs
    HEAD = auto()  # (channels, strides, number of classes), the first two per level


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """One registered module."""

    path: str  # path of the class, relative to this package, which may be called `models` or `lockstep.models`
    kind: ModuleKind

    @property
    def module(self) -> type[nn.Module]:
        """The class, whose file is imported only when a graph names it."""
        file, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(f"{__package__}.{file}"), name)

    @property
    def takes_list(self) -> bool:
        """True if ``forward`` takes a list of inputs."""
        return self.kind in (ModuleKind.MERGE, ModuleKind.HEAD)


REGISTRY: dict[str, ModuleEntry] = {
    "Conv": ModuleEntry("layers.conv.Conv", ModuleKind.CONVOLUTION),
    "DWConv": ModuleEntry("layers.conv.DWConv", ModuleKind.CONVOLUTION),
    "Bottleneck": ModuleEntry("layers.csp.Bottleneck", ModuleKind.CONVOLUTION),
    "SPP": ModuleEntry("layers.csp.SPP", ModuleKind.CONVOLUTION),
    "SPPF": ModuleEntry("layers.csp.SPPF", ModuleKind.CONVOLUTION),
    "C3": ModuleEntry("layers.csp.C3", ModuleKind.STACK),
    "C3k": ModuleEntry("layers.csp.C3k", ModuleKind.STACK),
    "C2f": ModuleEntry("layers.csp.C2f", ModuleKind.STACK),
    "C3k2": ModuleEntry("layers.csp.C3k2", ModuleKind.STACK),
    "C2PSA": ModuleEntry("layers.csp.C2PSA", ModuleKind.STACK),
    "RepNCSPELAN4": ModuleEntry("layers.gelan.RepNCSPELAN4", ModuleKind.CONVOLUTION),
    "ELAN1": ModuleEntry("layers.gelan.ELAN1", ModuleKind.CONVOLUTION),
    "SPPELAN": ModuleEntry("layers.gelan.SPPELAN", ModuleKind.CONVOLUTION),
    "AConv": ModuleEntry("layers.gelan.AConv", ModuleKind.CONVOLUTION),
    "ADown": ModuleEntry("layers.gelan.ADown", ModuleKind.CONVOLUTION),
    "SeparableConv": ModuleEntry("layers.csp.SeparableConv", ModuleKind.CONVOLUTION),
    "SeparableC3": ModuleEntry("layers.csp.SeparableC3", ModuleKind.STACK),
    "Upsample": ModuleEntry("layers.conv.Upsample", ModuleKind.CHANNELWISE),
    "MaxPool2d": ModuleEntry("layers.conv.MaxPool", ModuleKind.CHANNELWISE),
    "Identity": ModuleEntry("layers.conv.Identity", ModuleKind.CHANNELWISE),
    "Concat": ModuleEntry("layers.conv.Concat", ModuleKind.MERGE),
    "Add": ModuleEntry("layers.conv.Add", ModuleKind.MERGE),
    "Detect": ModuleEntry("heads.anchor_free.AnchorFreeHead", ModuleKind.HEAD),
    "YOLOXDetect": ModuleEntry("heads.yolox.YOLOXHead", ModuleKind.HEAD),
}
ANCHOR_HEAD = ModuleEntry("heads.anchor.AnchorHead", ModuleKind.HEAD)  # `Detect` with anchors

ACTIVATIONS: dict[str, type[nn.Module]] = {
    name: getattr(nn, name)
    for name in ("SiLU", "ReLU", "ReLU6", "LeakyReLU", "Hardswish", "Mish", "GELU", "ELU", "Identity")
}


def find_entry(layer: LayerSpec) -> ModuleEntry:
    """Looks up the module of a row, whose name may begin with ``nn.`` or ``torch.nn.``. Raises UserError for an unknown
    module, and for repeats of one that cannot be repeated."""
    name = re.sub(r"^(torch\.)?nn\.", "", layer.module)
    if name not in REGISTRY:
        known = ", ".join(REGISTRY)
        raise layer.error("module", f"unknown module '{layer.module}'{suggestion(name, REGISTRY)}; known: {known}")
    entry = REGISTRY[name]
    if entry.takes_list and layer.repeats != 1:
        raise layer.error("repeats", f"{layer.module} cannot be repeated, got {layer.repeats}")
    return entry


def make_activation(spec: ModelSpec) -> nn.Module | None:
    """Creates the module of the YAML's ``activation``: a name and at most one number, as in ``nn.LeakyReLU(0.1)``.

    Returns None if the YAML names none. Raises UserError for an unknown activation.
    """
    if spec.activation is None:
        return None
    match = re.fullmatch(r"(?:torch\.)?(?:nn\.)?(\w+)(?:\(\s*(?:[a-z_]+\s*=\s*)?([0-9.eE+-]*)\s*\))?", spec.activation)
    name, number = match.groups() if match else (spec.activation, None)
    if name not in ACTIVATIONS or (number and name not in ("LeakyReLU", "ELU")):
        hint = f"{suggestion(name, ACTIVATIONS)}; known: {', '.join(ACTIVATIONS)}"
        raise UserError(f"{spec.label}: activation: unknown activation '{spec.activation}'{hint}")
    if not number:
        return ACTIVATIONS[name]()
    try:
        return ACTIVATIONS[name](float(number))
    except ValueError:
        raise UserError(f"{spec.label}: activation: '{number}' is not a number") from None


def build_layer(layer: LayerSpec, spec: ModelSpec, channels: tuple[int, ...]) -> nn.Module:
    """Builds the module of a row before the head; ``channels``: those of its sources.

    Raises UserError naming the layer and the field.
    """
    entry = find_entry(layer)
    if entry.kind is ModuleKind.MERGE:
        return _construct(entry.module, (), layer.args, layer)
    if len(channels) != 1:
        raise layer.error("from", f"{layer.module} takes one layer, got {len(channels)}")
    repeats = _scaled_repeats(layer, spec)
    if entry.kind is ModuleKind.CHANNELWISE:
        return _repeat(lambda _: _construct(entry.module, (), layer.args, layer), repeats)
    out = _out_channels(layer, spec)
    args = [tuple(arg) if isinstance(arg, list) else arg for arg in layer.args[1:]]
    if entry.kind is ModuleKind.STACK:
        if entry is REGISTRY["C3k2"] and spec.deep:
            args[:1] = [True]
        return _construct(entry.module, (channels[0], out, repeats), args, layer)
    return _repeat(lambda i: _construct(entry.module, (out if i else channels[0], out), args, layer), repeats)


def check_depth(spec: ModelSpec) -> None:
    """Raises UserError for a graph of too many layers, which would take minutes or hours to build."""
    count = sum(_scaled_repeats(layer, spec) * _repeats_inside(layer) for layer in spec.layers)
    if count > MAX_LAYERS:
        raise UserError(f"{spec.label}: has {count:,} layers, repeats included; at most {MAX_LAYERS:,} are possible")


def _repeats_inside(layer: LayerSpec) -> int:
    """Returns how often the block of a row repeats layers inside it, as its args say (`RepNCSPELAN4`); 1 for other
    rows, and for a number that `build_layer` refuses."""
    entry = find_entry(layer)
    if entry.kind is not ModuleKind.CONVOLUTION:
        return 1
    _, *names = inspect.signature(entry.module).parameters  # the graph supplies the first, the number of input channels
    repeats = dict(zip(names, layer.args)).get("repeats")
    return repeats if type(repeats) is int and repeats > 0 else 1


def _scaled_repeats(layer: LayerSpec, spec: ModelSpec) -> int:
    """Multiplies the row's repeats by the depth multiple. Raises UserError for more than `MAX_REPEATS`."""
    repeats = max(round(layer.repeats * spec.depth), 1) if layer.repeats > 1 else 1
    if repeats > MAX_REPEATS:
        raise layer.error("repeats", f"{layer.repeats} times depth {spec.depth:g} is more than {MAX_REPEATS}")
    return repeats


def build_head(
    layer: LayerSpec, spec: ModelSpec, channels: tuple[int, ...], strides: tuple[int, ...], num_classes: int
) -> DetectionHead:
    """Builds the detection head from ``[nc, *args]``. A parameter called ``width`` is a number of channels and is
    scaled.

    ``Detect`` is one of two heads: ``[nc]`` selects the anchor-free head, ``[nc, anchors]`` the anchor head.
    """
    if not layer.args or not (layer.args[0] == "nc" or type(layer.args[0]) is int):
        raise layer.error("args", f"{layer.module} needs nc first, got {list(layer.args)}")
    entry = find_entry(layer)
    supplied = (channels, strides, num_classes)
    if entry is REGISTRY["Detect"]:
        head = _build_detect(layer, spec, *supplied)
    else:
        names = list(inspect.signature(entry.module).parameters)[len(supplied) :]
        args = list(layer.args[1:])
        for i, (name, arg) in enumerate(zip(names, layer.args[1:])):
            if name == "width" and type(arg) is int:
                args[i] = _scaled_channels(arg, spec, f"{layer.location('args')}: {layer.module}: width")
        head = _construct(entry.module, supplied, args, layer)
    if not isinstance(head, DetectionHead):
        raise TypeError(f"{entry.path} is registered as a head, but is not a DetectionHead")
    if spec.end2end:
        head.add_one_to_one()
    return head


def _build_detect(
    layer: LayerSpec, spec: ModelSpec, channels: tuple[int, ...], strides: tuple[int, ...], num_classes: int
) -> nn.Module:
    """Builds the head of a ``Detect`` row. As in Ultralytics' YOLO11, a graph with C3k2 blocks has depthwise-separable
    class layers."""
    if len(layer.args) > 2:
        raise layer.error("args", f"Detect takes [nc] or [nc, anchors], got {list(layer.args)}")
    if len(layer.args) == 1:
        depthwise = any(find_entry(other) is REGISTRY["C3k2"] for other in spec.layers)
        return REGISTRY["Detect"].module(channels, strides, num_classes, spec.reg_max, depthwise, spec.classes_of_width)
    anchors = spec.anchors
    if layer.args[1] != "anchors":
        anchors = checked_anchors(layer.args[1], f"{layer.location('args')}: anchors")
    if anchors is None:
        raise layer.error("args", "Detect needs anchors, but there is no top-level 'anchors'")
    if isinstance(anchors, list) and len(anchors) != len(channels):
        raise layer.error("args", f"{len(channels)} levels need {len(channels)} rows of anchors, got {len(anchors)}")
    return ANCHOR_HEAD.module(channels, strides, num_classes, anchors)


def _repeat(make: Callable[[int], nn.Module], repeats: int) -> nn.Module:
    """Returns ``make(0)``, or a sequence of ``make(i)`` if there are several repeats."""
    return make(0) if repeats == 1 else nn.Sequential(*(make(i) for i in range(repeats)))


def _out_channels(layer: LayerSpec, spec: ModelSpec) -> int:
    """Returns the row's output channels, see `_scaled_channels`."""
    location = f"{layer.location('args')}: output channels of {layer.module}"
    channels = check(layer.args[0] if layer.args else None, Annotated[int, Bounds(1)], location)
    return _scaled_channels(channels, spec, location)


def _scaled_channels(channels: int, spec: ModelSpec, location: str) -> int:
    """Caps a number of channels, multiplies it by the width multiple and rounds it up to a multiple of 8. Raises
    UserError, which begins with ``location``, for more than `MAX_CHANNELS`."""
    scaled = math.ceil(min(channels, spec.max_channels) * spec.width / 8) * 8
    if scaled > MAX_CHANNELS:
        raise UserError(f"{location}: would be more than {MAX_CHANNELS}")
    return scaled


def _construct(module: type[nn.Module], supplied: tuple, args: Sequence, layer: LayerSpec) -> nn.Module:
    """Calls ``module(*supplied, *args)`` after checking ``args`` against the constructor's annotations."""
    signature = inspect.signature(module)
    hints = hints_of(module.__init__)
    names = list(signature.parameters)[len(supplied) :]
    try:
        signature.bind(*supplied, *args)
    except TypeError as error:
        accepted = f"takes {', '.join(names)}" if names else "takes nothing"
        raise layer.error("args", f"{layer.module} {accepted} here: {error}") from None
    for name, arg in zip(names, args):
        location = f"{layer.location('args')}: {layer.module}: {name}"
        check(arg, hints[name], location)
        if name != "padding" and type(arg) in (int, float) and arg <= 0:
            raise UserError(f"{location}: must be positive, got {arg!r}")
    try:
        return module(*supplied, *args)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise layer.error("args", f"{layer.module} {first_line(error)}") from None
