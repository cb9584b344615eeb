"""A program that makes TFLite files, with packages that should not be loaded into a training process.

litert-torch loads JAX and transformers, whose threads do not survive a fork, and prints its progress. So `litert.write`
runs this file in a separate process, which imports nothing of this program.

    python litert_converter.py PROGRAM TARGET [half | CALIBRATION]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

CONV_2D, DEPTHWISE_CONV_2D, SOFTMAX = 3, 4, 25  # operators' numbers in the file format
LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D")


def convert(program: str, target: str) -> None:
    """Writes a program of `torch.export`, stored with its example keyword arguments, as a TFLite file ``target``."""
    import litert_torch
    import torch

    exported = torch.export.load(program)
    _, examples = exported.example_inputs
    litert_torch.convert(exported.module(), sample_kwargs=examples).export(target)


def round_weights(model: str) -> None:
    """Changes a TFLite file: convolutions store float16 weights, and compute in float32."""
    from ai_edge_quantizer import qtyping
    from ai_edge_quantizer.algorithm_manager import AlgorithmName
    from ai_edge_quantizer.quantizer import Quantizer

    weights = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
    settings = qtyping.OpQuantizationConfig(weight_tensor_config=weights, explicit_dequantize=True)
    quantizer = Quantizer(model)
    for kind in (*LAYERS, "FULLY_CONNECTED"):
        operation = qtyping.TFLOperationName[kind]
        quantizer.update_quantization_recipe(".*", operation, settings, AlgorithmName.FLOAT_CASTING)
    Path(model).write_bytes(quantizer.quantize().quantized_model)


def quantize(model: str, calibration: str) -> None:
    """Changes a TFLite file: its convolutions, except the last ones, compute with 8-bit integers.

    ``calibration``: folder with batches of images, float32 (B, H, W, C).
    """
    from ai_edge_quantizer import qtyping
    from ai_edge_quantizer.quantizer import Quantizer

    quantizer = Quantizer(model)
    scopes = f"^(?:{'|'.join(map(re.escape, layers(Path(model).read_bytes())))});"  # the output's name and a semicolon
    for kind in LAYERS:
        quantizer.add_static_config(scopes, qtyping.TFLOperationName[kind], activation_num_bits=8, weight_num_bits=8)
    files = sorted(Path(calibration).iterdir())
    batches = [{"images": np.load(file, mmap_mode="r")} for file in files]  # it is iterated twice
    ranges = quantizer.calibrate({"serving_default": batches})
    Path(model).write_bytes(quantizer.quantize(ranges).quantized_model)


def layers(model: bytes) -> list[str]:
    """Lists the outputs of all convolutions but the last, as `engine.export.int8.last_convolutions` finds them."""
    from ai_edge_litert import schema_py_generated as schema

    content = schema.ModelT.InitFromPackedBuf(model, 0)
    (graph,) = content.subgraphs
    layer_inputs: set[int] = set()
    found = []
    for operator in reversed(graph.operators):
        kind = content.operatorCodes[operator.opcodeIndex].builtinCode
        is_layer = kind in (CONV_2D, DEPTHWISE_CONV_2D)
        reaches_layer = any(output in layer_inputs for output in operator.outputs)
        if is_layer and reaches_layer:
            found.append(graph.tensors[operator.outputs[0]].name.decode())
        if is_layer or (reaches_layer and kind != SOFTMAX):
            layer_inputs.update(operator.inputs)
    return found


def main() -> None:
    program, target, *precision = sys.argv[1:]
    convert(program, target)
    if precision == ["half"]:
        round_weights(target)
    elif precision:
        quantize(target, precision[0])


if __name__ == "__main__":
    main()
