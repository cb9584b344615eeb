"""TFLite files, which LiteRT (formerly TensorFlow Lite) runs.

They take images float32 (B, H, W, C), as users of this runtime expect, and return boxes as fractions of the canvas. The
metadata is a JSON file in a zip archive that follows the model.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import threading
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.formats.graphs import INPUT, ModelGraphs, example_images
from engine.formats.int8 import RangeObserver
from engine.formats.layouts import ExportModule
from engine.formats.metadata import ExportMetadata, parse_metadata
from engine.formats.model_format import ModelFormat, Session
from engine.formats.processes import run_converter, try_in_process
from engine.formats.runtimes import check_input_size, check_ports, checked_shape, errors_of_runtime, log_cpu_only, quiet
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.machine.packages import require_package

CONVERTER = Path(__file__).with_name("litert_converter.py")
CONVERSION_TIMEOUT_S = 1800.0
METADATA_ENTRY = "metadata.json"
MAX_METADATA_BYTES = 10_000_000
FILE_IDENTIFIER = b"TFL3"  # at byte 4
# Kinds of operators that `engine.formats.int8` uses, by their numbers in the file format.
_KINDS = {3: "Conv", 4: "Conv", 14: "Sigmoid", 18: "Mul"}
# Opens the model of argv and runs it on a gray image, see `try_in_process`.
_TRIAL = """
import sys
import numpy
from ai_edge_litert.interpreter import Interpreter
try:
    interpreter = Interpreter(sys.argv[1], num_threads=1)
    interpreter.allocate_tensors()
    for details in interpreter.get_input_details():
        interpreter.set_tensor(details["index"], numpy.full(details["shape"], 0.5, details["dtype"]))
    interpreter.invoke()
    for details in interpreter.get_output_details():
        interpreter.get_tensor(details["index"])
except Exception as error:
    sys.exit(" ".join(str(error).split()) or type(error).__name__)
"""


class _ChannelsLast(nn.Module):
    """Maps images (B, H, W, C) to the output of an `ExportModule`, with boxes as fractions of the canvas."""

    def __init__(self, module: ExportModule, output: Tensor, canvas_hw: tuple[int, int], *, layout: str) -> None:
        """``output``: an output of ``module``, for its shape."""
        super().__init__()
        self.module = module
        self.register_buffer("scale", 1 / box_scale(output.shape, canvas_hw, has_rows=layout == "end2end"))

    def forward(self, images: Tensor) -> Tensor:
        return self.module(images.permute(0, 3, 1, 2)) * self.scale


@dataclass(frozen=True)
class _Operator:
    """One operator of a file, as `engine.formats.int8.Node`."""

    op_type: str
    input: tuple[str, ...]  # names of tensors
    output: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.output[0]


class LiteRtFormat(ModelFormat):
    """Files of LiteRT, .tflite."""

    def build(self, graphs: ModelGraphs) -> bytes:
        """Returns a file without metadata. Raises UserError for a model that litert-torch cannot convert."""
        options = graphs.options
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "program.pt2")
            model = Path(folder, "model.tflite")
            _write_program(graphs, program)
            _run_step("convert", program, output=model)
            program.unlink()
            rounded = Path(folder, "rounded.tflite")
            if options.half:
                _run_step("round_weights", model, output=rounded)
                return rounded.read_bytes()
            if options.int8:
                ranges = Path(folder, "ranges.json")
                ranges.write_text(json.dumps(_measure_ranges(model.read_bytes(), graphs)), encoding="utf-8")
                _run_step("quantize", model, ranges, output=rounded)
                return rounded.read_bytes()
            return model.read_bytes()

    def write(self, graph: bytes, path: Path, metadata: ExportMetadata) -> None:
        """Writes the model, then the archive: model readers stop before the archive, and archive readers start at the
        end."""
        buffer = io.BytesIO()
        entries = metadata.as_strings() | {"input_layout": "NHWC", "boxes": "fractions of the canvas"}
        with zipfile.ZipFile(buffer, "w") as archive:
            entry = zipfile.ZipInfo(METADATA_ENTRY)  # without a timestamp
            archive.writestr(entry, json.dumps(entries, ensure_ascii=False))
        write_whole(path, graph + buffer.getvalue())

    def open(self, path: Path, device: torch.device) -> Session:
        import_litert(str(path))
        if device.type != "cpu":
            log_cpu_only(path, device)
        with errors_of_runtime(path):
            metadata = read_metadata(path)
        parsed = parse_metadata(metadata)
        try_in_process(path, _TRIAL, (path,), "LiteRT")
        with errors_of_runtime(path):
            interpreter = _open_interpreter(path)
        runner = _Runner(path, interpreter, parsed)
        return Session(runner.run, metadata, runner.input_shape)


class _Runner:
    """Runs an interpreter on images (B, C, H, W), and returns its output with boxes in pixels.

    Attributes:
        input_shape: batch, channels, height, width.
    """

    def __init__(self, path: Path, interpreter: Any, metadata: ExportMetadata) -> None:
        """Raises UserError for a file that does not map float images to a detector's output."""
        with errors_of_runtime(path):
            inputs = interpreter.get_input_details()
            outputs = interpreter.get_output_details()
        check_ports(path, len(inputs), len(outputs))
        self._interpreter = interpreter
        self._input = inputs[0]
        self._output = outputs[0]
        self._lock = threading.Lock()  # an interpreter serves one caller at a time
        self._check_types(path)
        shape = checked_shape(path, self._input["shape"].tolist())
        self._is_channels_last = shape[3] == metadata.channels
        axes = (0, 3, 1, 2) if self._is_channels_last else (0, 1, 2, 3)
        batch, channels, height, width = (shape[axis] for axis in axes)
        if batch is None or channels is None or height is None or width is None:
            raise UserError(f"{path}: its input has no size")
        self.input_shape = (batch, channels, height, width)
        check_input_size(path, self.input_shape)
        output_shape = tuple(self._output["shape"])
        has_rows = metadata.end2end
        if not metadata.is_ours and len(output_shape) == 3:
            has_rows = output_shape[1] > output_shape[2]
        self._scale = box_scale(output_shape, (height, width), has_rows=has_rows)

    def _check_types(self, path: Path) -> None:
        input_dtype = self._input["dtype"]
        output_dtype = self._output["dtype"]
        if input_dtype != np.float32 or output_dtype != np.float32:
            raise UserError(
                f"{path}: takes {np.dtype(input_dtype)} and returns {np.dtype(output_dtype)}, not float images and "
                "boxes; export it without integers at its ends"
            )

    def run(self, images: Tensor) -> Tensor:
        """Returns the output for ``images``, float32 (B, C, H, W), on their device."""
        pixels = images.to("cpu")
        if self._is_channels_last:
            pixels = pixels.permute(0, 2, 3, 1)
        with self._lock:
            self._interpreter.set_tensor(self._input["index"], pixels.contiguous().numpy())
            self._interpreter.invoke()
            output = torch.from_numpy(self._interpreter.get_tensor(self._output["index"]))
        return (output * self._scale).to(images.device)


def box_scale(shape: tuple[int, ...], canvas_hw: tuple[int, int], *, has_rows: bool) -> Tensor:
    """Returns the factors that turn an output of this shape, whose boxes are fractions of the canvas, into pixels.

    ``has_rows``: a row of the output is a box, and the factors are float32 (1, 1, columns); otherwise a column is a
    box, and they are (1, rows, 1). They are 1 for scores and classes, and for an output that is not a detector's.
    """
    if len(shape) != 3:
        return torch.ones(())
    length = shape[2] if has_rows else shape[1]
    scale = torch.ones(length)
    height, width = canvas_hw
    scale[:4] = torch.tensor([width, height, width, height], dtype=torch.float32)[:length]
    return scale[None, None] if has_rows else scale[None, :, None]


def import_litert(user: str) -> ModuleType:
    """Imports the package ai-edge-litert. Raises UserError, naming the flag or file ``user`` that needs it."""
    return require_package("ai_edge_litert", user, "use another format")


def _open_interpreter(model: Path | bytes, **options: Any) -> Any:
    """Opens a file, or the content of one."""
    from ai_edge_litert.interpreter import Interpreter

    source = {"model_content": model} if isinstance(model, bytes) else {"model_path": str(model)}
    interpreter = Interpreter(**source, num_threads=torch.get_num_threads(), **options)
    interpreter.allocate_tensors()
    return interpreter


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the metadata of a file; {} if it has none. Raises UserError for damaged metadata, and for another kind of
    file."""
    content = path.read_bytes()
    if content[4:8] != FILE_IDENTIFIER:
        raise UserError(f"{path}: cannot be opened (it is not a TFLite file)")
    if METADATA_ENTRY.encode() not in content:  # a file of another program
        return {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entry = archive.getinfo(METADATA_ENTRY)
            if entry.file_size > MAX_METADATA_BYTES:
                raise UserError(f"{path}: damaged metadata ({entry.file_size:,} bytes)")
            metadata = json.loads(archive.read(entry))
    except (zipfile.BadZipFile, KeyError, ValueError, RecursionError, NotImplementedError, EOFError, zlib.error):
        raise UserError(f"{path}: damaged metadata ({METADATA_ENTRY} cannot be read)") from None
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: damaged metadata ({METADATA_ENTRY} is not a mapping)")
    return metadata


def _write_program(graphs: ModelGraphs, path: Path) -> None:
    """Writes the program that `convert` of the converter reads."""
    options = graphs.options
    module = graphs.module(half=False)  # with ``half``, the weights are rounded afterwards
    images = example_images(module, options)
    height, width = options.imgsz_hw
    with quiet(), torch.no_grad():
        wrapped = _ChannelsLast(module, module(images), (height, width), layout=options.layout).eval()
        program = torch.export.export(wrapped, (), {INPUT: images.permute(0, 2, 3, 1).contiguous()})
        torch.export.save(program, path)


def _run_step(name: str, *inputs: Path, output: Path) -> None:
    """Runs a function of `litert_converter`. Raises UserError if it fails."""
    run_converter(
        "litert-torch",
        [sys.executable, "-P", CONVERTER, name, *inputs, output],
        output,
        user="--format litert",
        timeout_s=CONVERSION_TIMEOUT_S,
        variables={"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
    )


def _measure_ranges(model: bytes, graphs: ModelGraphs) -> dict[str, Any]:
    """Measures ranges on the calibration images. Returns the JSON content that `quantize` of the converter reads."""
    if graphs.calibration is None:
        raise ValueError("8-bit graphs need calibration images")
    operators, indices = _read_operators(model)
    observer = RangeObserver(operators)
    with quiet():  # this mode warns of the memory that it takes
        interpreter = _open_interpreter(model, experimental_preserve_all_tensors=True)
    (input_index,) = [details["index"] for details in interpreter.get_input_details()]
    for batch in graphs.calibration():
        interpreter.set_tensor(input_index, np.ascontiguousarray(batch.transpose(0, 2, 3, 1)))
        interpreter.invoke()
        for name in observer.names:
            observer.observe(name, interpreter.get_tensor(indices[name]))
    ranges = observer.ranges()
    convolutions = [node.name for node in operators if node.op_type == "Conv" and node.name in ranges]
    return {"ranges": ranges, "convolutions": convolutions}


def _read_operators(model: bytes) -> tuple[list[_Operator], dict[str, int]]:
    """Reads the operators of a file, in their order, and the index of each tensor by its name."""
    from ai_edge_litert import schema_py_generated as schema

    content = schema.ModelT.InitFromPackedBuf(model, 0)
    (graph,) = content.subgraphs
    names = [tensor.name.decode() for tensor in graph.tensors]
    operators = []
    for operator in graph.operators:
        kind = _KINDS.get(content.operatorCodes[operator.opcodeIndex].builtinCode, "")
        inputs = tuple(names[index] for index in operator.inputs if index >= 0)
        outputs = tuple(names[index] for index in operator.outputs)
        operators.append(_Operator(kind, inputs, outputs))
    return operators, {name: index for index, name in enumerate(names)}
