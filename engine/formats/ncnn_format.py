"""Folders with an ncnn model: model.ncnn.param, model.ncnn.bin and metadata.yaml.

pnnx converts them from TorchScript. A graph has a fixed size and takes one image at a time.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from engine.formats.graphs import ModelGraphs
from engine.formats.metadata import ExportMetadata, parse_metadata
from engine.formats.model_format import ModelFormat, Session
from engine.formats.processes import run_converter, try_in_process
from engine.formats.runtimes import (
    check_input_size,
    check_ports,
    errors_of_runtime,
    log_cpu_only,
    quiet,
    read_metadata_file,
    write_metadata_file,
)
from engine.formats.torch_formats import trace
from utils.config.export_formats import EXPORT_FORMATS
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.files.temporary_folder import replace_path, temporary_folder
from utils.machine.packages import require_package

PARAM_FILE = "model.ncnn.param"
WEIGHTS_FILE = "model.ncnn.bin"
CONVERSION_TIMEOUT_S = 600.0
DEFAULT_HW = (640, 640)  # canvas of a file that does not state its size
# Opens the model of argv and runs it on a gray image, see `try_in_process`.
_TRIAL = """
import sys
import ncnn
import numpy
param, weights, *shape = sys.argv[1:]
net = ncnn.Net()
net.opt.num_threads = 1
for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
    setattr(net.opt, option, False)
if net.load_param(param) != 0 or net.load_model(weights) != 0:
    sys.exit("it is damaged")
names = net.input_names(), net.output_names()
if (len(names[0]), len(names[1])) == (1, 1):
    extractor = net.create_extractor()
    extractor.input(names[0][0], ncnn.Mat(numpy.full([int(side) for side in shape], 0.5, numpy.float32)))
    status, output = extractor.extract(names[1][0])
    if status != 0 or output.empty():
        sys.exit("it cannot process an image of " + "x".join(shape[1:]) + " pixels")
"""


@dataclass(frozen=True)
class NcnnGraph:
    """The files that pnnx writes for a model."""

    param: bytes  # layers, as text
    weights: bytes


class NcnnFormat(ModelFormat):
    """Files of ncnn."""

    def build(self, graphs: ModelGraphs) -> NcnnGraph:
        """Raises UserError for a model that pnnx cannot convert."""
        pnnx = require_package("pnnx", "--format ncnn", "use another format")
        options = graphs.options
        traced = trace(graphs.module(half=False), options)  # with ``half``, pnnx rounds the weights
        height, width = options.imgsz_hw
        with tempfile.TemporaryDirectory() as folder:
            with quiet():
                torch.jit.save(traced, str(Path(folder, "model.pt")))
            shape = f"inputshape=[1,{graphs.detector.channels},{height},{width}]"
            command = [pnnx.EXEC_PATH, "model.pt", shape, f"fp16={int(options.half)}"]
            param_path = Path(folder, PARAM_FILE)
            run_converter(
                "pnnx", command, param_path, user="--format ncnn", timeout_s=CONVERSION_TIMEOUT_S, folder=Path(folder)
            )
            graph = NcnnGraph(param_path.read_bytes(), Path(folder, WEIGHTS_FILE).read_bytes())
        _check_layers(graph)
        return graph

    def write(self, graph: NcnnGraph, path: Path, metadata: ExportMetadata) -> None:
        with temporary_folder(path) as temporary:
            folder = temporary / "model"
            folder.mkdir()
            write_whole(folder / PARAM_FILE, graph.param)
            write_whole(folder / WEIGHTS_FILE, graph.weights)
            write_metadata_file(folder, metadata)
            replace_path(folder, path)

    def open(self, path: Path, device: torch.device) -> Session:
        """``path``: the .ncnn.param or the folder that holds it."""
        ncnn = require_package("ncnn", str(path), "use another format")
        param, weights = _model_files(path)
        if device.type != "cpu":
            log_cpu_only(path, device)
        metadata = read_metadata_file(param.parent) or {}
        parsed = parse_metadata(metadata)
        channels = parsed.channels
        _, _, height, width = parsed.input_shape
        trial_hw = DEFAULT_HW if height is None or width is None else (height, width)
        check_input_size(path, (1, channels, *trial_hw))
        try_in_process(path, _TRIAL, (param, weights, channels, *trial_hw), "ncnn")
        runner = _Runner(path, ncnn, param=param, weights=weights)
        # A graph has one size, which the trial has used.
        return Session(runner.run, metadata, (1, channels, *trial_hw))


class _Runner:
    """Runs a net of ncnn on one image (1, C, H, W)."""

    def __init__(self, path: Path, ncnn: ModuleType, *, param: Path, weights: Path) -> None:
        """Opens the model with the package ``ncnn``. Raises UserError for files that are damaged, or do not map an
        image to one output."""
        net = ncnn.Net()
        net.opt.num_threads = torch.get_num_threads()
        for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
            setattr(net.opt, option, False)
        with errors_of_runtime(path):
            if net.load_param(str(param)) != 0 or net.load_model(str(weights)) != 0:
                raise UserError(f"{path}: cannot be opened (it is damaged)")
        inputs = net.input_names()
        outputs = net.output_names()
        check_ports(path, len(inputs), len(outputs))
        self._path = path
        self._ncnn = ncnn
        self._net = net
        self._input_name = inputs[0]
        self._output_name = outputs[0]

    def run(self, images: Tensor) -> Tensor:
        """Returns the output for ``images``, float32, on their device."""
        (pixels,) = images.to("cpu", memory_format=torch.contiguous_format).numpy()
        extractor = self._net.create_extractor()
        extractor.input(self._input_name, self._ncnn.Mat(pixels))
        status, output = extractor.extract(self._output_name)
        if status != 0:
            raise UserError(f"{self._path}: ncnn failed with status {status}")
        return torch.from_numpy(np.array(output)[None]).float().to(images.device)


def _model_files(path: Path) -> tuple[Path, Path]:
    """Finds the .param and the .bin file of a model. Raises UserError unless there is one of each."""
    suffix = EXPORT_FORMATS["ncnn"].member
    params = sorted(path.glob(f"*{suffix}")) if path.is_dir() else [path]
    if len(params) != 1:
        raise UserError(f"{path}: holds {len(params)} {suffix} files, not one model")
    param = params[0]
    weights = param.with_suffix(".bin")
    for file in (param, weights):
        if not file.is_file():
            raise UserError(f"{file}: no such file; an ncnn model has a .param and a .bin file")
    return param, weights


def _check_layers(graph: NcnnGraph) -> None:
    """Raises UserError for layers that pnnx could not convert: it writes them under torch's names."""
    layers = re.findall(r"^(\S+) +\S+ +\d+ +\d+ ", graph.param.decode(), re.MULTILINE)
    unknown = sorted({layer for layer in layers if not layer.isidentifier()})
    if unknown:
        raise UserError(f"--format ncnn: ncnn has no layer for {', '.join(unknown)}; use another format")
