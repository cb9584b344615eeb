"""Detectors in the layouts of public files: YOLOX's, the MIT-licensed YOLOv9's, and pickled modules."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.detector import Detector
from models.weights.layouts import LAYERS, STEM


def in_yolox_names(detector: Detector) -> dict[str, Tensor]:
    """Returns the detector's tensors under YOLOX's names, except for the first kernel, which is unchanged."""
    prefixes = {f"model.{index}.": prefix for prefix, index in LAYERS.items()}
    renamed = {}
    for name, tensor in detector.state_dict().items():
        layer = ".".join(name.split(".")[:2]) + "."
        renamed[prefixes[layer] + name.removeprefix(layer).replace("cv", "conv")] = tensor
    return renamed


def grouped(kernel: Tensor, groups: int) -> Tensor:
    """Returns the diagonal blocks of a full kernel."""
    out, width = kernel.shape[:2]
    blocks = kernel.view(groups, out // groups, groups, width // groups, *kernel.shape[2:])
    return torch.cat([blocks[g, :, g] for g in range(groups)])


def in_mit_names(detector: Detector) -> dict[str, Tensor]:
    """Returns the detector's tensors under the MIT-licensed names, written out by hand, with its box layers in four
    groups."""
    state = {}
    for name, tensor in detector.state_dict().items():
        match = re.fullmatch(r"model\.(\d+)\.(.+)", name)
        assert match is not None
        layer, rest = match.groups()
        module = type(detector.model[int(layer)]).__name__
        if module == "AnchorFreeHead":
            rest = re.sub(r"^cv2\.(\d)", r"heads.\1.anchor_conv", rest)
            rest = re.sub(r"^cv3\.(\d)", r"heads.\1.class_conv", rest)
            if re.search(r"anchor_conv\.(1\.conv|2)\.weight", rest):
                tensor = grouped(tensor, 4)
        elif module == "AConv":
            rest = rest.replace("cv1", "conv")
        rest = re.sub(r"\bm\.(\d)", r"bottleneck.\1", re.sub(r"\bcv(\d)", r"conv\1", rest))
        if not rest.startswith("dfl"):
            state[f"{layer}.{rest}"] = tensor
    head = len(detector.model) - 1
    state |= {f"{head}.heads.{i}.anc2vec.anc2vec.weight": torch.arange(16.0).view(1, 16, 1, 1, 1) for i in range(3)}
    state |= {f"{head + 8}.conv1.conv.weight": torch.zeros(4, 4, 1, 1)}
    return state | {f"{head + 16}.heads.0.anchor_conv.0.conv.weight": torch.zeros(8, 4, 3, 3)}


def write_public(detector: Detector, folder: Path) -> Path:
    """Writes a file in the layout of the family's public ones."""
    if detector.spec["name"].startswith("yolox"):
        state = in_yolox_names(detector)
        kernel = state[f"{STEM}conv.weight"].flip(1) / 255
        corners = [kernel[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        state[f"{STEM}conv.weight"] = torch.cat(corners, 1)
        path = folder / "yolox.pth"
        content: Mapping[str, object] = {"start_epoch": 300, "model": state, "optimizer": {"state": {}}}
    else:
        path = folder / "v9.pt"
        content = in_mit_names(detector)
    torch.save(content, path)
    return path


def save_module(path: Path, layers: nn.Module, beside: dict | None = None, **attributes: object) -> Path:
    """Writes a checkpoint that pickles a module of a package that is not installed when it is read."""
    package: Any = types.ModuleType("vanished")
    package.Model = type("Model", (nn.Module,), {"__module__": "vanished"})
    sys.modules["vanished"] = package
    try:
        model = package.Model()
        model.model = layers
        model.__dict__.update(attributes)
        torch.save({"model": model, **(beside or {})}, path)
    finally:
        del sys.modules["vanished"]
    return path
