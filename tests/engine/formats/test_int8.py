"""The ranges of 8-bit activations, and what is quantized with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.formats.graphs import INPUT
from engine.formats.int8 import activation_ranges, last_convolutions, quantize, silu_inputs
from tests.engine.formats.exported import NAMES
from tests.helpers.exports import calibrated_detector, noise_images, tiny_graph
from tests.helpers.tiny import TINY_MODEL


@pytest.fixture(scope="module")
def graph():
    """A fused detector, and its graph of two images, which test_formats.py also needs."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    return calibrated_detector(TINY_MODEL, NAMES).fuse(), tiny_graph(NAMES, batch=2)


@torch.no_grad()
def test_ranges_are_those_that_torch_sees(graph):
    detector, proto = graph
    batches = noise_images()[:4].unflatten(0, (2, 2)) * 40  # so that many values before SiLUs are below -10
    seen: list[torch.Tensor] = []
    hook = detector.model[0].conv.register_forward_hook(lambda layer, inputs, output: seen.append(output.clone()))
    for images in batches:
        detector(images)
    hook.remove()
    ranges = activation_ranges(proto, iter(batches.numpy()))
    maxima = batches.amax((1, 2, 3, 4))
    assert ranges[INPUT] == (0, pytest.approx(float((maxima.mean() + maxima.max()) / 2)))
    first = next(node for node in proto.graph.node if node.op_type == "Conv")
    maxima = torch.stack(seen).amax((1, 2, 3, 4))
    assert maxima[0] != maxima[1]
    assert min(float(output.min()) for output in seen) < -10
    assert ranges[first.output[0]] == (-10, pytest.approx(float((maxima.mean() + maxima.max()) / 2), rel=1e-5))


def test_silus_are_found(graph):
    _, proto = graph
    last = last_convolutions(proto.graph.node)
    assert len(last) == 6 + 1  # boxes and classes of three levels; the mean of the bins
    kept = [node.output[0] for node in proto.graph.node if node.op_type == "Conv" and node.name not in last]
    assert silu_inputs(proto.graph.node) == set(kept)  # every layer but the last ones has a SiLU


@pytest.mark.parametrize("outputs", [True, False])
def test_given_ranges_are_used(graph, outputs: bool):
    import onnx

    _, proto = graph
    ranges = activation_ranges(proto, iter([noise_images()[:2].numpy()]))
    quantized = quantize(proto, ranges, outputs=outputs)
    values = {value.name: onnx.numpy_helper.to_array(value) for value in quantized.graph.initializer}
    rounded = {node.input[0]: node.input[1] for node in quantized.graph.node if node.op_type == "QuantizeLinear"}
    last = last_convolutions(proto.graph.node)
    kept = [node for node in proto.graph.node if node.op_type == "Conv" and node.name not in last]
    expected = {node.input[0] for node in kept} | ({node.output[0] for node in kept} if outputs else set())
    assert rounded.keys() == expected
    for name, scale in rounded.items():
        low, high = ranges[name]
        np.testing.assert_allclose(values[scale], (high - low) / 255, rtol=1e-5)
