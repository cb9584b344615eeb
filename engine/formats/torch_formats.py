"""Files of torch itself, TorchScript and .pt2 of `torch.export`: archives with the metadata in `EXTRA_FILE`."""

from __future__ import annotations

import fnmatch
import io
import json
import zipfile
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from engine.formats.graphs import ModelGraphs, dynamic_shapes, example_images
from engine.formats.layouts import ExportModule
from engine.formats.metadata import ExportMetadata
from engine.formats.model_format import ModelFormat, Session
from engine.formats.resolved_export import ResolvedExport
from engine.formats.runtimes import errors_of_runtime, quiet
from utils.errors import UserError
from utils.files.safe_io import write_whole

EXTRA_FILE = "config.txt"  # JSON


class _TorchFormat(ModelFormat):
    """An archive that torch reads."""

    program_entry: ClassVar[str]  # pattern of the entry of the archive that holds the program

    def _check_archive(self, path: Path) -> None:
        """Raises UserError unless the file is an archive with a program: torch's messages for other files do not
        help."""
        try:
            with zipfile.ZipFile(path) as archive:
                entries = archive.namelist()
        except zipfile.BadZipFile:
            raise UserError(f"{path}: truncated, or not an archive of torch") from None
        if not fnmatch.filter(entries, self.program_entry):
            checkpoint = "; a checkpoint's name must end with .pt" if fnmatch.filter(entries, "*/data.pkl") else ""
            raise UserError(f"{path}: contains no {path.suffix[1:]} program{checkpoint}")

    @abstractmethod
    def _load(self, path: Path, device: torch.device, extra_files: dict[str, str]) -> nn.Module:
        """Loads a file, and reads the archive entries that are the keys of ``extra_files`` into its values."""

    def open(self, path: Path, device: torch.device) -> Session:
        extra_files = {EXTRA_FILE: ""}
        with errors_of_runtime(path), quiet():
            self._check_archive(path)
            module = self._load(path, device, extra_files)
        try:
            metadata = json.loads(extra_files[EXTRA_FILE] or "{}")
        except (ValueError, RecursionError):
            raise UserError(f"{path}: damaged metadata ({EXTRA_FILE} is not JSON)") from None
        if not isinstance(metadata, dict):
            raise UserError(f"{path}: damaged metadata ({EXTRA_FILE} is not a mapping)")
        return Session(partial(_run, module), metadata, None)


class TorchScriptFormat(_TorchFormat):
    """TorchScript."""

    program_entry = "*/constants.pkl"

    def build(self, graphs: ModelGraphs) -> torch.jit.ScriptModule:
        return trace(graphs.module(half=graphs.options.half), graphs.options)

    def write(self, graph: torch.jit.ScriptModule, path: Path, metadata: ExportMetadata) -> None:
        buffer = io.BytesIO()
        with quiet():
            torch.jit.save(graph, buffer, _extra_files=_extra_files(metadata))
        write_whole(path, buffer.getvalue())

    def _load(self, path: Path, device: torch.device, extra_files: dict[str, str]) -> nn.Module:
        module = torch.jit.load(str(path), map_location=device, _extra_files=extra_files).eval()
        move_constants(module.graph, device)
        return module


class Pt2Format(_TorchFormat):
    """Programs of `torch.export`."""

    program_entry = "*.json"  # in archive/models, or before torch 2.8 at the top

    def build(self, graphs: ModelGraphs) -> ExportedProgram:
        options = graphs.options
        module = graphs.module(half=options.half)
        images = example_images(module, options)
        with quiet(), torch.no_grad():
            program = torch.export.export(module, (images,), dynamic_shapes=dynamic_shapes(module, options))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # names files of this machine
        program.example_inputs = None  # as large as a batch of images
        return program

    def write(self, graph: ExportedProgram, path: Path, metadata: ExportMetadata) -> None:
        buffer = io.BytesIO()
        with quiet():
            torch.export.save(graph, buffer, extra_files=_extra_files(metadata))
        write_whole(path, buffer.getvalue())

    def _load(self, path: Path, device: torch.device, extra_files: dict[str, str]) -> nn.Module:
        program = torch.export.load(str(path), extra_files=extra_files)
        if device.type != "cpu":
            program = move_to_device_pass(program, device)
        return program.module()


def trace(module: ExportModule, options: ResolvedExport) -> torch.jit.ScriptModule:
    """Traces a module to a TorchScript program."""
    with quiet(), torch.no_grad():
        traced = torch.jit.trace(module, example_images(module, options), check_trace=False)
        return torch.jit.freeze(traced)


def move_constants(graph: torch._C.Graph, device: torch.device) -> None:
    """Makes a traced ``graph`` create its tensors on ``device``: tracing stored the device of the export as a constant,
    which ``map_location`` does not change (pytorch#31141)."""
    torch._C._jit_pass_inline(graph)
    for node in graph.findAllNodes("prim::Constant", recurse=True):  # type: ignore[attr-defined]  # missing in torch's stubs
        if node.output().type().kind() == "DeviceObjType" and node.hasAttribute("value"):
            node.s_("value", str(device))


@torch.no_grad()
def _run(module: nn.Module, images: Tensor) -> Tensor:
    """Returns the output of a loaded ``module``, or the first of several, float32."""
    output = module(images.contiguous())
    return (output[0] if isinstance(output, tuple | list) else output).float()


def _extra_files(metadata: ExportMetadata) -> dict[str, str]:
    return {EXTRA_FILE: json.dumps(metadata.as_data(), ensure_ascii=False)}
