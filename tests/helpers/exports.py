"""Small detectors whose random weights detect something, to export."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from engine.export.formats import format_module
from engine.export.graphs import ModelGraphs, ResolvedExport
from engine.export.metadata import ExportMetadata
from models.detector import Detector, build_detector
from models.spec import load_spec
from tests.helpers.session import session_file
from tests.helpers.tiny import TINY_MODEL
from utils.config.export_formats import EXPORT_FORMATS

if TYPE_CHECKING:
    from onnx import ModelProto

NAMES = ("light", "dark's", "grün")
FORMATS = ("a.onnx", "a_openvino_model", "a.torchscript", "a.pt2")
PACKAGES = {"a.onnx": "onnxruntime", "a_openvino_model": "openvino", "a_ncnn_model": "pnnx", "a.tflite": "litert_torch"}
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
        end2end=False,
        nms=False,
        nms_iou=nms_iou,
        opset=18,
    )
    return replace(plain, **changes)


def tiny_graph(names: tuple[str, ...], **changes: Any) -> ModelProto:
    """Returns the ONNX graph of a tiny `calibrated_detector`, by default for one image.

    torch's exporter takes seconds per graph, so each graph is created only once per session, whichever of its processes
    asks for it first. Skips the test if a package is missing. ``changes``: see `options`.
    """
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    config = options(nms_iou=0.7, **changes)

    def write(path: Path) -> None:
        path.write_bytes(ModelGraphs(calibrated_detector(TINY_MODEL, names), config).float_onnx.SerializeToString())

    digest = hashlib.sha256(repr((names, config)).encode()).hexdigest()
    return onnx.load(session_file(f"{digest}.onnx", write))


def write_exports(folder: Path, detector: Detector, files: Sequence[str], *, graph=None, **changes) -> ExportMetadata:
    """Writes ``files``, and returns their metadata. Skips the test if a package is missing.

    Args:
        detector: not fused.
        graph: its ONNX graph in float32, if there is one.
    """
    fused = detector.fuse()
    config = options(nms_iou=fused.nms_iou, **changes)
    metadata = ExportMetadata(
        names=fused.names,
        stride=fused.stride,
        imgsz_hw=config.imgsz_hw,
        batch=config.batch,
        dynamic=config.dynamic,
        end2end=config.end2end,
        nms_iou=fused.nms_iou,
        validation_iou=detector.head.validation_iou,
        confidence=0.3,
    )
    graphs = ModelGraphs(detector, config)
    if graph is not None:
        graphs.float_onnx = graph
    for file in files:
        if file in PACKAGES:
            pytest.importorskip(PACKAGES[file])
        name = next(name for name, entry in EXPORT_FORMATS.items() if file.endswith(entry.suffix))
        format_module(name).write(graphs, folder / file, metadata)
    return metadata
