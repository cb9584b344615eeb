"""8-bit ONNX models: static quantization of the convolutions, calibrated on training images."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from engine.export.onnx_file import INPUT, quiet

if TYPE_CHECKING:
    from onnx import ModelProto


def last_convolutions(proto: ModelProto) -> list[str]:
    """Names of the convolutions that no other one follows: the output layers of the head."""
    after: set[str] = set()  # tensors on the way from a convolution's output to the end, walked backwards
    last = []
    for node in reversed(proto.graph.node):
        leads_to_convolution = any(output in after for output in node.output)
        if node.op_type == "Conv" and not leads_to_convolution:
            last.append(node.name)
        if node.op_type == "Conv" or leads_to_convolution:
            after.update(node.input)
    return last


def quantize(proto: ModelProto, images: Iterator[np.ndarray]) -> ModelProto:
    """A copy whose convolutions compute with 8-bit integers, except the head's output layers: these, the decoding of
    boxes and everything else stay as they are.

    Args:
        images: batches float32 (B, 3, H, W) to calibrate with: the ranges of activations are those of these images.
    """
    import onnx

    copied = onnx.ModelProto()  # the quantizer changes what it is given
    copied.CopyFrom(proto)
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(images, None)
            return None if batch is None else {INPUT: batch}

    with TemporaryDirectory() as folder, quiet(), _silent_root(), contextlib.redirect_stdout(io.StringIO()):
        target = Path(folder) / "int8.onnx"
        quantize_static(
            copied,
            target,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=last_convolutions(proto),
            per_channel=True,
            activation_type=QuantType.QUInt8,  # with signed ones OpenVINO 2026.4 computes nonsense
            weight_type=QuantType.QInt8,
            # The mean of the images' ranges, not the widest: F1 of yolov8n at 640 px falls by 0.015 instead of 0.022.
            extra_options={"CalibMovingAverage": True},
        )
        return onnx.load(target)


@contextlib.contextmanager
def _silent_root() -> Iterator[None]:
    """The quantizer logs its advice to the root logger."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
