"""TorchScript files: archives of torch with the metadata in `EXTRA_FILE`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.export.formats import Session, quiet
from engine.export.graphs import ModelGraphs
from engine.export.metadata import ExportMetadata, read_archive_entry
from utils.files.safe_io import write_whole

EXTRA_FILE = "config.txt"  # JSON


def write(graphs: ModelGraphs, path: Path, metadata: ExportMetadata) -> str:
    buffer = io.BytesIO()
    with quiet():
        torch.jit.save(graphs.trace(half=graphs.options.half), buffer, _extra_files=extra_files(metadata))
    write_whole(path, buffer.getvalue())
    return ""


def extra_files(metadata: ExportMetadata) -> dict[str, str]:
    return {EXTRA_FILE: json.dumps(metadata.as_data(), ensure_ascii=False)}


def describe(path: Path) -> Any:
    return read_archive_entry(path, EXTRA_FILE)


def open_file(path: Path, metadata: ExportMetadata, device: torch.device) -> Session:
    with quiet():
        module = torch.jit.load(str(path), map_location=device).eval()
    move_constants(module.graph, device)
    return module_session(module, metadata)


def move_constants(graph: torch._C.Graph, device: torch.device) -> None:
    """Makes a traced ``graph`` create its tensors on ``device``: tracing stored the device of the export as a constant,
    which ``map_location`` does not change (pytorch#31141)."""
    torch._C._jit_pass_inline(graph)
    for node in graph.findAllNodes("prim::Constant", recurse=True):  # type: ignore[attr-defined]  # missing in torch's stubs
        if node.output().type().kind() == "DeviceObjType" and node.hasAttribute("value"):
            node.s_("value", str(device))


def module_session(module: nn.Module, metadata: ExportMetadata) -> Session:
    """Returns the session of a loaded program, whose size only the metadata states."""

    @torch.no_grad()
    def run(images: Tensor) -> Tensor:
        output = module(images.contiguous())
        return (output[0] if isinstance(output, tuple | list) else output).float()

    return Session(run, metadata.input_shape)
