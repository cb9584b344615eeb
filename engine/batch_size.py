"""``--batch-size -1``: the largest batch that fits on the GPUs, found by taking steps.

A step of the run is taken on a copy of its model with batches of growing size: with its loss, optimiser and averaged
weights, in its floating-point type, on the largest canvas, with many boxes. Each process searches on its own device;
the smallest of their results, times the shards that a batch is cut into, is the batch of the run.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from engine.checkpoint.run import Run
from engine.optim.schedule import StepPlan, step_plan
from engine.parallel.compile import plan_compilation
from engine.parallel.sync_bn import convert_sync_bn
from engine.parallel.virtual_ranks import resolve_virtual_ranks
from engine.train_step import build_step
from utils.config.settings import FIND_BATCH_SIZE, TrainConfig
from utils.distributed.collectives import max_over_ranks
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.logger import get_logger
from utils.structures import Batch, bucketed

MOST_PICTURES = 512  # of a share: more make no step more efficient, and the host holds 20 batches with 8 workers
BOXES = 128  # a picture; padded targets are as many as the fullest picture has, and mosaics of COCO have as many
HEADROOM = 0.1  # of the free memory: for fragments, communication between processes, and pictures fuller than that
PATIENCE = 10  # batches tried by straight lines, before the search halves what is left
# What says that memory ran out, besides torch.OutOfMemoryError: cuDNN tries kernels until one has enough.
_EXHAUSTED = ("unable to find an engine", "CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")

TakeStep = Callable[[], None]


class Memory(Protocol):
    """Of a device."""

    def limit(self) -> int:
        """Bytes that this process may take in all."""

    def peak_of(self, prepare: Callable[[], TakeStep]) -> int | None:
        """Bytes that this process holds at most in a step of the kind that ``prepare`` gives, from its second one on;
        None where they are not to be had. Nothing of the step is kept."""


class CudaMemory:
    """As torch's allocator reserves it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def limit(self) -> int:
        self._forget()
        free, _ = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_reserved(self._device) + int((1 - HEADROOM) * free)

    def peak_of(self, prepare: Callable[[], TakeStep]) -> int | None:
        peak = self._measured(prepare)
        self._forget()
        return peak

    def _measured(self, prepare: Callable[[], TakeStep]) -> int | None:
        try:
            take_step = prepare()
            take_step()  # in which cuDNN tries kernels, in memory that it doesn't want again
            self._forget()
            take_step()
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in _EXHAUSTED):
                return None
            raise
        return torch.cuda.max_memory_reserved(self._device)

    def _forget(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def check_batch_search(ctx: DistributedContext, config: TrainConfig) -> None:
    """Raises UserError where ``--batch-size -1`` is asked for and cannot be answered."""
    if config.batch_size != FIND_BATCH_SIZE:
        return
    if ctx.device.type != "cuda":
        raise UserError(f"--batch-size -1: finds what fits on a GPU, and this run is on {ctx.device}; use a number")
    if len(ctx.devices) > 1:
        raise UserError("--batch-size -1: one device a process; start with torchrun instead of --device 0,1")
    if config.render_on == "device":
        raise UserError("--batch-size -1: the GPU memory that --render-on device takes is not known; use a number")


def with_batch_that_fits(
    ctx: DistributedContext, run: Run, model: nn.Module, criterion: nn.Module, *, memory: Memory | None = None
) -> Run:
    """``run`` with the largest global batch that fits, which the log names. All processes must call this.

    Args:
        model: a detector on its device, in training mode; neither it nor its gradients are touched.
        criterion: its loss, there too.
        memory: of the device; None: `CudaMemory`.

    Raises:
        UserError: not even one picture a share fits.
    """
    memory = memory or CudaMemory(ctx.device)
    shards = resolve_virtual_ranks(ctx, run.config) or ctx.world_size
    side = largest_side(run, model)
    copies = 2 if plan_compilation(run.config, ctx, pictures=shards, shards=shards).cuda_graphs else 1
    with _alone(ctx, run.config) as group:

        def peak_bytes_of(pictures: int) -> int | None:
            peak = memory.peak_of(lambda: prepare_step(ctx, run, model, criterion, pictures, group))
            # CUDA graphs keep their memory, and an epoch's last, smaller batch runs without them, beside it.
            return None if peak is None else copies * peak

        peak_bytes_of(1)  # loads the kernels, which take memory of their own
        limit = memory.limit()
        own = largest_that_fits(peak_bytes_of, limit)
    if own == 0:
        raise UserError(
            f"--batch-size -1: not even one picture of {side} px a share fits in the {limit / 2**30:.1f} GiB of memory "
            f"that {ctx.device} has to spare; use a smaller --imgsz or model"
        )
    own = -max_over_ranks(ctx, -own)
    images = own * shards * _samples(run.config)
    get_logger().info(
        "--batch-size -1: %d images a step fit (%d shard(s) of %d pictures of %d px, up to %d boxes each, in %.1f GiB)",
        images, shards, own, side, _boxes(run.config), limit / 2**30,
    )  # fmt: skip
    return replace(run, config=replace(run.config, batch_size=images))


def largest_that_fits(
    peak_bytes_of: Callable[[int], int | None], limit_bytes: int, *, most: int = MOST_PICTURES
) -> int:
    """The largest number of pictures that fits, a multiple of 8 from 16 on; 0 where none fits.

    Memory is nearly a straight line, so that the next number to try follows from two that are known. The answer has
    been measured to fit and the next larger number not to, unless the answer is ``most``.

    Args:
        peak_bytes_of: measures what so many pictures take; None where there was not as much.
        limit_bytes: what they may take.
    """
    fits: list[tuple[int, int]] = []  # pictures and bytes, ascending
    too_many: tuple[int, int | None] | None = None
    number, tries = 1, 0
    while True:
        peak, tries = peak_bytes_of(number), tries + 1
        if peak is None or peak > limit_bytes:
            if not fits:
                return 0
            too_many = (number, peak)
        else:
            fits.append((number, peak))
        least, largest = _next(fits[-1][0]), _rounded(too_many[0] - 1 if too_many else most)
        if least > largest:
            return fits[-1][0]
        guess = _guess(fits, too_many, limit_bytes, most, by_line=tries < PATIENCE)
        number = min(max(_rounded(guess), least), largest)


def _guess(
    fits: list[tuple[int, int]], too_many: tuple[int, int | None] | None, limit: int, most: int, *, by_line: bool
) -> int:
    """About as many as the limit allows."""
    low, low_peak = fits[-1]
    if too_many is None and len(fits) < 4:
        return 2 * low  # the first are too small to tell much
    high, high_peak = too_many or (most, None)
    if too_many is None and by_line:
        high, high_peak = fits[-2]
    if high_peak is None or not by_line:
        return (low + high) // 2
    slope = (high_peak - low_peak) / (high - low)
    return low + int((limit - low_peak) / slope) if slope > 0 else most


def _rounded(number: int) -> int:
    return number if number < 16 else number // 8 * 8


def _next(number: int) -> int:
    return number + (1 if number < 16 else 8)


def largest_side(run: Run, model: nn.Module) -> int:
    """Of the run's canvases, pixels."""
    config, side = run.config, run.config.imgsz
    if config.multi_scale:
        side = round(side * (1 + run.hyp.multi_scale_range) / model.stride) * model.stride
    return 2 * side if config.quad else side


def _samples(config: TrainConfig) -> int:
    """That a picture is made of, as ``--batch-size`` counts them."""
    return 4 if config.quad else 1


def _boxes(config: TrainConfig) -> int:
    return BOXES * _samples(config)


def prepare_step(
    ctx: DistributedContext,
    run: Run,
    model: nn.Module,
    criterion: nn.Module,
    pictures: int,
    group: dist.ProcessGroup | None = None,
) -> TakeStep:
    """A step such as the run's, with this process's part of a batch whose shards have ``pictures``, on copies of the
    run's parts. It waits for no other process.

    Under DDP the run holds all gradients all the time. That room is here the model's, of which the run has one less.

    Args:
        group: of this process alone, for ``--sync-bn``; None without.
    """
    config = run.config
    virtual = resolve_virtual_ranks(ctx, config)
    own, shards = max(virtual // ctx.world_size, 1), virtual or ctx.world_size
    images = pictures * shards * _samples(config)
    accumulate = step_plan(replace(config, batch_size=images), 1).accumulate
    alone = {"compile": False, "zero": False, "compress_grads": False, "sync_bn": False, "sync_bn_group": 0}
    model = copy.deepcopy(model)
    step = build_step(
        DistributedContext.single(ctx.device),
        replace(run, config=replace(config, batch_size=images, virtual_ranks=own if virtual else 0, **alone)),
        model,
        criterion,
        pretrained=(),
        plan=StepPlan(accumulate, 1, 1),
        pictures=own * pictures,
    )
    if group is not None:  # later, like DDP: averaged weights are copies of the model as it was
        convert_sync_bn(model, group)
    # The feed holds this step's batches and the next one's. Gradients are added up from the second batch on.
    side, classes = largest_side(run, model), model.num_classes
    held = [blank_batch(own * pictures, side, _boxes(config), classes, ctx.device) for _ in range(2 * accumulate)]

    def take_step() -> None:
        used = held[: min(accumulate, 2)]
        step(used, [own * pictures] * len(used), 1)
        step.reader.pop(leave=0)

    return take_step


@contextmanager
def _alone(ctx: DistributedContext, config: TrainConfig) -> Iterator[dist.ProcessGroup | None]:
    """A group of this process alone where batch statistics are exchanged, since each process searches independently."""
    if not (ctx.is_distributed and (config.sync_bn or config.sync_bn_group)):
        yield None
        return
    group = dist.new_group([ctx.rank], backend=ctx.backend, use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def blank_batch(pictures: int, side: int, boxes: int, classes: int, device: torch.device) -> Batch:
    """Black pictures with ``boxes`` small boxes each, in rows."""
    number = torch.arange(boxes)
    centres = torch.stack([(number % 16 + 0.5) / 16, (number // 16 % 16 + 0.5) / 16], 1)
    own = torch.cat([(number % classes)[:, None], centres, torch.full((boxes, 2), 0.05)], 1)
    image = torch.arange(pictures).repeat_interleave(boxes)[:, None]
    batch = Batch(
        images=torch.empty(0, dtype=torch.uint8),
        targets=torch.cat([image, own.repeat(pictures, 1)], 1),
        max_targets=bucketed(boxes),
        indices=torch.arange(pictures),
        original_hw=torch.full((pictures, 2), side, dtype=torch.int32),
        letterbox=torch.zeros((pictures, 4), dtype=torch.float64),
        counts=(boxes,) * pictures,
    )
    images = torch.zeros((pictures, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    return replace(batch.to(device, non_blocking=False), images=images)
