"""``--pipeline 2``: two processes share the layers of a model, for images whose activations one device cannot hold.

Processes 2i and 2i + 1, a pair, train on the same images: the first computes the layers before the split, the second
the others and the loss. Both hold all weights and the optimizer state, so everything outside the step is as in other
runs. One all-reduce over all processes gives each of them all gradients; a process contributes zeros for layers that it
does not compute.

The two take turns: the first sends its maps at the split and waits for their gradients, which end the backward pass of
the second. torch.distributed.pipelining would overlap micro-batches, but requires all of a step to have the same shape;
here the last one of an epoch may be smaller, and with ``--multi-scale`` and ``--rect`` all of them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.optim.model_tensors import copy_from_flat, flatten, gradient_vector, set_gradients
from engine.parallel.strategy import Autocast, Strategy, all_reduce_sum
from models.detector import Detector
from models.modules import eval_mode
from utils.distributed.context import DistributedContext
from utils.logger import get_logger

STAGES = 2


class Pipeline(Strategy):
    """One process of a pair. ``model`` is in training mode, not wrapped; its ``parameters`` are trained."""

    def __init__(
        self, ctx: DistributedContext, model: Detector, autocast: Autocast, parameters: Sequence[nn.Parameter]
    ) -> None:
        super().__init__(ctx, model, autocast)
        self._detector = model
        self._parameters = parameters
        self._is_first = ctx.rank % STAGES == 0
        self._peer = ctx.rank ^ 1
        self._side = 2 * model.stride  # of the image from which the split is chosen
        outputs, counts = _activations(model, self._side, autocast)
        # The first layer of the second process; each process holds about half of the activations.
        self._split = min(range(1, len(counts)), key=lambda end: abs(2 * sum(counts[:end]) - sum(counts)))
        self._taken = model.inputs_from_before(self._split)  # earlier layers whose outputs the second process takes
        self._examples = [outputs[layer] for layer in self._taken]
        first = _running_statistics(model.model[: self._split])
        second = _running_statistics(model.model[self._split :])
        self._statistics = [*first, *second]
        self._peer_statistics = second if self._is_first else first
        get_logger().info(
            "pipeline: layers 0 to %d (%.0f%% of the activations) on the first process of a pair, %d to %d on the "
            "second",
            self._split - 1,
            100 * sum(counts[: self._split]) / sum(counts),
            self._split,
            len(counts) - 1,
        )

    def forward(self, images: Tensor) -> list[Tensor] | None:
        """Runs a micro-batch. The second process returns the head's raw maps, whose backward pass sends gradients to
        the first one. The first process returns None after the backward pass of its layers."""
        kept: dict[int, Tensor] = {}
        if self._is_first:
            with self.autocast():
                last = self._detector.run_layers(0, self._split, images, kept)
            kept[self._split - 1] = cast(Tensor, last)  # only the head, which the second process has, returns a list
            maps = [kept[layer] for layer in self._taken]
            self._send(maps)
            gradients = self._receive(images.shape)
            trained = [number for number, values in enumerate(maps) if values.requires_grad]
            if trained:  # else all layers are frozen
                torch.autograd.backward([maps[number] for number in trained], [gradients[number] for number in trained])
            return None
        maps = [values.requires_grad_() for values in self._receive(images.shape)]
        kept.update(zip(self._taken, _SendGradients.apply(self._send, *maps)))
        with self.autocast():
            raw = self._detector.run_layers(self._split, len(self._detector.model), kept.get(self._split - 1), kept)
        return cast(list[Tensor], raw)  # the last layer is the head

    def reduce(self) -> Tensor:
        """Like `Strategy.reduce`, but also averages the batch norms' statistics over the copies of the model. Each copy
        is a pair, of which one process has updated a statistic, and the other contributes zeros."""
        for statistic in self._peer_statistics:
            statistic.zero_()
        statistics = flatten(self._statistics)
        vector = all_reduce_sum(self.ctx, gradient_vector(self._parameters, self._sums, statistics))
        sums, means = set_gradients(self._parameters, vector).split([len(self._sums), len(statistics)])
        copy_from_flat((means * STAGES / self.ctx.world_size).to(statistics), self._statistics)
        return sums

    def _send(self, maps: Sequence[Tensor]) -> None:
        """Sends maps (B, C, H, W), or their gradients, to the other process of the pair, as channels_last."""
        self._exchange(dist.isend, [values.permute(0, 2, 3, 1).contiguous() for values in maps])

    def _receive(self, image_shape: Sequence[int]) -> list[Tensor]:
        """Receives the maps, or their gradients, of a micro-batch of images of this shape (B, channels, H, W)."""
        images, _, height, width = image_shape
        maps = []
        for example in self._examples:
            _, channels, rows, columns = example.shape
            size = (images, height * rows // self._side, width * columns // self._side, channels)
            maps.append(torch.empty(size, dtype=example.dtype, device=example.device))
        self._exchange(dist.irecv, maps)
        return [values.permute(0, 3, 1, 2) for values in maps]

    def _exchange(self, operation: Callable[..., Any], maps: Sequence[Tensor]) -> None:
        """Sends or receives maps (B, H, W, C) by ``operation``; those without images are not exchanged."""
        operations = [dist.P2POp(operation, values, self._peer) for values in maps if values.numel()]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


class _SendGradients(torch.autograd.Function):
    """Identity whose backward pass calls ``send`` with the gradients."""

    @staticmethod
    def forward(ctx: Any, send: Callable[[Sequence[Tensor]], None], *maps: Tensor) -> tuple[Tensor, ...]:
        ctx.send = send
        return maps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.send(gradients)
        return (None,) * (1 + len(gradients))


def _running_statistics(layers: nn.Module) -> list[Tensor]:
    """Returns the running means and variances of the batch norms in layers, except for frozen ones."""
    norms = [module for module in layers.modules() if isinstance(module, nn.BatchNorm2d) and module.training]
    statistics = [statistic for norm in norms for statistic in (norm.running_mean, norm.running_var)]
    return [statistic for statistic in statistics if statistic is not None]


@torch.no_grad()
def _activations(model: Detector, side: int, autocast: Autocast) -> tuple[list[Tensor], list[int]]:
    """Returns the outputs of all layers except the head for one image of ``side`` pixels, and for every layer the
    number of values that its leaf modules output. This number is close to what autograd saves (measured:
    benchmarks/LOG.md)."""
    outputs: list[Tensor] = []
    counts: list[int] = []

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not any(True for _ in module.children()):
            counts[-1] += output.numel()

    handles = [module.register_forward_hook(count) for module in model.modules()]
    weight = next(model.parameters())
    x: Tensor = weight.new_zeros(1, model.channels, side, side).contiguous(memory_format=torch.channels_last)
    kept: dict[int, Tensor] = {}
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
