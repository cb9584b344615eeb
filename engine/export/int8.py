"""8-bit ONNX graphs: static quantization of the convolutions by ONNX Runtime, calibrated on training images."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.export.formats import quiet
from utils.machine.packages import require_package

if TYPE_CHECKING:
    from onnx import ModelProto


class Node(Protocol):
    """An operator of a graph, such as an `onnx.NodeProto`."""

    name: str
    op_type: str
    input: Sequence[str]
    output: Sequence[str]


def last_convolutions(nodes: Sequence[Node]) -> list[str]:
    """Lists the names of the convolutions that no layer follows: the output layers of the head, and the convolution
    that computes box sides from a softmax (`models.box_coding.convolved_distances`)."""
    layer_inputs: set[str] = set()  # tensors from which a convolution is reached; nodes are walked backwards
    last = []
    for node in reversed(nodes):
        reaches_layer = any(output in layer_inputs for output in node.output)
        if node.op_type == "Conv" and not reaches_layer:
            last.append(node.name)
        if node.op_type == "Conv" or (reaches_layer and node.op_type != "Softmax"):
            layer_inputs.update(node.input)
    return last


def quantize(proto: ModelProto, batches: Iterable[np.ndarray], *, outputs: bool) -> ModelProto:
    """Returns a copy whose convolutions, except the last ones, compute with 8-bit integers.

    ``batches``: training images, float32 (B, C, H, W). ``outputs``: also round the results of the convolutions to 8
    bits. ONNX Runtime computes with integers only in this case; OpenVINO always does.
    """
    require_package("onnxruntime", "--int8", "leave it out")
    import onnx
    from onnxruntime import quantization as ort

    name = proto.graph.input[0].name
    feeds = ({name: images} for images in batches)

    class Reader(ort.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(feeds, None)

    copied = onnx.ModelProto()  # the quantizer changes its argument
    copied.CopyFrom(proto)
    with TemporaryDirectory() as folder, quiet(""), contextlib.redirect_stdout(io.StringIO()):  # it logs its advice
        target = Path(folder) / "int8.onnx"
        ort.quantize_static(
            copied,
            target,
            Reader(),
            calibrate_method=ort.CalibrationMethod.MinMax,
            quant_format=ort.QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=last_convolutions(proto.graph.node),
            per_channel=True,
            activation_type=ort.QuantType.QUInt8,  # signed activations give wrong results in OpenVINO 2026.4
            weight_type=ort.QuantType.QInt8,
            reduce_range=True,  # weights of 7 bits: CPUs without VNNI add products in 16 bits, which 8 bits overflow
            extra_options={
                "CalibMovingAverage": True,  # the mean of the batches' extremes, which one image cannot stretch
                "OpTypesToExcludeOutputQuantization": [] if outputs else ["Conv"],
            },
        )
        return onnx.load(target)
