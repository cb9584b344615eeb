"""Opens exported files with their runtimes: ONNX Runtime, OpenVINO, TorchScript and torch.export.

Each function returns a `Session`. Sessions compute in float32 where the file does not say otherwise, on as many threads
as torch, so that results can be compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.packages import require_package

EXTRA_FILE = "config.txt"  # in TorchScript and pt2 archives: the metadata, as JSON
_OPENVINO_LOCK = threading.Lock()  # functools.cache would let two threads create a Core each


@dataclass(frozen=True)
class Session:
    """An exported file, opened by its runtime."""

    format: str
    run: Callable[[Tensor], Tensor]  # float32 (B, C, H, W) to the output, on the same device; thread-safe
    metadata: dict[str, Any]  # text by key; plain data if it was read from a YAML
    input_shape: tuple[int | None, ...] | None  # B, C, H, W; None: any; torch's formats leave it to the metadata


def open_onnx(path: Path, device: torch.device) -> Session:
    """An ONNX file in ONNX Runtime; on a GPU if the package onnxruntime-gpu is installed."""
    ort = import_onnxruntime(str(path))
    options = ort.SessionOptions()
    options.log_severity_level = 4  # not errors, which are raised
    options.intra_op_num_threads = torch.get_num_threads()
    # Spinning threads would take the processor from torch, which prepares images and chooses boxes between the runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda" and "CUDAExecutionProvider" in ort.get_available_providers():
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0, "use_tf32": 0}))
    elif device.type != "cpu":
        _log_cpu(path, device)
    with _reading(path):
        session = ort.InferenceSession(str(path), options, providers)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        metadata = dict(session.get_modelmeta().custom_metadata_map)  # text that need not be UTF-8
    _check_ports(path, len(inputs), len(outputs))
    dtype = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}.get(inputs[0].type)
    if dtype is None:
        raise UserError(f"{path}: takes {inputs[0].type}, not float images")

    def run(images: Tensor) -> Tensor:
        pixels = images.to("cpu", dtype, memory_format=torch.contiguous_format).numpy()
        (output,) = session.run([outputs[0].name], {inputs[0].name: pixels})
        return torch.from_numpy(output).float().to(images.device)

    return Session("onnx", run, metadata, _sides(path, inputs[0].shape))


@contextlib.contextmanager
def quiet(*others: str) -> Iterator[None]:
    """Suppresses warnings, and the notes and tracebacks of exporters and readers. ``others``: more names of loggers, ""
    that of the root."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "onnx", *others)
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def import_onnxruntime(what: str) -> ModuleType:
    """The package onnxruntime. Raises UserError naming ``what`` needs it."""
    return require_package("onnxruntime", what, "use the checkpoint")


def import_openvino(what: str) -> ModuleType:
    """The package openvino. Raises UserError naming ``what`` needs it."""
    return require_package("openvino", what, "use another format")


def openvino_core(what: str) -> Any:
    """OpenVINO's `Core`, the only one of this process. Raises UserError naming ``what`` needs the package.

    It is never destroyed: its CPU plugin installs a signal stack in the thread that loads it, and unmaps that stack
    when the plugin is destroyed, in whichever thread. The next signal that Python handles, such as Ctrl-C, would then
    write to memory that is unmapped or serves something else.
    """
    with _OPENVINO_LOCK:
        return _core_of(import_openvino(what))


@cache
def _core_of(openvino: ModuleType) -> Any:
    return openvino.Core()


def open_openvino(path: Path, device: torch.device) -> Session:
    """An OpenVINO model, .xml or the folder that holds it, on the CPU."""
    found = sorted(path.glob("*.xml")) if path.is_dir() else [path]
    if len(found) != 1:
        raise UserError(f"{path}: holds {len(found)} .xml files, not one model")
    (xml,) = found
    core = openvino_core(str(path))
    if device.type != "cpu":
        _log_cpu(path, device)
    # Without the hint, CPUs with bfloat16 instructions compute in bfloat16.
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    settings["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
    with _reading(path):
        model = core.read_model(xml)
        compiled = core.compile_model(model, "CPU", settings)
    _check_ports(path, len(compiled.inputs), len(compiled.outputs))
    requests = threading.local()  # an infer request serves one caller at a time

    def run(images: Tensor) -> Tensor:
        if not hasattr(requests, "own"):
            requests.own = compiled.create_infer_request()
        pixels = images.to("cpu", memory_format=torch.contiguous_format).numpy()
        result = requests.own.infer([pixels])[compiled.outputs[0]]
        return torch.from_numpy(result.copy()).float().to(images.device)

    if (file := xml.with_name("metadata.yaml")).is_file():
        metadata = load_yaml(file)
    else:  # by Intel's own tools
        try:
            metadata = {"names": model.get_rt_info(["model_info", "labels"]).astype(str).split()}
        except (RuntimeError, KeyError):
            metadata = {}
    shape = [side.get_length() if side.is_static else None for side in compiled.inputs[0].get_partial_shape()]
    return Session("openvino", run, metadata if isinstance(metadata, dict) else {}, _sides(path, shape))


def open_torchscript(path: Path, device: torch.device) -> Session:
    def load(files: dict[str, str]) -> torch.nn.Module:
        module = torch.jit.load(str(path), map_location=device, _extra_files=files).eval()
        move_constants(module.graph, device)
        return module

    return _torch_session("torchscript", path, load)


def move_constants(graph: torch._C.Graph, device: torch.device) -> None:
    """Puts the tensors that a traced ``graph`` makes on ``device``: tracing wrote the device of the export into it as
    text, which ``map_location`` leaves alone (pytorch#31141)."""
    torch._C._jit_pass_inline(graph)
    for node in graph.findAllNodes("prim::Constant", recurse=True):
        if node.output().type().kind() == "DeviceObjType" and node.hasAttribute("value"):
            node.s_("value", str(device))


def open_pt2(path: Path, device: torch.device) -> Session:
    def load(files: dict[str, str]) -> torch.nn.Module:
        program = torch.export.load(str(path), extra_files=files)
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return program.module()

    return _torch_session("pt2", path, load)


def _torch_session(form: str, path: Path, load: Callable[[dict[str, str]], torch.nn.Module]) -> Session:
    """``load`` opens the file and fills in the texts of the archive's files that it is given."""
    files = {EXTRA_FILE: ""}
    with _reading(path), quiet():
        module = load(files)
    try:
        metadata = json.loads(files[EXTRA_FILE] or "{}")
    except (ValueError, RecursionError):
        raise UserError(f"{path}: damaged metadata ({EXTRA_FILE} is not JSON)") from None

    def run(images: Tensor) -> Tensor:
        with torch.no_grad():
            output = module(images.contiguous())
        return (output[0] if isinstance(output, tuple | list) else output).float()

    return Session(form, run, metadata if isinstance(metadata, dict) else {}, None)


def _check_ports(path: Path, inputs: int, outputs: int) -> None:
    if (inputs, outputs) != (1, 1):
        raise UserError(f"{path}: has {inputs} inputs and {outputs} outputs; a detector has one of each")


def _sides(path: Path, shape: list[Any]) -> tuple[int | None, ...]:
    """An input shape with None for what varies: dimensions that a runtime names or does not know."""
    if len(shape) != 4:
        raise UserError(f"{path}: its input has {len(shape)} dimensions; images have 4")
    return tuple(side if isinstance(side, int) and side > 0 else None for side in shape)


def _log_cpu(path: Path, device: torch.device) -> None:
    get_logger().info("%s: its runtime has no support for %s here and computes on the CPU", path, device)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns any error of a runtime that reads ``path`` into UserError: each has exception types of its own."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot be opened ({reason[:300]})") from None
