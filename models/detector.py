"""Detector: a graph of layers that ends in a head, built from a spec."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models.heads.base import DetectionHead
from models.layers import conv
from models.registry import ModuleKind, build_head, build_layer, check_depth, find_entry, make_activation
from models.spec import IMAGE, LayerSpec, ModelSpec, load_spec
from utils.errors import UserError, first_line, one_line
from utils.machine.limits import explain_limit
from utils.rng import Stream, keyed_generator
from utils.strings import counted

# Images per forward pass on a CPU, so that activations stay in its cache: yolov8n at 640 px in float32 with one thread
# takes 0.78 s for 16 images in fours, and 0.93 s in one pass.
CPU_CHUNK = 4
PROBE_SIZE = 512  # canvas side from which strides are read; a multiple of any sane stride


class Detector(nn.Module):
    """Runs layers in order, each on the outputs of the layers that it names.

    State-dict keys are ``model.<layer>.…``, as in public checkpoints.
    """

    def __init__(self, layers: list[nn.Module], spec: ModelSpec, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)
        self.spec: dict[str, Any] = spec.plain
        self.names = names
        # The layers' inputs: a tuple of layer numbers where a layer takes a list of tensors, else a single number.
        self._sources: tuple[int | tuple[int, ...], ...] = tuple(
            layer.sources if find_entry(layer).takes_list else layer.sources[0] for layer in spec.layers
        )
        # The next layer takes an output as it comes; only outputs that later layers take must be kept.
        self._kept = frozenset(s for layer in spec.layers for s in layer.sources if s != layer.index - 1)

    @property
    def head(self) -> DetectionHead:
        return cast(DetectionHead, self.model[-1])  # torch's stubs let nn.Sequential hold any module

    @property
    def num_classes(self) -> int:
        return self.head.num_classes

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.spec.get("channels", 3)

    @property
    def strides(self) -> tuple[int, ...]:
        """Canvas pixels per cell, by level."""
        return self.head.strides

    @property
    def stride(self) -> int:
        """Canvas sides must be multiples of this."""
        return max(self.strides)

    @property
    def nms_iou(self) -> float | None:
        """IoU threshold of NMS in validation; None if the detections need no NMS."""
        return None if self.head.is_end_to_end else self.head.validation_iou

    def forward(self, images: Tensor) -> list[Tensor]:
        """Computes the head's raw maps, one (B, channels, H/s, W/s) per level, from images float (B, `channels`, H, W)
        in [0, 1]. With two branches, the one-to-many maps come first."""
        return cast(list[Tensor], self.run_layers(0, len(self.model), images, {}))  # the last layer is the head

    def run_layers(self, start: int, end: int, x: Tensor | None, kept: dict[int, Tensor]) -> Tensor | list[Tensor]:
        """Runs layers ``start``..``end - 1`` and returns the last one's output: a list of raw maps for the head.

        Args:
            start, end: layer numbers.
            x: output of layer ``start - 1``; None if no layer here takes it.
            kept: outputs of earlier layers by number. Outputs that a later layer takes again are added.
        """
        for index, (layer, sources) in islice(enumerate(zip(self.model, self._sources)), start, end):
            if isinstance(sources, int):
                x = layer(x if sources == index - 1 else kept[sources])
            else:
                x = layer([x if source == index - 1 else kept[source] for source in sources])
            if index in self._kept:
                kept[index] = x
        if x is None:
            raise ValueError(f"there are no layers from {start} to {end - 1}")
        return x

    def inputs_from_before(self, start: int) -> list[int]:
        """Lists the layers before ``start`` whose outputs layer ``start`` or later ones take."""
        layers = (sources if isinstance(sources, tuple) else (sources,) for sources in self._sources[start:])
        return sorted({source for sources in layers for source in sources if source < start})

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw maps to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        return self.head.decode(raw)

    def fuse(self, *, one_to_one: bool | None = True) -> Detector:
        """Copies the detector for inference: in eval mode, with batch norms folded into convolutions, each `RepConv`
        merged into one convolution, and in-place activations.

        ``one_to_one``: which branch to keep of a head with two; None keeps both, to compute losses. Detections of the
        one-to-many branch need NMS.
        """
        fused = copy.deepcopy(self).eval()
        if fused.head.is_dual and one_to_one is not None:
            fused.head.keep_branch(one_to_one=one_to_one)
        for module in fused.modules():
            if isinstance(module, conv.Conv) and isinstance(module.bn, conv.BatchNorm2d):
                module.conv = fuse_conv_bn_eval(module.conv, module.bn)
                module.bn = nn.Identity()
        for module in fused.modules():
            if isinstance(module, conv.RepConv):
                module.merge()
            if isinstance(module, conv.Conv | conv.RepConv) and isinstance(module.act, _CanRunInPlace):
                module.act.inplace = True
        return fused.requires_grad_(False)


@runtime_checkable
class _CanRunInPlace(Protocol):
    """Activation with the option to overwrite its input, such as `nn.SiLU`."""

    inplace: bool


def build_detector(
    model: str | Path | dict,
    num_classes: int,
    *,
    names: Sequence[str] | None = None,
    seed: int = 0,
    channels: int | None = None,
) -> Detector:
    """Builds a freshly initialized float32 detector on the CPU, in training mode.

    The weights depend only on the model, the number of classes and ``seed``.

    Args:
        model: a built-in name such as ``yolov8n``, the path of a model YAML, or a `Detector.spec`.
        num_classes: C; the YAML's ``nc`` is not used.
        names: names of the C classes; None: their numbers.
        seed: seed of the weights.
        channels: channels of an image; None: the model's. A model for RGB images takes any number.

    Raises UserError for an unknown model, a mistake in a YAML, a model that is for images of other channels, or one
    that does not fit in memory.
    """
    detector = build_meta_detector(model, num_classes, names=names, channels=channels)
    try:
        storage = _storage(detector)
    except RuntimeError as error:
        if not explain_limit(error):
            raise
        raise UserError(f"{detector.spec['name']}: has more weights than this machine has memory") from None
    detector.load_state_dict(storage, assign=True)  # not to_empty, whose meta kernels take 0.4 s to import
    _initialize(detector, seed)
    return detector


def build_meta_detector(
    model: str | Path | dict, num_classes: int, *, names: Sequence[str] | None = None, channels: int | None = None
) -> Detector:
    """Builds a detector without storage, on the meta device: layers, shapes and strides. The arguments and errors are
    those of `build_detector`."""
    if num_classes < 1:
        raise UserError(f"a detector needs at least one class, got {num_classes}")
    if names is not None and len(names) != num_classes:
        raise UserError(f"{counted(len(names), 'class name')} for {counted(num_classes, 'class')}")
    spec = load_spec(model)
    if channels not in (None, spec.channels):
        if spec.channels != 3:
            expected = f"takes images of {counted(spec.channels, 'channel')}"
            raise UserError(f"{spec.label}: {expected}, those of the data set have {channels}; choose another model")
        spec = replace(spec, channels=channels, plain=spec.plain | {"channels": channels})
    return build_on_meta(spec, num_classes, names)


def build_on_meta(spec: ModelSpec, num_classes: int, names: Sequence[str] | None = None) -> Detector:
    """Builds a detector without storage, for its shapes, in some 50 ms. Raises UserError for layers that do not fit
    together."""
    _check_head(spec)
    check_depth(spec)
    activation = make_activation(spec)
    layers: list[nn.Module] = []
    with torch.device("meta"), torch.no_grad():
        outputs: dict[int, Tensor] = {IMAGE: torch.empty(0, spec.channels, PROBE_SIZE, PROBE_SIZE, device="cpu")}
        for layer in spec.layers[:-1]:
            inputs = [outputs[source] for source in layer.sources]
            module = build_layer(layer, spec, tuple(x.shape[1] for x in inputs)).train(False)
            if activation is not None:
                _set_activation(module, activation)
            outputs[layer.index] = _probe(layer, module, inputs)
            layers.append(module)
        levels = [outputs[source] for source in spec.layers[-1].sources]
        strides = tuple(_stride(spec.layers[-1], level) for level in levels)
        channels = tuple(level.shape[1] for level in levels)
        head = build_head(spec.layers[-1], spec, channels, strides, num_classes)
        if activation is not None:
            _set_activation(head, activation)
    class_names = range(num_classes) if names is None else names
    return Detector([*layers, head], spec, tuple(one_line(str(name)) for name in class_names)).train()


def _check_head(spec: ModelSpec) -> None:
    """Raises UserError unless the last layer is a head, and the only one."""
    heads = [layer for layer in spec.layers if find_entry(layer).kind is ModuleKind.HEAD]
    if not heads:
        raise UserError(f"{spec.label}: head: the last layer must be a detection head, such as Detect")
    if heads[0] is not spec.layers[-1]:
        raise heads[0].error("module", f"{heads[0].module} must be the last layer, and the only head")


def _set_activation(module: nn.Module, activation: nn.Module) -> None:
    """Replaces the activations of all convolutions in ``module`` that have one."""
    for child in module.modules():
        if isinstance(child, conv.Conv | conv.RepConv) and not isinstance(child.act, nn.Identity):
            child.act = copy.deepcopy(activation)


def _storage(module: nn.Module) -> dict[str, Tensor]:
    """Allocates CPU memory for each parameter and buffer of a module on the meta device."""
    return {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in module.state_dict().items()}


def _probe(layer: LayerSpec, module: nn.Module, inputs: list[Tensor]) -> Tensor:
    """Computes the layer's output for an empty batch. Raises UserError if the inputs do not fit together.

    It runs on the CPU: importing the meta device's kernels, some of which are written in Python, takes a second.
    """
    takes_list = find_entry(layer).takes_list
    if takes_list:
        _check_equal(layer, inputs, whole_shape=isinstance(module, conv.Add))
    try:
        return functional_call(module, _storage(module), (inputs if takes_list else inputs[0],))
    except (RuntimeError, ValueError) as error:
        if explain_limit(error):
            raise layer.error("args", f"{layer.module} has more weights than this machine has memory") from None
        raise layer.error("args", f"{layer.module} does not fit its input: {first_line(error)}") from None


def _check_equal(layer: LayerSpec, inputs: list[Tensor], *, whole_shape: bool) -> None:
    """Raises UserError unless all inputs have the same height and width and, with ``whole_shape``, channels."""
    first_dim = 1 if whole_shape else 2
    if len({x.shape[first_dim:] for x in inputs}) == 1:
        return
    sizes = [f"{x.shape[1]} channels, 1/{PROBE_SIZE / x.shape[2]:g} size" for x in inputs]
    shapes = ", ".join(f"layer {source}: {size}" for source, size in zip(layer.sources, sizes))
    equal = "shape" if whole_shape else "size"
    raise layer.error("from", f"{layer.module} needs inputs of equal {equal}, got {shapes}")


def _stride(layer: LayerSpec, level: Tensor) -> int:
    """Returns the pixels per cell of a level. Raises UserError unless the number is whole and both sides have it."""
    stride = PROBE_SIZE // max(level.shape[2], 1)
    if level.shape[2] * stride != PROBE_SIZE or level.shape[2] != level.shape[3]:
        grid = f"{level.shape[2]}x{level.shape[3]}"
        image = f"{PROBE_SIZE}x{PROBE_SIZE}"
        raise layer.error(
            "from", f"a level has {grid} cells for an image of {image} pixels, which is not a whole stride"
        )
    return stride


@torch.no_grad()
def _initialize(detector: Detector, seed: int) -> None:
    """Initializes convolutions by fan-in, uniformly (He et al. 2015, a = sqrt 5), batch norms as the identity, and the
    head's biases with priors."""
    generator = torch.Generator().manual_seed(int(keyed_generator(seed, Stream.INIT).integers(2**63)))
    for module in detector.modules():
        if isinstance(module, nn.Conv2d):
            bound = (module.weight[0].numel()) ** -0.5
            module.weight.uniform_(-bound, bound, generator=generator)
            if module.bias is not None:
                module.bias.uniform_(-bound, bound, generator=generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif module is not detector and any(True for _ in module.parameters(recurse=False)):
            raise TypeError(f"no initialization for {type(module).__name__}")
    detector.head.reset_parameters()
