"""Folders with an ncnn model: model.ncnn.param, model.ncnn.bin and metadata.yaml.

pnnx converts them from TorchScript. A graph has a fixed size and takes one image at a time.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.export.formats import Session, checked_shape, log_cpu_only, model_file, quiet, run_converter
from engine.export.graphs import ModelGraphs
from engine.export.metadata import DEFAULT_HW, ExportMetadata, read_metadata_file, write_metadata_file
from utils.config.export_formats import EXPORT_FORMATS
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.machine.packages import require_package

PARAM_FILE = "model.ncnn.param"  # layers, as text
WEIGHTS_FILE = "model.ncnn.bin"


def write(graphs: ModelGraphs, path: Path, metadata: ExportMetadata) -> str:
    pnnx = require_package("pnnx", "--format ncnn", "use another format")
    height, width = graphs.options.imgsz_hw
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with quiet():
            torch.jit.save(graphs.trace(half=False), folder / "model.pt")  # with ``half``, pnnx rounds the weights
        shape = f"inputshape=[1,{graphs.detector.channels},{height},{width}]"
        command = [pnnx.EXEC_PATH, "model.pt", shape, f"fp16={int(graphs.options.half)}"]
        run_converter("pnnx", command, folder / PARAM_FILE)
        param = (folder / PARAM_FILE).read_bytes()
        weights = (folder / WEIGHTS_FILE).read_bytes()
    layers = re.findall(r"^(\S+) +\S+ +\d+ +\d+ ", param.decode(), re.MULTILINE)
    unknown = sorted({layer for layer in layers if not layer.isidentifier()})  # left under torch's names
    if unknown:
        raise UserError(f"--format ncnn: ncnn has no layer for {', '.join(unknown)}; use another format")
    path.mkdir()
    write_whole(path / PARAM_FILE, param)
    write_whole(path / WEIGHTS_FILE, weights)
    write_metadata_file(path, metadata)
    return ""


def describe(path: Path) -> Any:
    return read_metadata_file(path)


def open_file(path: Path, metadata: ExportMetadata, device: torch.device) -> Session:
    """``path``: the .ncnn.param or the folder that holds it."""
    ncnn = require_package("ncnn", str(path), "use another format")
    log_cpu_only(device, path)
    param = model_file(path, EXPORT_FORMATS["ncnn"].member)
    net = ncnn.Net()
    net.opt.num_threads = torch.get_num_threads()
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, option, False)
    if net.load_param(str(param)) != 0 or net.load_model(str(param.with_suffix(".bin"))) != 0:
        raise UserError("cannot be opened (it is damaged)")
    inputs = net.input_names()
    outputs = net.output_names()
    shape = (1, metadata.channels, *(metadata.imgsz_hw or DEFAULT_HW))
    checked_shape(inputs, outputs, shape)

    def run(images: Tensor) -> Tensor:
        (pixels,) = images.to("cpu", memory_format=torch.contiguous_format).numpy()
        extractor = net.create_extractor()
        extractor.input(inputs[0], ncnn.Mat(pixels))
        status, output = extractor.extract(outputs[0])
        if status != 0:
            raise UserError(f"{path}: ncnn failed with status {status}")
        return torch.from_numpy(np.array(output)[None]).float().to(images.device)

    return Session(run, shape)
