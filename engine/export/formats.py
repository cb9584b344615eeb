"""File formats: ``build_FORMAT`` makes the graph of a module of `engine.export.layouts`, as the flags of
`engine.export.options.resolve_options` say; ``write_FORMAT`` writes it and its metadata, replacing the file atomically.

Notes of the exporters, which name files of this machine, are removed.
"""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from torch import Tensor, nn
from torch.export import ExportedProgram

from engine.inference.runtimes.backends import EXTRA_FILE, import_openvino, openvino_core, quiet
from engine.inference.runtimes.metadata import ExportMetadata, preprocessing
from engine.inference.runtimes.open import OPENVINO_FOLDER
from models.postprocess.detections import DEFAULT_CONFIDENCE
from utils.config.pixels import PixelFormat
from utils.config.settings import ExportConfig
from utils.errors import UserError
from utils.files.folders import replace_path, temporary_folder
from utils.files.safe_io import write_whole

if TYPE_CHECKING:
    from onnx import ModelProto
    from openvino import Model

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
INPUT, OUTPUT = "images", "output0"
NO_NMS_IOU = 0.99  # for readers of OpenVINO files that always apply NMS


def example_images(module: nn.Module, config: ExportConfig) -> Tensor:
    """A batch that the ``detector`` of ``module`` takes."""
    # torch.export takes a side of one cell, or a batch of one, for a constant.
    return torch.zeros(max(config.batch, 2 if config.dynamic else 1), module.detector.channels, *config.imgsz)


def dynamic_shapes(module: nn.Module, config: ExportConfig) -> tuple[dict[int, object]] | None:
    """Any batch, height and width, in whole strides, for `torch.export`; None for fixed ones."""
    dim, stride = torch.export.Dim, module.detector.stride
    return ({0: dim("batch"), 2: stride * dim("height"), 3: stride * dim("width")},) if config.dynamic else None


def build_onnx(module: nn.Module, config: ExportConfig) -> ModelProto:
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            (example_images(module, config),),
            dynamo=True,
            opset_version=config.opset,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=dynamic_shapes(module, config),
            verbose=False,
        )
        proto = program.model_proto
    if (written := proto.opset_import[0].version) != config.opset:
        raise UserError(f"--opset {config.opset}: torch wrote opset {written} instead; use that")
    import onnx

    # The exporter writes the newest version of the file format; older runtimes read those that the operators need.
    proto.ir_version = min(proto.ir_version, onnx.helper.find_min_ir_version_for(proto.opset_import))
    graph = proto.graph
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph, proto):
        part.doc_string = ""
        del part.metadata_props[:]
    return proto


def required_runtime(proto: ModelProto) -> str:
    """The versions of the file format and of the operators, and the first ONNX Runtime that reads both."""
    opset = next(each.version for each in proto.opset_import if each.domain in ("", "ai.onnx"))
    releases = (release for release, ir, newest in ONNX_RUNTIMES if proto.ir_version <= ir and opset <= newest)
    runtime = next(releases, None)
    needed = f"ONNX Runtime {runtime} or newer" if runtime else f"one newer than ONNX Runtime {ONNX_RUNTIMES[-1][0]}"
    return f"opset {opset} and IR version {proto.ir_version} need {needed}"


def write_onnx(proto: ModelProto, path: Path, metadata: ExportMetadata) -> None:
    del proto.metadata_props[:]
    for key, value in metadata.as_text().items():
        proto.metadata_props.add(key=key, value=value)
    proto.producer_name, proto.producer_version = "lockstep", metadata.version
    write_whole(path, proto.SerializeToString())


def build_openvino(proto: ModelProto) -> Model:
    model = openvino_core("--format openvino").read_model(proto.SerializeToString())
    model.inputs[0].set_names({INPUT})
    model.outputs[0].set_names({OUTPUT})
    return model


def model_info(metadata: ExportMetadata) -> dict[str, str | bool]:
    """What Intel's Model API and DL Streamer read instead of a configuration file. They know the layout raw as YOLOv8
    and end2end as YOLOv10."""
    steps = preprocessing(PixelFormat(metadata.channels, metadata.bits))
    return {
        "model_type": {"raw": "YOLOv8", "end2end": "yolo_v10"}[metadata.layout],
        "labels": " ".join(name.replace(" ", "_") for name in metadata.names or ()),
        "confidence_threshold": f"{DEFAULT_CONFIDENCE if metadata.confidence is None else metadata.confidence:.4g}",
        "iou_threshold": f"{NO_NMS_IOU if metadata.nms_iou is None else metadata.nms_iou:.4g}",
        "resize_type": "fit_to_window_letterbox",
        "pad_value": str(steps["pad_value"]),
        "reverse_input_channels": metadata.channels == 3,  # their images are BGR
        "scale_values": steps["scale"].removeprefix("1/"),
    }


def write_openvino(model: Model, folder: Path, metadata: ExportMetadata) -> None:
    """Writes the folder NAME_openvino_model with NAME.xml, NAME.bin and metadata.yaml; the weights as float16 if
    ``metadata.details`` has "half". Raises OSError if it cannot be written."""
    openvino = import_openvino("--format openvino")
    for key, value in model_info(metadata).items():
        model.set_rt_info(value, ["model_info", key])
    with temporary_folder(folder) as temporary:
        made = temporary / "model"
        made.mkdir()
        try:
            name = folder.name.removesuffix(OPENVINO_FOLDER)
            openvino.save_model(model, made / f"{name}.xml", compress_to_fp16=bool(metadata.details.get("half")))
        except RuntimeError as error:  # of a C++ stream, which gives no reason
            raise OSError(errno.EIO, f"{error}; is the disk full?", str(folder)) from None
        text = metadata.as_data() | {"end2end": metadata.end2end}
        write_whole(made / "metadata.yaml", yaml.safe_dump(text, sort_keys=False, allow_unicode=True))
        replace_path(made, folder)


def build_torchscript(module: nn.Module, config: ExportConfig) -> torch.jit.ScriptModule:
    with quiet(), torch.no_grad():
        traced = torch.jit.trace(module, example_images(module, config), check_trace=False)
        return torch.jit.freeze(traced)


def build_pt2(module: nn.Module, config: ExportConfig) -> ExportedProgram:
    images, shapes = example_images(module, config), dynamic_shapes(module, config)
    with quiet(), torch.no_grad():
        program = torch.export.export(module, (images,), dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    program.example_inputs = None  # as large as an image
    return program


def write_torch(program: torch.jit.ScriptModule | ExportedProgram, path: Path, metadata: ExportMetadata) -> None:
    """Writes a TorchScript or .pt2 file."""
    files = {EXTRA_FILE: json.dumps(metadata.as_data(), ensure_ascii=False)}
    buffer = io.BytesIO()
    with quiet():
        if isinstance(program, ExportedProgram):
            torch.export.save(program, buffer, extra_files=files)
        else:
            torch.jit.save(program, buffer, _extra_files=files)
    write_whole(path, buffer.getvalue())
