"""Programs of `torch.export`, .pt2: archives of torch with the metadata as in TorchScript files."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.export.passes import move_to_device_pass

from engine.export.formats import Session, quiet
from engine.export.graphs import ModelGraphs
from engine.export.metadata import ExportMetadata
from engine.export.torchscript import describe as describe  # the same archive entry
from engine.export.torchscript import extra_files, module_session
from utils.files.safe_io import write_whole


def write(graphs: ModelGraphs, path: Path, metadata: ExportMetadata) -> str:
    module = graphs.module(half=graphs.options.half)
    with quiet(), torch.no_grad():
        program = torch.export.export(module, (graphs.images(),), dynamic_shapes=graphs.dynamic_shapes())
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names files of this machine
    program.example_inputs = None  # as large as a batch of images
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer, extra_files=extra_files(metadata))
    write_whole(path, buffer.getvalue())
    return ""


def open_file(path: Path, metadata: ExportMetadata, device: torch.device) -> Session:
    with quiet():
        program = torch.export.load(str(path))
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        return module_session(program.module(), metadata)
