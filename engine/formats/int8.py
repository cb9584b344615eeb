"""8-bit models: static quantization of the convolutions, calibrated on training images.

All formats round the same tensors to the same ranges. A graph is a sequence of `Node`; kinds of operators have their
ONNX names.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.formats.runtimes import import_onnxruntime, quiet

if TYPE_CHECKING:
    from onnx import ModelProto

SILU_IS_ZERO = -10.0  # a SiLU maps lower values to between -0.0005 and 0, so no steps are spent on them


class Node(Protocol):
    """An operator of a graph: an `onnx.NodeProto`, or the equivalent of another format."""

    @property
    def name(self) -> str: ...

    @property
    def op_type(self) -> str: ...

    @property
    def input(self) -> Sequence[str]: ...

    @property
    def output(self) -> Sequence[str]: ...


def last_convolutions(nodes: Sequence[Node]) -> list[str]:
    """Lists the names of the convolutions that no layer follows: the output layers of the head, and the convolution
    that computes box sides (`models.box_coding.convolved_distances`)."""
    producer = {output: node for node in nodes for output in node.output}
    before: set[str] = set()  # tensors from which a layer's convolution is reached; nodes are walked backwards
    last = []
    for node in reversed(nodes):
        leads_to_convolution = any(output in before for output in node.output)
        if node.op_type == "Conv" and not leads_to_convolution:
            last.append(node.name)
        if leads_to_convolution or (node.op_type == "Conv" and not _reads_probabilities(node, producer)):
            before.update(node.input)
    return last


def _reads_probabilities(node: Node, producer: dict[str, Node]) -> bool:
    """Returns whether the input of ``node`` is a softmax, possibly reshaped. ``producer``: node that writes a
    tensor."""
    source = producer.get(node.input[0])
    while source is not None and source.op_type in ("Reshape", "Unsqueeze"):
        source = producer.get(source.input[0])
    return source is not None and source.op_type == "Softmax"


def rounded_tensors(nodes: Sequence[Node]) -> list[str]:
    """Lists the images and activations that `quantize` rounds: inputs and outputs of all convolutions but the last."""
    excluded = last_convolutions(nodes)
    convolutions = [node for node in nodes if node.op_type == "Conv" and node.name not in excluded]
    return list(dict.fromkeys(name for node in convolutions for name in (node.input[0], node.output[0])))


class RangeObserver:
    """Collects the values of rounded tensors, and chooses their ranges."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._activated = silu_inputs(nodes)
        self._lows: dict[str, list[float]] = {name: [] for name in rounded_tensors(nodes)}
        self._highs: dict[str, list[float]] = {name: [] for name in self._lows}

    @property
    def names(self) -> list[str]:
        """Names of the tensors to observe."""
        return list(self._lows)

    def observe(self, name: str, values: np.ndarray) -> None:
        """Records the range of a tensor in one batch."""
        self._lows[name].append(float(values.min()))
        self._highs[name].append(float(values.max()))

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Returns a range (low <= 0 <= high) for each tensor.

        ``high`` is halfway between the mean and the highest of the batches' maxima: some models suffer more from large
        values that are cut off, and some from coarse steps.
        """
        ranges: dict[str, tuple[float, float]] = {}
        for name in self.names:
            low = min(0.0, *self._lows[name])
            high = max(0.0, (float(np.mean(self._highs[name])) + max(self._highs[name])) / 2)
            if name in self._activated:
                low = max(low, SILU_IS_ZERO)
            ranges[name] = (low, high if high > low else 1.0)
        return ranges


def quantize(proto: ModelProto, ranges: dict[str, tuple[float, float]], *, outputs: bool) -> ModelProto:
    """Returns a copy whose convolutions, except the head's output layers, compute with 8-bit integers. Other layers do
    not change.

    ``ranges``: see `activation_ranges`. ``outputs``: also round the results of the convolutions to 8 bits. ONNX Runtime
    computes with integers only in this case; OpenVINO always does.
    """
    import_onnxruntime("--int8")
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    copied = onnx.ModelProto()  # the quantizer changes its argument
    copied.CopyFrom(proto)
    shape = [dim.dim_value or 64 for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    batches = iter([{proto.graph.input[0].name: np.zeros(shape, np.float32)}])

    class Reader(CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    limits = {name: [{"rmin": np.float32(low), "rmax": np.float32(high)}] for name, (low, high) in ranges.items()}
    with TemporaryDirectory() as folder, quiet(""), contextlib.redirect_stdout(io.StringIO()):  # it logs its advice
        target = Path(folder) / "int8.onnx"
        quantize_static(
            copied,
            target,
            Reader(),  # the quantizer requires an image, although all ranges are given
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=last_convolutions(proto.graph.node),
            per_channel=True,
            activation_type=QuantType.QUInt8,  # signed activations give wrong results in OpenVINO 2026.4
            weight_type=QuantType.QInt8,
            reduce_range=True,  # weights of 7 bits: CPUs without VNNI add products in 16 bits, which 8 bits overflow
            extra_options={
                "TensorQuantOverrides": limits,
                "OpTypesToExcludeOutputQuantization": [] if outputs else ["Conv"],
            },
        )
        return onnx.load(target)


def activation_ranges(proto: ModelProto, images: Iterable[np.ndarray]) -> dict[str, tuple[float, float]]:
    """Measures the range of each tensor that `quantize` rounds, on batches float32 (B, C, H, W), by name."""
    import onnx

    ort = import_onnxruntime("--int8")
    observer = RangeObserver(proto.graph.node)
    input_name = proto.graph.input[0].name
    computed = [name for name in observer.names if name != input_name]
    observed = onnx.ModelProto()
    observed.CopyFrom(proto)
    del observed.graph.output[:]
    for name in computed:
        observed.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors
    session = ort.InferenceSession(observed.SerializeToString(), options, ["CPUExecutionProvider"])
    for batch in images:
        observer.observe(input_name, batch)
        for name, values in zip(computed, session.run(computed, {input_name: batch}), strict=True):
            observer.observe(name, values)
    return observer.ranges()


def silu_inputs(nodes: Sequence[Node]) -> set[str]:
    """Finds the tensors that only a SiLU, x * sigmoid(x), reads."""
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    activated = set()
    for name, reading in readers.items():
        kinds = {node.op_type: node for node in reading}
        only_silu_reads = len(reading) == 2 and kinds.keys() == {"Sigmoid", "Mul"}
        if only_silu_reads and kinds["Sigmoid"].output[0] in kinds["Mul"].input:
            activated.add(name)
    return activated
