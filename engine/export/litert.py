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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.export.formats import Session, checked_shape, log_cpu_only, quiet, run_converter
from engine.export.graphs import INPUT, ModelGraphs, Raw
from engine.export.metadata import ExportMetadata, OutputLayout, read_archive_entry
from utils.errors import UserError
from utils.files.safe_io import write_whole
from utils.machine.packages import require_package

CONVERTER = Path(__file__).with_name("litert_converter.py")
METADATA_ENTRY = "metadata.json"


class _ChannelsLast(nn.Module):
    """Maps images (B, H, W, C) to the output of a layout, with boxes as fractions of the canvas."""

    def __init__(self, module: Raw, images: Tensor, *, end2end: bool) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("scale", 1 / box_scale(module(images).shape, images.shape[2:], has_rows=end2end))

    def forward(self, images: Tensor) -> Tensor:
        return self.module(images.permute(0, 3, 1, 2)) * self.scale


def box_scale(shape: tuple[int, ...], canvas_hw: tuple[int, ...], *, has_rows: bool) -> Tensor:
    """Returns the factors that turn an output of this shape, whose boxes are fractions of the canvas, into pixels; 1
    for scores and classes. ``has_rows``: a row of the output is a box, and not a column."""
    height, width = canvas_hw
    scale = torch.ones(shape[2] if has_rows else shape[1])
    scale[:4] = torch.tensor([width, height, width, height], dtype=torch.float32)
    return scale[None, None] if has_rows else scale[None, :, None]


def write(graphs: ModelGraphs, path: Path, metadata: ExportMetadata) -> str:
    """The archive follows the model: model readers stop before it, and archive readers start at the end."""
    options = graphs.options
    images = graphs.images()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with quiet(), torch.no_grad():
            module = _ChannelsLast(graphs.module(half=False), images, end2end=options.end2end).eval()
            program = torch.export.export(module, (), {INPUT: images.permute(0, 2, 3, 1).contiguous()})
            torch.export.save(program, folder / "program.pt2")
        precision = ["half"] if options.half else []
        if options.int8:
            (folder / "calibration").mkdir()
            for number, batch in enumerate(graphs.calibration()):
                np.save(folder / "calibration" / f"{number:06}.npy", batch.transpose(0, 2, 3, 1))
            precision = ["calibration"]
        command = [sys.executable, "-P", CONVERTER, "program.pt2", "model.tflite", *precision]
        variables = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        run_converter("litert-torch", command, folder / "model.tflite", variables)
        model = (folder / "model.tflite").read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        entries = metadata.as_strings() | {"input_layout": "NHWC", "boxes": "fractions of the canvas"}
        entry = zipfile.ZipInfo(METADATA_ENTRY)  # without a timestamp
        archive.writestr(entry, json.dumps(entries, ensure_ascii=False))
    write_whole(path, model + buffer.getvalue())
    return ""


def describe(path: Path) -> Any:
    return read_archive_entry(path, METADATA_ENTRY)


def open_file(path: Path, metadata: ExportMetadata, device: torch.device) -> Session:
    require_package("ai_edge_litert", str(path), "use another format")
    from ai_edge_litert.interpreter import Interpreter

    log_cpu_only(device, path)
    interpreter = Interpreter(model_path=str(path), num_threads=torch.get_num_threads())
    interpreter.allocate_tensors()
    inputs = interpreter.get_input_details()
    outputs = interpreter.get_output_details()
    shape = checked_shape(inputs, outputs, inputs[0]["shape"].tolist() if inputs else ())
    for details in (*inputs, *outputs):
        if details["dtype"] != np.float32:
            raise UserError(
                f"takes or returns {np.dtype(details['dtype'])}; expected float images and boxes: export it without "
                "integers at its ends"
            )
    is_channels_last = shape[3] == metadata.channels
    batch, channels, height, width = (shape[axis] for axis in ((0, 3, 1, 2) if is_channels_last else (0, 1, 2, 3)))
    if batch is None or height is None or width is None:
        raise UserError("its input has no size; expected one")
    output_shape = tuple(outputs[0]["shape"])
    has_rows = metadata.output_layout(output_shape) is not OutputLayout.COLUMNS
    scale = box_scale(output_shape, (height, width), has_rows=has_rows)
    lock = threading.Lock()  # an interpreter serves one caller at a time

    def run(images: Tensor) -> Tensor:
        pixels = images.to("cpu")
        if is_channels_last:
            pixels = pixels.permute(0, 2, 3, 1)
        with lock:
            interpreter.set_tensor(inputs[0]["index"], pixels.contiguous().numpy())
            interpreter.invoke()
            output = torch.from_numpy(interpreter.get_tensor(outputs[0]["index"]))
        return (output * scale).to(images.device)

    return Session(run, (batch, channels, height, width))
