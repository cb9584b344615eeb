"""ONNX files, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.export.formats import Session, checked_shape, log_cpu_only
from engine.export.graphs import ModelGraphs
from engine.export.int8 import quantize
from engine.export.metadata import ExportMetadata
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.machine.packages import require_package

if TYPE_CHECKING:
    from onnx import ModelProto

INPUT_TYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}


def write(graphs: ModelGraphs, path: Path, metadata: ExportMetadata) -> str:
    if graphs.options.int8:
        proto = quantize(graphs.float_onnx, graphs.calibration(), outputs=True)
    else:
        proto = graphs.onnx(half=True) if graphs.options.half else graphs.float_onnx
    del proto.metadata_props[:]
    for key, value in metadata.as_strings().items():
        proto.metadata_props.add(key=key, value=value)
    proto.producer_name = "lockstep"
    proto.producer_version = metadata.version
    write_whole(path, proto.SerializeToString())
    return _requirements(proto)


def _requirements(proto: ModelProto) -> str:
    """Names the versions of the operators and of the file format, and what reads both."""
    import onnx

    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    readers = [row[0] for row in onnx.helper.VERSION_TABLE if row[1] >= proto.ir_version and row[2] >= opset]
    return f"opset {opset} and IR version {proto.ir_version} need a runtime of ONNX {readers[0]} or newer"


def describe(path: Path) -> dict[str, str]:
    return dict(_session(path, torch.device("cpu"), optimizes=False).get_modelmeta().custom_metadata_map)


def open_file(path: Path, metadata: ExportMetadata, device: torch.device) -> Session:
    """On a GPU if the package onnxruntime-gpu is installed."""
    session = _session(path, device)
    inputs = session.get_inputs()
    outputs = session.get_outputs()
    shape = checked_shape(inputs, outputs, inputs[0].shape if inputs else ())
    dtype = INPUT_TYPES.get(inputs[0].type)
    if dtype is None:
        raise UserError(f"takes {inputs[0].type}, not float images")

    def run(images: Tensor) -> Tensor:
        pixels = images.to("cpu", dtype, memory_format=torch.contiguous_format).numpy()
        (output,) = session.run([outputs[0].name], {inputs[0].name: pixels})
        return torch.from_numpy(output).float().to(images.device)

    return Session(run, shape)


def _session(path: Path, device: torch.device, *, optimizes: bool = True) -> Any:
    ort = require_package("onnxruntime", str(path), "use the checkpoint")
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal only; errors are raised
    options.intra_op_num_threads = torch.get_num_threads()
    # Spinning threads would take the processor from torch, which prepares images and chooses boxes between runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimizes:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda" and "CUDAExecutionProvider" in ort.get_available_providers():
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0, "use_tf32": 0}))
    else:
        log_cpu_only(device, path)
    return ort.InferenceSession(str(path), options, providers)
