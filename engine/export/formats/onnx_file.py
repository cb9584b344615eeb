"""ONNX files: the graph by torch's exporter, with metadata that others and this program read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.export.options import ExportOptions
from engine.inference.runtimes.backends import quiet
from engine.inference.runtimes.metadata import ExportMetadata
from utils.errors import UserError
from utils.files.safe_io import write_whole

if TYPE_CHECKING:
    from onnx import ModelProto

INPUT, OUTPUT = "images", "output0"


def dynamic_shapes(stride: int) -> tuple[dict[int, object]]:
    """Any batch, height and width, in whole strides, for `torch.export`."""
    dim = torch.export.Dim
    return ({0: dim("batch"), 2: stride * dim("height"), 3: stride * dim("width")},)


def build_onnx(module: nn.Module, options: ExportOptions, stride: int) -> ModelProto:
    """The graph of a module of `engine.export.layouts`, constants folded. Notes of the exporter, which name files of
    this machine, are removed."""
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            (torch.zeros(options.input_shape),),
            dynamo=True,
            opset_version=options.opset,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=dynamic_shapes(stride) if options.dynamic else None,
            verbose=False,
        )
        proto = program.model_proto
    if (written := proto.opset_import[0].version) != options.opset:
        raise UserError(f"--opset {options.opset}: torch wrote opset {written}; use that, or another")
    for node in proto.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info, *proto.graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
    del proto.graph.metadata_props[:], proto.metadata_props[:]
    proto.graph.doc_string = proto.doc_string = ""
    return proto


def write_onnx(proto: ModelProto, path: Path, metadata: ExportMetadata) -> None:
    """Replaces ``path`` atomically."""
    del proto.metadata_props[:]
    for key, value in metadata.as_text().items():
        proto.metadata_props.add(key=key, value=value)
    proto.producer_name, proto.producer_version = "lockstep", metadata.version
    write_whole(path, proto.SerializeToString())
