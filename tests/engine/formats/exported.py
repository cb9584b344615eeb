"""Writes a detector in several formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.formats.graphs import ModelGraphs
from engine.formats.metadata import ExportMetadata
from engine.formats.registry import load_format
from tests.helpers.exports import options
from utils.config.export_formats import EXPORT_FORMATS

NAMES = ("light", "dark's", "grün")
FORMATS = ("a.onnx", "a_openvino_model", "a.torchscript", "a.pt2")


def write_all(folder: Path, detector, files=FORMATS, *, half: bool = False, graph=None, **changes) -> ExportMetadata:
    """Writes ``files``, and returns their metadata.

    Args:
        detector: not fused.
        graph: its ONNX graph in float32, if there is one.
    """
    fused = detector.fuse()
    config = options(nms_iou=fused.nms_iou, half=half, **changes)
    config = replace(config, box_voting=config.layout == "end2end")
    own = {name: getattr(fused, name) for name in ("names", "stride", "nms_iou")}
    chosen = {name: getattr(config, name) for name in ("batch", "dynamic")}
    chosen |= {"is_ours": True, "end2end": config.layout == "end2end"}
    more = {"validation_iou": detector.head.validation_iou, "confidence": 0.3, "details": {"half": half}}
    metadata = ExportMetadata(**own, **chosen, **more, imgsz_hw=config.imgsz_hw)
    graphs = ModelGraphs(detector, config)
    if graph is not None:
        graphs.float_onnx = graph
    for file in files:
        name = next(name for name, entry in EXPORT_FORMATS.items() if file.endswith(entry.suffix))
        model_format = load_format(name)
        model_format.write(model_format.build(graphs), folder / file, metadata)
    return metadata
