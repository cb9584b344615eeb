"""Files of torch's own formats: TorchScript and `torch.export` (.pt2)."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from engine.export.formats.onnx_file import dynamic_shapes
from engine.export.options import ExportOptions
from engine.inference.runtimes.backends import EXTRA_FILE, quiet
from engine.inference.runtimes.metadata import ExportMetadata
from utils.files.safe_io import write_whole


def build_torchscript(module: nn.Module, options: ExportOptions) -> torch.jit.ScriptModule:
    """The module, traced and frozen."""
    with quiet(), torch.no_grad():
        traced = torch.jit.trace(module, torch.zeros(options.input_shape), check_trace=False)
        return torch.jit.freeze(traced)


def write_torchscript(module: torch.jit.ScriptModule, path: Path, metadata: ExportMetadata) -> None:
    """Replaces ``path`` atomically."""
    buffer = io.BytesIO()
    with quiet():
        torch.jit.save(module, buffer, _extra_files=_files(metadata))
    write_whole(path, buffer.getvalue())


def build_pt2(module: nn.Module, options: ExportOptions, stride: int) -> ExportedProgram:
    """The module's graph, without the notes that name files of this machine."""
    shapes = dynamic_shapes(stride) if options.dynamic else None
    with quiet(), torch.no_grad():
        program = torch.export.export(module, (torch.zeros(options.input_shape),), dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    program.example_inputs = None  # as large as an image
    return program


def write_pt2(program: ExportedProgram, path: Path, metadata: ExportMetadata) -> None:
    """Replaces ``path`` atomically."""
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer, extra_files=_files(metadata))
    write_whole(path, buffer.getvalue())


def _files(metadata: ExportMetadata) -> dict[str, str]:
    return {EXTRA_FILE: json.dumps(metadata.as_data(), ensure_ascii=False)}
