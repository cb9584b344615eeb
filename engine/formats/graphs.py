"""A checkpoint's detector as the graphs from which file formats are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.formats.int8 import activation_ranges, quantize
from engine.formats.layouts import ExportModule, make_layout
from engine.formats.resolved_export import ResolvedExport
from engine.formats.runtimes import quiet
from models.detector import Detector
from utils.errors import UserError

if TYPE_CHECKING:
    from onnx import ModelProto

INPUT, OUTPUT = "images", "output0"


class HasDetector(Protocol):
    """A module around a detector."""

    detector: Detector


@dataclass
class ModelGraphs:
    """Builds the graphs that `ModelFormat.build` starts from, and keeps those that several formats need.

    ``calibration``: returns batches of training images, see `activation_ranges`; only ``options.int8`` needs it.
    """

    detector: Detector  # not fused
    options: ResolvedExport
    calibration: Callable[[], Iterable[np.ndarray]] | None = None

    def module(self, *, half: bool) -> ExportModule:
        """Returns the detector, fused, with one input and one output; with ``half`` its layers compute in float16."""
        options = self.options
        fused = self.detector.fuse(one_to_one=not options.nms)
        return make_layout(fused, options.layout, half=half, nms_iou=options.nms_iou, box_voting=options.box_voting)

    @cached_property
    def float_onnx(self) -> ModelProto:
        return build_onnx(self.module(half=False), self.options)

    def half_onnx(self) -> ModelProto:
        return build_onnx(self.module(half=True), self.options)

    def int8_onnx(self, *, outputs: bool) -> ModelProto:
        """Returns the graph with 8-bit convolutions. ``outputs``: see `quantize`."""
        return quantize(self.float_onnx, self._activation_ranges, outputs=outputs)

    @cached_property
    def _activation_ranges(self) -> dict[str, tuple[float, float]]:
        if self.calibration is None:
            raise ValueError("8-bit graphs need calibration images")
        return activation_ranges(self.float_onnx, self.calibration())


def example_images(module: HasDetector, options: ResolvedExport) -> Tensor:
    """Returns a batch for tracing ``module``."""
    batch = options.batch
    if options.dynamic:
        batch = max(batch, 2)  # torch.export treats a side of one cell, or a batch of one, as a constant
    return torch.zeros(batch, module.detector.channels, *options.imgsz_hw)


def dynamic_shapes(module: ExportModule, options: ResolvedExport) -> tuple[dict[int, object]] | None:
    """Returns shapes for `torch.export` with any batch, height and width in whole strides; None for fixed ones."""
    if not options.dynamic:
        return None
    dim = torch.export.Dim
    stride = module.detector.stride
    return ({0: dim("batch"), 2: stride * dim("height"), 3: stride * dim("width")},)


def build_onnx(module: ExportModule, options: ResolvedExport) -> ModelProto:
    """Builds the ONNX graph of a module. Raises UserError for an opset that torch does not write."""
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            (example_images(module, options),),
            dynamo=True,
            opset_version=options.opset,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=dynamic_shapes(module, options),
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export with dynamo=True returned no program")
    proto = program.model_proto
    written_opset = proto.opset_import[0].version
    if written_opset != options.opset:
        raise UserError(f"--opset {options.opset}: torch wrote opset {written_opset} instead; use that")
    import onnx

    # The exporter writes the newest version of the file format; older runtimes read the one that the operators need.
    proto.ir_version = min(proto.ir_version, onnx.helper.find_min_ir_version_for(proto.opset_import))
    _remove_notes(proto)
    return proto


def _remove_notes(proto: ModelProto) -> None:
    """Removes the exporter's notes, which name files of this machine."""
    graph = proto.graph
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph, proto):
        part.doc_string = ""
        del part.metadata_props[:]
