"""``--pipeline 2``: two processes share the layers of a model, for images whose activations one device cannot hold.

Processes 2i and 2i + 1, a pair, train on the same images: the first computes the layers before the split
(split_point.py), the second the others and the loss. Both hold all weights and the optimizer state, so everything
outside the step is as in other runs. One all-reduce over all processes gives each of them all gradients; a process
contributes zeros for layers that it does not compute.

Each micro-batch (``--nominal-batch``) passes forward (F) and backward (B) through both processes. The first process
sends its maps at the split (m), and receives their gradients (g): for each layer whose output the second process takes,
one tensor (B, C, H, W) in the type of autocast. A step of four micro-batches, with time running to the right:

    first process     F0    F1          B0 F2       B1 F3       B2          B3
                         m0    m1    g0       m2 g1       m3 g2          g3
    second process          F0 B0          F1 B1       F2 B2       F3 B3

A call of `FirstStage.forward` runs F of a micro-batch and B of the previous one; the end of the step runs the last B. A
call of `LastStage.forward` runs F; B is the backward pass of the loss, which ends with the gradients of the maps.

Both processes start their sends and receives in the same order, as NCCL requires: m0 m1 g0 m2 g1 m3 g2 g3. The second
process therefore starts to receive the next maps before F, one micro-batch ahead.

Between F and B of a micro-batch, the first process keeps only the images and recomputes the activations in B, so that
it never holds the activations of two micro-batches. With a single micro-batch it keeps them, and the processes take
turns.

torch.distributed.pipelining offers such schedules, but requires all micro-batches of a step to have the same shape;
here the last one of an epoch may be smaller, and with ``--multi-scale`` and ``--rect`` all of them differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.optim.model_tensors import copy_from_flat, flatten, flatten_as, gradient_vector, set_gradients
from engine.parallel.split_point import choose_split_point
from engine.parallel.strategy import Autocast, Strategy, all_reduce_sum
from models.detector import Detector
from utils.batches import Batch
from utils.config.flags import flag_name
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

STAGES = 2


def check_pipeline(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError if other settings or the number of processes rule out ``--pipeline 2``."""
    if ctx.world_size % STAGES:
        raise UserError(
            f"--pipeline 2: needs an even number of training processes, this run has {ctx.world_size}; start 2, 4, ... "
            "with torchrun or --spawn, or use --pipeline 1"
        )
    names = ("virtual_ranks", "sync_bn", "compile", "teacher", "keep_old")
    excluded = [flag_name(name) for name in names if getattr(config, name)]
    if config.batch_size == FIND_BATCH_SIZE:
        excluded.append("--batch-size -1")
    if excluded:
        raise UserError(f"--pipeline 2 does not work with {', '.join(excluded)}; leave out one or the other")


def build_stage(
    ctx: DistributedContext, model: Detector, autocast: Autocast, parameters: Sequence[nn.Parameter]
) -> Stage:
    """Builds the stage of this process."""
    stage = FirstStage if ctx.rank % STAGES == 0 else LastStage
    return stage(ctx, model, autocast, parameters)


class Stage(Strategy):
    """The part of the model that a process computes. Every process creates one."""

    def __init__(
        self, ctx: DistributedContext, model: Detector, autocast: Autocast, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Chooses the layers of this process. ``model`` is in training mode, not wrapped; the optimizer trains
        ``parameters``."""
        super().__init__(ctx, model, autocast)
        self._detector = model
        self._parameters = parameters
        self._peer = ctx.rank ^ 1
        self._split = choose_split_point(model, autocast)
        layers = list(model.model)
        halves = [_trained_norms(layers[: self._split.layer]), _trained_norms(layers[self._split.layer :])]
        self._norms = halves[ctx.rank % STAGES]  # batch norms that this process computes
        self._peer_statistics = _statistics(halves[self._peer % STAGES])
        self._statistics = _statistics([*halves[0], *halves[1]])

    def shards(self, batches: Sequence[Batch], counts: Sequence[int]) -> Iterator[Sequence[Batch]]:
        """Yields ``batches``; the peer yields the same ones."""
        self._start_step([batch.images.shape for batch in batches])
        yield batches
        self._finish_step()

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

    def _start_step(self, shapes: list[torch.Size]) -> None:
        """Called before the first `forward` of a step, with the shapes of its micro-batches' images."""
        raise NotImplementedError

    def _finish_step(self) -> None:
        """Called after the last `forward` of a step and its backward pass."""
        raise NotImplementedError

    def _send(self, maps: Sequence[Tensor]) -> _Message:
        """Starts to send maps, or their gradients, to the other process of the pair."""
        return self._start(dist.isend, maps)

    def _receive(self, image_shape: Sequence[int]) -> _Message:
        """Starts to receive the maps, or their gradients, of a micro-batch with images of this shape."""
        return self._start(dist.irecv, self._split.empty_maps(image_shape))

    def _start(self, operation: Callable[..., Any], maps: Sequence[Tensor]) -> _Message:
        """Starts to send or to receive maps, by ``operation``: `dist.isend` or `dist.irecv`."""
        flat = [values for values in flatten_as(maps, self._split.examples) if len(values)]
        operations = [dist.P2POp(operation, values, self._peer) for values in flat]
        return _Message(maps, works=dist.batch_isend_irecv(operations) if operations else [])


class _Message(NamedTuple):
    """Maps, or their gradients, in transit between the two processes."""

    maps: Sequence[Tensor]
    works: Sequence[dist.Work]

    def wait(self) -> Sequence[Tensor]:
        """Waits until the maps are sent or received, and returns them."""
        for work in self.works:
            work.wait()
        return self.maps


_NOTHING = _Message([], [])


class _MicroBatch(NamedTuple):
    """A micro-batch after its forward pass in the first process."""

    images: Tensor
    sent: _Message


class FirstStage(Stage):
    """Computes the layers before the split."""

    _recomputes: bool  # whether B computes the activations again
    _forwarded: _MicroBatch | None  # the micro-batch after F and before B

    def _start_step(self, shapes: list[torch.Size]) -> None:
        self._recomputes = len(shapes) > 1
        self._forwarded = None

    def forward(self, images: Tensor) -> None:
        """Runs F of a micro-batch, then B of the previous one."""
        with torch.set_grad_enabled(not self._recomputes):
            maps = self._maps(images)
        previous = self._forwarded
        self._forwarded = _MicroBatch(images, sent=self._send(maps))
        if previous is not None:
            self._backward(previous)

    def _finish_step(self) -> None:
        if self._forwarded is not None:
            self._backward(self._forwarded)
        self._forwarded = None

    def _maps(self, images: Tensor) -> list[Tensor]:
        """Computes the maps that the second process takes."""
        kept: dict[int, Tensor] = {}
        with self.autocast():
            last = self._detector.run_layers(0, self._split.layer, images, kept)
        kept[self._split.layer - 1] = cast(Tensor, last)  # only the head, which the second process has, returns a list
        return [kept[layer] for layer in self._split.taken]

    def _backward(self, batch: _MicroBatch) -> None:
        """Runs B of a micro-batch, with the gradients that the second process sends."""
        arriving = self._receive(batch.images.shape)
        maps = batch.sent.wait()
        if self._recomputes:
            with _fixed_statistics(self._norms):
                maps = self._maps(batch.images)
        gradients = arriving.wait()
        trained = [number for number, values in enumerate(maps) if values.requires_grad]
        if trained:  # else all layers are frozen
            torch.autograd.backward([maps[number] for number in trained], [gradients[number] for number in trained])


class LastStage(Stage):
    """Computes the layers from the split on."""

    _shapes: deque[torch.Size]  # image shapes of the micro-batches whose maps it has not started to receive
    _arriving: _Message  # the maps of the next micro-batch
    _sent: _Message  # the newest gradients

    def _start_step(self, shapes: list[torch.Size]) -> None:
        self._shapes = deque(shapes)
        self._sent = _NOTHING
        self._receive_next()

    def _receive_next(self) -> None:
        """Starts to receive the maps of the next micro-batch, if there is one."""
        self._arriving = self._receive(self._shapes.popleft()) if self._shapes else _NOTHING

    def forward(self, images: Tensor) -> list[Tensor]:
        """Runs F of a micro-batch, and returns the head's raw maps. Their backward pass is B."""
        arriving = self._arriving
        self._receive_next()
        maps = arriving.wait()
        received = _Received.apply(self._send_gradients, *(values.requires_grad_() for values in maps))
        first = self._split.layer
        kept = dict(zip(self._split.taken, received))
        with self.autocast():
            raw = self._detector.run_layers(first, len(self._detector.model), kept.get(first - 1), kept)
        return cast(list[Tensor], raw)  # the last layer is the head

    def _send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Ends B: sends the gradients of the maps that the last `forward` received."""
        self._sent.wait()
        self._sent = self._send(gradients)

    def _finish_step(self) -> None:
        self._sent.wait()


class _Received(torch.autograd.Function):
    """Identity whose backward pass calls ``send_gradients`` with the gradients."""

    @staticmethod
    def forward(ctx: Any, send_gradients: Callable[[Sequence[Tensor]], None], *maps: Tensor) -> tuple[Tensor, ...]:
        ctx.send_gradients = send_gradients
        return maps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.send_gradients(gradients)
        return (None,) * (1 + len(gradients))


def _trained_norms(layers: Sequence[nn.Module]) -> list[nn.BatchNorm2d]:
    """Returns the batch norms of layers, except for frozen ones."""
    modules = [module for layer in layers for module in layer.modules()]
    return [module for module in modules if isinstance(module, nn.BatchNorm2d) and module.weight.requires_grad]


def _statistics(norms: Sequence[nn.BatchNorm2d]) -> list[Tensor]:
    """Returns the running means and variances of batch norms."""
    statistics = []
    for norm in norms:
        statistics += [tensor for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
    return statistics


@contextmanager
def _fixed_statistics(norms: Sequence[nn.BatchNorm2d]) -> Iterator[None]:
    """Keeps the running statistics of batch norms unchanged; normalization is not affected."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
