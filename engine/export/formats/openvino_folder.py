"""OpenVINO models: a folder with NAME.xml, NAME.bin and metadata.yaml."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from engine.export.formats.onnx_file import INPUT, OUTPUT
from engine.inference.runtimes.backends import import_openvino, openvino_core
from engine.inference.runtimes.metadata import ExportMetadata, preprocessing
from engine.inference.runtimes.open import OPENVINO_FOLDER
from utils.config.pixels import PixelFormat
from utils.files.folders import replace_path, temporary_folder
from utils.files.safe_io import write_whole

if TYPE_CHECKING:
    from onnx import ModelProto
    from openvino import Model

NO_NMS_IOU = 0.99  # IoU threshold for readers that always apply NMS, where it is not needed
CONFIDENCE = 0.25  # where the model states none


def build_openvino(proto: ModelProto) -> Model:
    """The model of an ONNX graph."""
    model = openvino_core("--format openvino").read_model(proto.SerializeToString())
    model.inputs[0].set_names({INPUT})
    model.outputs[0].set_names({OUTPUT})
    return model


def model_info(metadata: ExportMetadata) -> dict[str, str | bool]:
    """What Intel's Model API and DL Streamer read instead of a configuration file. They know the layout raw as YOLOv8
    and end2end as YOLOv10."""
    steps = preprocessing(PixelFormat(metadata.channels, metadata.bits))
    kinds = {"raw": "YOLOv8", "end2end": "yolo_v10"}
    kind = {"model_type": kinds[metadata.layout]} if metadata.layout in kinds else {}
    return kind | {
        "labels": " ".join(name.replace(" ", "_") for name in metadata.names or ()),
        "confidence_threshold": f"{CONFIDENCE if metadata.confidence is None else metadata.confidence:.4g}",
        "iou_threshold": f"{NO_NMS_IOU if metadata.nms_iou is None else metadata.nms_iou:.4g}",
        "resize_type": "fit_to_window_letterbox",
        "pad_value": str(steps["pad_value"]),
        "reverse_input_channels": metadata.channels == 3,  # their images are BGR
        "scale_values": steps["scale"].removeprefix("1/"),
    }


def write_openvino(model: Model, folder: Path, metadata: ExportMetadata) -> None:
    """Replaces ``folder``, NAME_openvino_model. The weights are stored as float16 if ``metadata.details`` has "half".
    Raises OSError if it cannot be written."""
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
