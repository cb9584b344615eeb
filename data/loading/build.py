"""`create_dataloader`: the one door to the data."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np

from data.cache.device import open_device_cache
from data.cache.open import open_image_cache
from data.damaged_images import DamagedImages
from data.dataset import LoadImagesAndLabels
from data.index.dataset_yaml import DatasetSpec
from data.index.index import DatasetIndex, load_index
from data.loading.loader import InfiniteDataLoader
from data.loading.planned_batch import DeviceRenderer, PlannedBatches
from data.render.mipmap import PyramidLayout
from data.sampler import EndlessRequests, EpochOrder, KeyedDistributedSampler, ShardedBatches, fixed_batches
from utils.config.settings import Hyperparameters, check_image_size
from utils.distributed.agreement import check_agreement
from utils.distributed.collectives import torch_distributed_zero_first
from utils.distributed.context import DistributedContext
from utils.distributed.groups import ProcessGroupPlace, one_per_node_group
from utils.errors import UserError


def create_dataloader(
    spec: DatasetSpec,
    split: str,
    *,
    ctx: DistributedContext,
    imgsz: int,
    batch_size: int,
    stride: int = 32,
    hyp: Hyperparameters,
    augment: bool,
    seed: int = 0,
    epochs: int = 1,
    rect: bool = False,
    pad: float | None = None,
    image_weights: bool = False,
    quad: bool = False,
    multi_scale: bool = False,
    single_cls: bool = False,
    cache: str = "none",
    render_on: str = "host",
    fuse: bool = True,
    cache_dir: str = "",
    local_data: bool = False,
    workers: int = 2,
    max_bad: float = 0.1,
    verify: str = "sample",
    pin_memory: bool = False,
) -> tuple[InfiniteDataLoader, LoadImagesAndLabels]:
    """The loader of a split for this process; a training loader if ``augment``, else one for validation.

    The node's first process scans and caches, the others read what it left.

    Args:
        spec: the data set.
        split: "train", "val" or "test".
        ctx: this process among the others.
        imgsz: square training size, or longer side in validation, pixels.
        batch_size: in training over all processes, in validation on each.
        stride: the model's largest.
        hyp: augmentation settings.
        augment: shuffle and augment.
        seed, epochs: of the run.
        rect: canvases by aspect; in training without mosaic and mixup.
        pad: strides around rectangular canvases; None: 0.5 in validation, as published evaluations have it, else 0.
        image_weights: draw images by class weights.
        quad: four samples make a picture of twice the size, in some samples one of them fills it.
        multi_scale: vary the canvas within +- ``hyp.multi_scale_range`` from batch to batch.
        single_cls: all classes are one.
        cache: "none", "ram", "disk", or "device" for pictures rendered there; validation then has "ram".
        render_on: "host" or "device": where training pictures are rendered. On the device, the loader yields planned
            batches and ``loader.renderer`` makes batches of them.
        fuse: render with a compiled kernel on a GPU, see `DeviceRenderer`.
        cache_dir: of index and disk cache; empty: ~/.cache/lockstep.
        local_data: the images are on each node's own disk: each fills its disk cache alone, not over the network.
        workers: loader processes.
        max_bad: share of bad images above which the run stops: of those that the scan leaves out and, when it goes on,
            those whose decoder complains.
        verify: "full" decodes every image in the scan, "sample" those that look wrong and a few more.
        pin_memory: for copies to a GPU.

    Raises:
        UserError: a data set without images, or another one on each process, sizes or settings that don't fit each
            other, what scan and cache refuse.
    """
    check_image_size(imgsz, stride)
    if augment:
        check_batch_size(ctx, batch_size, quad=quad)
    check_rendering(render_on, cache, hyp)
    on_device = augment and render_on == "device"
    leaders = _leaders_of_a_shared_cache(ctx, cache, local_data)
    with torch_distributed_zero_first(ctx):
        index = load_index(
            spec,
            split,
            cache_dir=cache_dir,
            workers=max(workers, 1),
            max_bad=max_bad,
            single_cls=single_cls,
            verify=verify,
            progress=ctx.is_node_leader,
        )
    check_same_data(ctx, split, index)  # before nodes hand each other images of it
    with torch_distributed_zero_first(ctx):
        damaged = DamagedImages(index, split, cache_dir=cache_dir, max_bad=max_bad)
        image_cache = open_image_cache(
            index,
            _host_cache(cache, on_device),
            imgsz=imgsz,
            cache_dir=cache_dir,
            threads=min(max(workers, 2) * ctx.local_world_size, 64),  # the other ranks' share too: they wait
            show_progress=ctx.is_main,
            ctx=ctx,
            leaders=leaders,
            complain=damaged.add,
        )
        dataset = LoadImagesAndLabels(
            index,
            imgsz=imgsz,
            stride=stride,
            hyp=hyp,
            augment=augment,
            seed=seed,
            epochs=epochs,
            rect=rect,
            image_cache=image_cache,
            complain=damaged.add,
        )
        damaged.check(log=ctx.is_main)
    requests: EndlessRequests | ShardedBatches
    if augment:
        _check_count(spec, split, len(index), quad)
        spread = hyp.multi_scale_range if multi_scale else 0.0
        requests = _training_requests(ctx, dataset, batch_size, pad=pad or 0.0, quad=quad, multi_scale=spread)
    else:
        requests = _validation_requests(ctx, dataset, batch_size, pad=0.5 if pad is None else pad)
    loader = InfiniteDataLoader(
        dataset,
        requests,
        workers=workers,
        pin_memory=pin_memory,
        weighted=augment and image_weights,
        after_batch=partial(damaged.check, log=ctx.is_main),
        **(_render_on_device(ctx, dataset, cache, workers, fuse) if on_device else {}),
    )
    return loader, dataset


def check_same_data(ctx: DistributedContext, split: str, index: DatasetIndex) -> None:
    """Raises UserError on all processes when what they read as ``split`` is not the same; once a run and split.

    File stamps are left out: machines may have copies of their own.
    """
    if ctx.world_size == 1:
        return
    facts: dict[str, object] = {
        f"the number of {split} images": len(index),
        "the class names": list(index.names),
        f"the list of {split} images": _digest(index.paths.data, index.paths.offsets),
        f"the sizes of the {split} images": _digest(index.image_hw),
        f"the {split} labels": _digest(index.offsets, index.boxes_xywh_px, index.classes, index.crowd),
    }
    check_agreement(ctx, f"data/{split}", facts)


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def check_batch_size(ctx: DistributedContext, batch_size: int, *, quad: bool) -> None:
    """Raises UserError for a global training batch that cannot be shared out to the processes."""
    if batch_size < ctx.world_size:
        raise UserError(
            f"--batch-size {batch_size}: is the total over {ctx.world_size} processes and wants at least one image "
            f"each; use {ctx.world_size} or more"
        )
    if quad and batch_size % (4 * ctx.world_size):
        raise UserError(
            f"--quad with --batch-size {batch_size} on {ctx.world_size} process(es): wants a multiple of "
            f"{4 * ctx.world_size}"
        )


def check_rendering(render_on: str, cache: str, hyp: Hyperparameters) -> None:
    """Raises UserError for pixels that are wanted where they will not be."""
    if render_on == "device" and hyp.albumentations:
        raise UserError(
            "--augment device: the hyper-parameter albumentations needs pixels on the host; empty it, or use "
            "--augment host"
        )
    if cache == "device" and render_on != "device":
        raise UserError("--cache device: pixels that lie there can only be used there; add --augment device")


def _check_count(spec: DatasetSpec, split: str, images: int, quad: bool) -> None:
    """Raises UserError for too few images to make a batch of."""
    if images == 0:
        raise UserError(f"{spec.source}: {split} has no images to train on")
    if quad and images < 4:
        raise UserError(f"--quad: wants at least 4 training images, {split} has {images}")


def _host_cache(cache: str, on_device: bool) -> str:
    """Which cache of the host's serves ``cache``: pictures that the device does not render have none of its pixels."""
    if cache != "device":
        return cache
    return "none" if on_device else "ram"


def _leaders_of_a_shared_cache(ctx: DistributedContext, cache: str, local_data: bool) -> ProcessGroupPlace | None:
    """The nodes' first processes where they fill their disk caches together; None where each fills its own alone."""
    several_nodes = ctx.is_distributed and ctx.local_world_size < ctx.world_size
    return one_per_node_group(ctx) if several_nodes and cache == "disk" and not local_data else None


def _training_requests(
    ctx: DistributedContext,
    dataset: LoadImagesAndLabels,
    batch_size: int,
    *,
    pad: float,
    quad: bool,
    multi_scale: float,
) -> EndlessRequests:
    """This rank's shares of the epochs' batches, without end; canvases vary within +- the share ``multi_scale``."""
    order = EpochOrder(
        len(dataset),
        seed=dataset.seed,
        batch_size=batch_size,
        imgsz=dataset.imgsz,
        stride=dataset.stride,
        image_hw=dataset.index.image_hw if dataset.rect else None,
        pad=pad,
        block=0 if dataset.rect else dataset.hyp.mosaic_block,
    )
    return EndlessRequests(
        KeyedDistributedSampler(order, rank=ctx.rank, world_size=ctx.world_size, quad=quad, multi_scale=multi_scale)
    )


def _validation_requests(
    ctx: DistributedContext, dataset: LoadImagesAndLabels, batch_size: int, *, pad: float
) -> ShardedBatches:
    """This rank's batches of a fixed list of them."""
    batches = fixed_batches(
        dataset.index.image_hw,
        batch_size=batch_size,
        imgsz=dataset.imgsz,
        stride=dataset.stride,
        rect=dataset.rect,
        pad=pad,
    )
    return ShardedBatches(batches, rank=ctx.rank, world_size=ctx.world_size)


def _render_on_device(
    ctx: DistributedContext, dataset: LoadImagesAndLabels, cache: str, workers: int, fuse: bool
) -> dict[str, Any]:
    """What a loader of planned batches takes."""
    layout, pixels = None, None
    if cache == "device":
        layout = PyramidLayout.of(dataset.source_hw)
        pixels = open_device_cache(
            dataset.index,
            layout,
            ctx=ctx,
            threads=max(workers, 2),
            show_progress=ctx.is_main,
            complain=dataset.complain,
        )
    renderer = DeviceRenderer(ctx.device, pixels, fuse=fuse and ctx.device.type == "cuda")
    return {"make_batch": PlannedBatches(dataset, layout), "renderer": renderer}
