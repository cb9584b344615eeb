"""Folders with an OpenVINO model: NAME.xml, NAME.bin and metadata.yaml."""

from __future__ import annotations

import errno
import threading
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.formats.graphs import INPUT, OUTPUT, ModelGraphs
from engine.formats.metadata import ExportMetadata, preprocessing
from engine.formats.model_format import ModelFormat, Session
from engine.formats.runtimes import (
    check_ports,
    checked_shape,
    errors_of_runtime,
    log_cpu_only,
    read_metadata_file,
    write_metadata_file,
)
from models.postprocess.selection import DEFAULT_CONFIDENCE
from utils.config.export_formats import EXPORT_FORMATS
from utils.errors import UserError
from utils.files.temporary_folder import replace_path, temporary_folder
from utils.machine.packages import require_package
from utils.pixels import PixelFormat

if TYPE_CHECKING:
    from openvino import Model

NO_NMS_IOU = 0.99  # for readers that always apply NMS
_CORE_LOCK = threading.Lock()  # functools.cache would let two threads create a Core each


class OpenVinoFormat(ModelFormat):
    def build(self, graphs: ModelGraphs) -> Model:
        """Reads the ONNX graph in float32, because OpenVINO rounds weights to float16 when it writes the file."""
        onnx_graph = graphs.int8_onnx(outputs=False) if graphs.options.int8 else graphs.float_onnx
        model = openvino_core("--format openvino").read_model(onnx_graph.SerializeToString())
        model.inputs[0].set_names({INPUT})
        model.outputs[0].set_names({OUTPUT})
        return model

    def write(self, graph: Model, path: Path, metadata: ExportMetadata) -> None:
        """Stores the weights as float16 if ``metadata.details`` has "half"."""
        openvino = import_openvino("--format openvino")
        for key, value in model_info(metadata).items():
            graph.set_rt_info(value, ["model_info", key])
        with temporary_folder(path) as temporary:
            folder = temporary / "model"
            folder.mkdir()
            xml = folder / f"{path.name.removesuffix(EXPORT_FORMATS['openvino'].suffix)}.xml"
            try:
                openvino.save_model(graph, xml, compress_to_fp16=bool(metadata.details.get("half")))
            except RuntimeError as error:  # raised by a C++ stream, which gives no reason
                raise OSError(errno.EIO, f"{error}; is the disk full?", str(path)) from None
            write_metadata_file(folder, metadata)
            replace_path(folder, path)

    def open(self, path: Path, device: torch.device) -> Session:
        """``path``: the .xml or the folder that holds it."""
        xml = _model_file(path)
        core = openvino_core(str(path))
        if device.type != "cpu":
            log_cpu_only(path, device)
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",  # without it, CPUs with bfloat16 instructions compute in bfloat16
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        with errors_of_runtime(path):
            model = core.read_model(xml)
            compiled = core.compile_model(model, "CPU", settings)
        runner = _Runner(path, compiled)
        metadata = read_metadata_file(xml.parent)
        if metadata is None:  # a model of Intel's own tools
            metadata = _names_of_model(model)
        return Session(runner.run, metadata, runner.input_shape)


class _Runner:
    """Runs a compiled model of OpenVINO on images (B, C, H, W).

    Attributes:
        input_shape: batch, channels, height, width; None: any.
    """

    def __init__(self, path: Path, compiled: Any) -> None:
        """Raises UserError for a model that does not map images to one output."""
        check_ports(path, len(compiled.inputs), len(compiled.outputs))
        self._compiled = compiled
        self._per_thread = threading.local()  # an infer request serves one caller at a time
        shape = [side.get_length() if side.is_static else None for side in compiled.inputs[0].get_partial_shape()]
        self.input_shape = checked_shape(path, shape)

    def run(self, images: Tensor) -> Tensor:
        """Returns the output for ``images``, float32, on their device."""
        if not hasattr(self._per_thread, "request"):
            self._per_thread.request = self._compiled.create_infer_request()
        pixels = images.to("cpu", memory_format=torch.contiguous_format).numpy()
        result = self._per_thread.request.infer([pixels])[self._compiled.outputs[0]]
        return torch.from_numpy(result.copy()).float().to(images.device)


def _model_file(path: Path) -> Path:
    """Finds the .xml of a model. Raises UserError unless there is one."""
    xml_files = sorted(path.glob("*.xml")) if path.is_dir() else [path]
    if len(xml_files) != 1:
        raise UserError(f"{path}: holds {len(xml_files)} .xml files, not one model")
    return xml_files[0]


def model_info(metadata: ExportMetadata) -> dict[str, str | bool]:
    """Returns the entries that Intel's Model API and DL Streamer read instead of a configuration file. They call the
    layout raw YOLOv8, and end2end YOLOv10."""
    steps = preprocessing(PixelFormat(metadata.channels, metadata.bits))
    confidence = DEFAULT_CONFIDENCE if metadata.confidence is None else metadata.confidence
    iou = NO_NMS_IOU if metadata.nms_iou is None else metadata.nms_iou
    return {
        "model_type": "yolo_v10" if metadata.end2end else "YOLOv8",
        "labels": " ".join(name.replace(" ", "_") for name in metadata.names or ()),
        "confidence_threshold": f"{confidence:.4g}",
        "iou_threshold": f"{iou:.4g}",
        "resize_type": "fit_to_window_letterbox",
        "pad_value": str(steps["pad_value"]),
        "reverse_input_channels": metadata.channels == 3,  # their images are BGR
        "scale_values": steps["scale"].removeprefix("1/"),
    }


def _names_of_model(model: Model) -> dict[str, Any]:
    """Reads the class names in the info of a ``model`` as metadata; empty if it has none."""
    try:
        return {"names": model.get_rt_info(["model_info", "labels"]).astype(str).split()}
    except (RuntimeError, KeyError):
        return {}


def import_openvino(user: str) -> ModuleType:
    """Imports the package openvino. Raises UserError, naming the flag or file ``user`` that needs it."""
    return require_package("openvino", user, "use another format")


def openvino_core(user: str) -> Any:
    """Returns OpenVINO's `Core`, the only one of this process. Raises UserError, naming ``user``, without the package.

    It is never destroyed: its CPU plugin installs a signal stack in the thread that loads it, and unmaps that stack
    when the plugin is destroyed, in whatever thread. The next signal that Python handles, such as Ctrl-C, would then
    write to memory that is unmapped or used for something else.
    """
    with _CORE_LOCK:
        return _core_of(import_openvino(user))


@cache
def _core_of(openvino: ModuleType) -> Any:
    return openvino.Core()
