"""ONNX files, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.formats.graphs import ModelGraphs
from engine.formats.metadata import ExportMetadata
from engine.formats.model_format import ModelFormat, Session
from engine.formats.runtimes import check_ports, checked_shape, errors_of_runtime, import_onnxruntime, log_cpu_only
from utils.errors import UserError
from utils.files.safe_io import write_whole

if TYPE_CHECKING:
    from onnx import ModelProto

# Releases of ONNX Runtime that read a newer IR version or opset than those before: (release, IR version, opset), tested
# with a model of one operator for each.
ONNX_RUNTIMES = (
    ("1.14", 8, 18),
    ("1.15", 9, 18),
    ("1.16", 9, 19),
    ("1.17", 9, 20),
    ("1.18", 10, 21),
    ("1.21", 10, 22),
    ("1.23", 11, 23),
    ("1.24", 13, 25),
    ("1.25", 13, 26),
    ("1.32", 14, 28),
)


class OnnxFormat(ModelFormat):
    def build(self, graphs: ModelGraphs) -> ModelProto:
        if graphs.options.int8:
            return graphs.int8_onnx(outputs=True)
        return graphs.half_onnx() if graphs.options.half else graphs.float_onnx

    def write(self, graph: ModelProto, path: Path, metadata: ExportMetadata) -> None:
        del graph.metadata_props[:]
        for key, value in metadata.as_strings().items():
            graph.metadata_props.add(key=key, value=value)
        graph.producer_name = "lockstep"
        graph.producer_version = metadata.version
        write_whole(path, graph.SerializeToString())

    def open(self, path: Path, device: torch.device) -> Session:
        """Opens a file, on a GPU if the package onnxruntime-gpu is installed."""
        ort = import_onnxruntime(str(path))
        providers: list[Any] = ["CPUExecutionProvider"]
        if device.type == "cuda" and "CUDAExecutionProvider" in ort.get_available_providers():
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0, "use_tf32": 0}))
        elif device.type != "cpu":
            log_cpu_only(path, device)
        with errors_of_runtime(path):
            session = ort.InferenceSession(str(path), _session_options(ort), providers)
            metadata = dict(session.get_modelmeta().custom_metadata_map)  # text that need not be UTF-8
            runner = _Runner(path, session)
        return Session(runner.run, metadata, runner.input_shape)

    def requirements(self, graph: ModelProto) -> str:
        """Names the versions of the file format and of the operators, and the first ONNX Runtime that reads both."""
        opset = next(entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx"))
        readers = [release for release, ir, newest in ONNX_RUNTIMES if graph.ir_version <= ir and opset <= newest]
        reader = f"a release newer than ONNX Runtime {ONNX_RUNTIMES[-1][0]}"
        if readers:
            reader = f"ONNX Runtime {readers[0]} or newer"
        return f"opset {opset} and IR version {graph.ir_version} need {reader}"


class _Runner:
    """Runs a session of ONNX Runtime on images (B, C, H, W).

    Attributes:
        input_shape: batch, channels, height, width; None: any.
    """

    def __init__(self, path: Path, session: Any) -> None:
        """Raises UserError for a file that does not map float images to one output."""
        inputs = session.get_inputs()
        outputs = session.get_outputs()
        check_ports(path, len(inputs), len(outputs))
        dtype = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}.get(inputs[0].type)
        if dtype is None:
            raise UserError(f"{path}: takes {inputs[0].type}, not float images")
        self._session = session
        self._input_name = inputs[0].name
        self._output_name = outputs[0].name
        self._dtype = dtype
        self.input_shape = checked_shape(path, inputs[0].shape)

    def run(self, images: Tensor) -> Tensor:
        """Returns the output for ``images``, float32, on their device."""
        pixels = images.to("cpu", self._dtype, memory_format=torch.contiguous_format).numpy()
        (output,) = self._session.run([self._output_name], {self._input_name: pixels})
        return torch.from_numpy(output).float().to(images.device)


def _session_options(ort: ModuleType) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal only; errors are raised
    options.intra_op_num_threads = torch.get_num_threads()
    # Spinning threads would take the processor from torch, which prepares images and chooses boxes between runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options
