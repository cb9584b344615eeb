"""Chooses where ``--pipeline 2`` splits a model, so that each process holds about half of the activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.optim.model_tensors import dense_format
from engine.parallel.strategy import Autocast
from models.detector import Detector
from models.modules import eval_mode
from utils.logger import get_logger


@dataclass(frozen=True)
class SplitPoint:
    """A point between two layers, and the maps that pass it: outputs (B, C, H, W) of earlier layers."""

    layer: int  # first layer of the second process
    taken: Sequence[int]  # earlier layers whose outputs the second process needs: one map each
    side: int  # side in pixels of the image that `examples` were computed from
    examples: list[Tensor]  # (1, C, H, W) the maps of this image, in the type and memory format that training sends

    def empty_maps(self, image_shape: Sequence[int]) -> list[Tensor]:
        """Returns uninitialized maps of images of this shape (B, channels, height, width), to receive them."""
        images, _, height, width = image_shape
        maps = []
        for example in self.examples:
            _, channels, rows, columns = example.shape
            size = (images, channels, height * rows // self.side, width * columns // self.side)
            memory_format = dense_format(example) or torch.contiguous_format
            maps.append(torch.empty(size, dtype=example.dtype, device=example.device, memory_format=memory_format))
        return maps


def choose_split_point(model: Detector, autocast: Autocast) -> SplitPoint:
    """Chooses the split at which each process holds about half of the activations, and logs the layers of both."""
    side = 2 * model.stride
    outputs, counts = _activations(model, side, autocast)
    total = sum(counts)
    layer = min(range(1, len(counts)), key=lambda end: abs(2 * sum(counts[:end]) - total))
    taken = model.inputs_from_before(layer)
    get_logger().info(
        "pipeline: layers 0 to %d (%.0f%% of the activations) on the first process of a pair, %d to %d on the second",
        layer - 1,
        100 * sum(counts[:layer]) / total,
        layer,
        len(counts) - 1,
    )
    return SplitPoint(layer, taken, side, examples=[outputs[number] for number in taken])


@torch.no_grad()
def _activations(model: Detector, side: int, autocast: Autocast) -> tuple[list[Tensor], list[int]]:
    """Returns the outputs of all layers except the head for one image of ``side`` pixels, and for every layer the
    number of values that its leaf modules output. This number is close to what autograd saves (measured:
    benchmarks/LOG.md)."""
    counts: list[int] = []

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not any(True for _ in module.children()):
            counts[-1] += output.numel()

    handles = [module.register_forward_hook(count) for module in model.modules()]
    parameter = next(model.parameters())
    image = torch.zeros(1, model.channels, side, side, dtype=parameter.dtype, device=parameter.device)
    x = image.contiguous(memory_format=torch.channels_last)
    kept: dict[int, Tensor] = {}
    outputs: list[Tensor] = []
    with eval_mode(model), autocast():
        for layer in range(len(model.model)):
            counts.append(0)
            output = model.run_layers(layer, layer + 1, x, kept)
            if isinstance(output, Tensor):  # all but the head's, which no layer takes
                x = output
                outputs.append(output)
    for handle in handles:
        handle.remove()
    return outputs, counts
