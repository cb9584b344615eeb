"""A program that makes TFLite files, with packages that should not be loaded into a training process.

litert-torch loads JAX and transformers, whose threads do not survive a fork, and prints its progress. So the exporter
runs this file in a separate process, which imports nothing of this program.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np


def convert(program: str, target: str) -> None:
    """Writes a program of `torch.export`, stored with its example keyword arguments, as a TFLite file ``target``."""
    import litert_torch
    import torch

    exported = torch.export.load(program)
    _, examples = exported.example_inputs
    converted = litert_torch.convert(exported.module(), sample_kwargs=examples)
    converted.export(target)


def round_weights(source: str, target: str) -> None:
    """Writes a TFLite file whose convolutions store float16 weights, and compute in float32."""
    from ai_edge_quantizer import qtyping
    from ai_edge_quantizer.algorithm_manager import AlgorithmName
    from ai_edge_quantizer.quantizer import Quantizer

    weights = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
    settings = qtyping.OpQuantizationConfig(weight_tensor_config=weights, explicit_dequantize=True)
    quantizer = Quantizer(source)
    for kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
        operation = qtyping.TFLOperationName[kind]
        quantizer.update_quantization_recipe(".*", operation, settings, AlgorithmName.FLOAT_CASTING)
    Path(target).write_bytes(quantizer.quantize().quantized_model)


def quantize(source: str, ranges: str, target: str) -> None:
    """Writes a TFLite file that computes convolutions with 8-bit integers.

    ``ranges``: JSON with "ranges", [low, high] by the name of each tensor that is rounded, and "convolutions", the
    names of the tensors that the convolutions write.
    """
    from ai_edge_quantizer import qtyping
    from ai_edge_quantizer.quantizer import Quantizer

    content = json.loads(Path(ranges).read_text(encoding="utf-8"))
    quantizer = Quantizer(source)
    scopes = f"^(?:{'|'.join(map(re.escape, content['convolutions']))});"  # the name of its output, and a semicolon
    for kind in ("CONV_2D", "DEPTHWISE_CONV_2D"):
        quantizer.add_static_config(scopes, qtyping.TFLOperationName[kind], activation_num_bits=8, weight_num_bits=8)
    limits = {}
    for name, (low, high) in content["ranges"].items():
        limits[name] = {"min": _value(low), "max": _value(high)}
    Path(target).write_bytes(quantizer.quantize(limits).quantized_model)


def _value(number: float) -> np.ndarray:
    return np.full((1, 1, 1, 1), number, np.float32)


def main() -> None:
    step, *arguments = sys.argv[1:]
    if step == "convert":
        convert(*arguments)
    elif step == "round_weights":
        round_weights(*arguments)
    elif step == "quantize":
        quantize(*arguments)
    else:
        sys.exit(f"unknown step {step}")


if __name__ == "__main__":
    main()
