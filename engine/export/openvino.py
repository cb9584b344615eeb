"""Folders with an OpenVINO model: NAME.xml, NAME.bin and metadata.yaml."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.export.formats import Session, checked_shape, log_cpu_only, model_file
from engine.export.graphs import INPUT, OUTPUT, ModelGraphs
from engine.export.int8 import quantize
from engine.export.metadata import ExportMetadata, read_metadata_file, write_metadata_file
from models.postprocess.selection import DEFAULT_CONFIDENCE
from utils.config.export_formats import EXPORT_FORMATS
from utils.machine.packages import require_package

NO_NMS_IOU = 0.99  # for readers that always apply NMS
_LOCK = threading.Lock()  # functools.cache would let two threads create a Core each


def write(graphs: ModelGraphs, path: Path, metadata: ExportMetadata) -> str:
    """Reads the ONNX graph in float32: with ``half``, OpenVINO rounds weights to float16 when it writes the file."""
    openvino = require_package("openvino", "--format openvino", "use another format")
    proto = graphs.float_onnx
    if graphs.options.int8:
        proto = quantize(proto, graphs.calibration(), outputs=False)
    with _LOCK:
        model = _core().read_model(proto.SerializeToString())
    model.inputs[0].set_names({INPUT})
    model.outputs[0].set_names({OUTPUT})
    for key, value in model_info(metadata).items():
        model.set_rt_info(value, ["model_info", key])
    path.mkdir()
    name = path.name.removesuffix(EXPORT_FORMATS["openvino"].suffix)
    openvino.save_model(model, path / f"{name}.xml", compress_to_fp16=graphs.options.half)
    write_metadata_file(path, metadata)
    return ""


def model_info(metadata: ExportMetadata) -> dict[str, str | bool]:
    """Returns the entries that Intel's Model API and DL Streamer read instead of a configuration file. They call the
    layout raw YOLOv8, and end2end YOLOv10. Their NMS does not vote, so that of detect.py is no threshold for it."""
    is_known = metadata.confidence is not None and not metadata.needs_nms
    confidence = metadata.confidence if is_known else DEFAULT_CONFIDENCE
    iou = NO_NMS_IOU if metadata.nms_iou is None else metadata.nms_iou
    return {
        "model_type": "yolo_v10" if metadata.end2end else "YOLOv8",
        "labels": " ".join(name.replace(" ", "_") for name in metadata.names),
        "confidence_threshold": f"{confidence:.4g}",
        "iou_threshold": f"{iou:.4g}",
        "resize_type": "fit_to_window_letterbox",
        "pad_value": str(metadata.preprocessing["pad_value"]),
        "reverse_input_channels": metadata.channels == 3,  # their images are BGR
        "scale_values": metadata.preprocessing["scale"].removeprefix("1/"),
    }


def describe(path: Path) -> Any:
    return read_metadata_file(path)


def open_file(path: Path, metadata: ExportMetadata, device: torch.device) -> Session:
    """``path``: the .xml or the folder that holds it."""
    require_package("openvino", str(path), "use another format")
    log_cpu_only(device, path)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # without it, CPUs with bfloat16 instructions compute in bfloat16
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    with _LOCK:
        core = _core()
    compiled = core.compile_model(core.read_model(model_file(path, ".xml")), "CPU", settings)
    sides = compiled.inputs[0].get_partial_shape() if compiled.inputs else ()
    shape = [side.get_length() if side.is_static else None for side in sides]
    input_shape = checked_shape(compiled.inputs, compiled.outputs, shape)
    per_thread = threading.local()  # an infer request serves one caller at a time

    def run(images: Tensor) -> Tensor:
        if not hasattr(per_thread, "request"):
            per_thread.request = compiled.create_infer_request()
        pixels = images.to("cpu", memory_format=torch.contiguous_format).numpy()
        result = per_thread.request.infer([pixels])[compiled.outputs[0]]
        return torch.from_numpy(result.copy()).float().to(images.device)

    return Session(run, input_shape)


@cache
def _core() -> Any:
    """Returns the only `Core` of this process; the caller holds the lock.

    It is never destroyed: its CPU plugin installs a signal stack in the thread that loads it, and unmaps that stack
    when the plugin is destroyed, in whatever thread. The next signal that Python handles, such as Ctrl-C, would then
    write to memory that is unmapped or used for something else.
    """
    import openvino

    return openvino.Core()
