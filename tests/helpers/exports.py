"""Small detectors whose random weights detect something, to export."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.formats.graphs import build_onnx
from engine.formats.layouts import make_layout
from engine.formats.resolved_export import ResolvedExport
from models.detector import Detector, build_detector
from models.spec import load_spec
from tests.helpers.session import session_file
from tests.helpers.tiny import TINY_MODEL

if TYPE_CHECKING:
    from onnx import ModelProto

FAMILIES = ("yolov5n", "yolov8n", "yolo11n", "yolo26n", "yolov9t", "yoloxnano")


def shallow_spec(family: str) -> dict:
    """Returns the spec of a public model with one repeat of each block."""
    return {**load_spec(family).plain, "depth_multiple": 0.01}


def noise_images() -> torch.Tensor:
    """Returns the images, float32 (8, 3, 64, 96), from which `calibrated_detector` takes batch statistics."""
    return torch.rand(8, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def check_threads_get_the_same_bits(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    """Fails unless threads that share an opened model get the same outputs as a single thread, bit for bit."""
    alone = [model(pixels)[0] for pixels in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: model(inputs[i % len(inputs)])[0], range(24)))
    assert all(torch.equal(output, alone[i % len(inputs)]) for i, output in enumerate(together))


@torch.no_grad()
def calibrated_detector(model: str | dict, names: tuple[str, ...]) -> Detector:
    """Returns a detector whose random weights detect something: its batch norms have the statistics of noise, and its
    class scores are spread around one half."""
    detector = build_detector(model, len(names), names=names).train()
    images = noise_images()
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    detector(images)
    rows = detector.head.class_rows()

    def spread(layer: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor, name: str) -> torch.Tensor:
        layer.weight.div_(output.std() / 1.5)
        groups, before = rows[name]
        assert layer.bias is not None
        layer.bias.view(groups, -1)[:, before:] = 0
        return output

    layers = [(name, layer) for name, layer in detector.head.named_modules() if name in rows]
    hooks = [layer.register_forward_hook(partial(spread, name=name)) for name, layer in layers]
    detector.eval()(images)
    for hook in hooks:
        hook.remove()
    return detector


def options(imgsz_hw: tuple[int, int] = (64, 96), nms_iou: float | None = None, **changes) -> ResolvedExport:
    """Returns the options of a plain export, with ``changes``."""
    plain = ResolvedExport(
        imgsz_hw=imgsz_hw,
        batch=1,
        dynamic=False,
        half=False,
        int8=False,
        layout="raw",
        nms=False,
        nms_iou=nms_iou,
        box_voting=False,
        opset=18,
    )
    return replace(plain, **changes)


def tiny_graph(names: tuple[str, ...], layout: str = "raw", **changes: Any) -> ModelProto:
    """Returns the ONNX graph of a tiny `calibrated_detector`, by default for one image.

    torch's exporter takes seconds per graph, so each graph is created only once per session, whichever of its processes
    asks for it first. ``changes``: see `options`.
    """
    import onnx

    config = options(layout=layout, **changes)

    def write(path: Path) -> None:
        module = make_layout(calibrated_detector(TINY_MODEL, names).fuse(), layout, nms_iou=0.7)
        path.write_bytes(build_onnx(module, config).SerializeToString())

    digest = hashlib.sha256(repr((names, config)).encode()).hexdigest()
    return onnx.load(session_file(f"{digest}.onnx", write))
