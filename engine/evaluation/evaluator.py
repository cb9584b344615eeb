"""Validation: each rank runs the model on its shard of the images, and rank 0 scores all detections.

If the batches do not depend on the number of ranks, neither does any bit of the result: boxes are sorted by image
before they are scored, and loss sums by batch before they are added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from data.loading.prefetcher import Prefetcher
from engine.evaluation.metrics import best_threshold, score_detections
from engine.evaluation.phase_timer import PhaseTimer
from engine.evaluation.result import Evaluation, Preview
from engine.evaluation.shards import TIMES, JoinedShards, Shard, Stitch
from models.detector import CPU_CHUNK, Detector
from models.losses.base import LossOutput
from models.modules import eval_mode, unwrap
from models.postprocess.detections import select_for_validation
from models.postprocess.selection import SCORED, SHOWN, SHOWN_UNVOTED, ValidationSettings
from models.postprocess.stitching import TileStitcher
from utils.batches import Batch, to_float
from utils.detections import Detections
from utils.distributed.context import DistributedContext, gather_arrays
from utils.labels import GroundTruth

if TYPE_CHECKING:
    from data.loading.loader import ValidationLoader
    from models.losses.base import Criterion

Postprocess = Callable[[nn.Module, list[Tensor]], dict[str, Detections]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluator:
    """Scores a model on a split."""

    ground_truth: GroundTruth  # objects in all images; the loaders of all ranks together yield each image once
    num_classes: int
    # Maps the model and its raw outputs (float32) to detections in canvas pixels, by the names in `SELECTIONS`, see
    # `models.postprocess.detections.select_for_validation`.
    postprocess: Postprocess
    ctx: DistributedContext  # this process, with the model's device; every rank must call `run`
    amp_dtype: torch.dtype | None = None  # autocast type of the forward pass; None: no autocast
    # Joins the detections of tiles, by the names in `SELECTIONS`, if the loaders yield tiles instead of images.
    stitch: Mapping[str, Stitch] | None = None
    criterion: Criterion | None = None  # as in training; adds validation losses to the result
    fuses: bool = False  # fuse the model, a `Detector`, for each run
    progress: Callable[[Iterable[Batch]], Iterable[Batch]] = iter  # wraps the loader in a progress bar

    def run(
        self, model: nn.Module, loader: Iterable[Batch], *, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Scores ``model`` on ``loader``. Modules keep their training modes.

        The detections of each of `SELECTIONS` are matched with the objects: `SCORED` for AP, `SHOWN` for precision,
        recall, F1 and their threshold, `SHOWN_UNVOTED` for its threshold alone.

        ``result.extras`` holds, per image, ``ms/inference`` and ``ms/nms`` (of one device) and ``ms/total`` (wall clock
        of all ranks); ``data_wait``, the fraction of time spent waiting for batches; and with a criterion ``val/total``
        and ``val/<part>``, sums over all images divided by the sum of the normalizers.

        Args:
            should_stop: called before each batch; once it returns True on any rank, the run ends without a result.

        Returns the evaluation on rank 0, None elsewhere.
        """
        model = unwrap(model)
        if self.fuses:
            model = cast(Detector, model).fuse(one_to_one=None)  # `unwrap` returns any module
        with eval_mode(model) as bare:
            shard = self._run_shard(bare, loader, should_stop)
        num_losses = len(self.criterion.names) if self.criterion else 0
        gathered = gather_arrays(self.ctx, shard.take_arrays(num_losses=num_losses, stitch=self.stitch))
        if gathered is None:
            return None
        shards = JoinedShards(gathered)
        return self._score(shards, shard.preview) if shards.is_complete else None

    def _score(self, shards: JoinedShards, preview: Preview | None) -> Evaluation:
        """Scores the detections in ``shards``, and takes them from there."""
        self._check_visits(shards.visited)
        # Taken first and dropped, to free its memory.
        plain_confidence = best_threshold(self.ground_truth, shards.take_table(SHOWN_UNVOTED), self.num_classes)
        scored = shards.take_table(SCORED)
        shown = shards.take_table(SHOWN)
        result = score_detections(
            self.ground_truth, scored, self.num_classes, shown=shown, plain_confidence=plain_confidence
        )
        result.extras.update(self._times(shards.seconds))
        if self.criterion is not None:
            result.extras.update(_mean_losses(self.criterion.names, shards.loss_sums()))
        return Evaluation(result, scored, shown, preview)

    def _check_visits(self, visited: np.ndarray) -> None:
        """Raises RuntimeError unless the loaders of all ranks have yielded each image once."""
        images = self.ground_truth.num_images
        counts = np.bincount(visited, minlength=images)
        if counts.size != images or not (counts == 1).all():
            wrong = np.flatnonzero(counts != 1)
            first = ", ".join(f"image {i}: {counts[i]}" for i in wrong[:10].tolist())
            raise RuntimeError(f"expected {images} images exactly once each, {len(wrong)} had other counts ({first})")

    def _times(self, seconds: np.ndarray) -> dict[str, float]:
        """Returns the times for ``result.extras``. ``seconds``: (ranks, 4), columns as in `TIMES`."""
        inference, nms, wait, total = seconds.T
        per_image = 1000 / max(self.ground_truth.num_images, 1)
        return {
            "ms/inference": float(inference.sum() * per_image),
            "ms/nms": float(nms.sum() * per_image),
            "ms/total": float(total.max() * per_image),
            "data_wait": float(wait.sum() / max(total.sum(), 1e-9)),
        }

    @torch.no_grad()
    def _run_shard(self, model: nn.Module, loader: Iterable[Batch], should_stop: Callable[[], bool]) -> Shard:
        """Runs the model on this rank's batches."""
        timer = PhaseTimer(self.ctx.device)
        shard = Shard()
        channels_last = is_channels_last(model)
        started = time.perf_counter()
        batches = Prefetcher(iter(self.progress(loader)), device=self.ctx.device)
        for batch in batches:
            if should_stop():
                shard.is_complete = False
                break
            if batch.images.shape[0] == 0:
                continue
            images = to_float(batch.images, self.ctx.device, torch.float32, channels_last)
            with timer.phase("inference"), self._autocast():
                raw = [level.float() for level in _forward_in_chunks(model, images)]
            batches.prefetch(1)  # before NMS, for which the host waits
            with timer.phase("nms"):
                selections = self.postprocess(model, raw)
            selections = {name: _to_host(detections) for name, detections in selections.items()}
            shard.add(batch, selections, self._loss(raw, images, batch))
        seconds = timer.seconds() | {"wait": batches.pop_wait_time(), "total": time.perf_counter() - started}
        shard.seconds = [seconds.get(name, 0.0) for name in TIMES]
        return shard

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ctx.device.type, self.amp_dtype, enabled=self.amp_dtype is not None)

    def _loss(self, raw: list[Tensor], images: Tensor, batch: Batch) -> LossOutput | None:
        """Computes the loss of the raw maps of ``images``; None without a criterion."""
        if self.criterion is None:
            return None
        with self._autocast():
            teacher_maps = self.criterion.teacher_maps(images)
        return self.criterion(raw, batch.targets, teacher_maps)


def build_evaluator(
    ctx: DistributedContext, loader: ValidationLoader, nms_iou: float | None, settings: ValidationSettings
) -> Evaluator:
    """Builds an evaluator for the data of ``loader``, in float32 and without a loss. ``nms_iou``: the model's."""
    return Evaluator(
        ground_truth=loader.index.ground_truth(),
        num_classes=len(loader.index.names),
        postprocess=partial(select_for_validation, settings=settings),
        ctx=ctx,
        stitch=stitchers_of(loader, nms_iou, settings),
    )


def stitchers_of(
    loader: ValidationLoader, nms_iou: float | None, settings: ValidationSettings
) -> dict[str, Stitch] | None:
    """Returns the functions that join the detections in tiles; None if ``loader`` yields whole images. ``nms_iou``: the
    model's."""
    tiles = loader.samples.tiles
    if tiles is None:
        return None
    selections = settings.selections(nms_iou)
    return {name: TileStitcher(tiles.image, tiles.windows, selection) for name, selection in selections.items()}


def is_channels_last(model: nn.Module) -> bool:
    """Returns whether convolution kernels are in NHWC memory format (1 x 1 kernels are in both and do not count)."""
    return any(
        p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        for p in model.parameters()
    )


def _forward_in_chunks(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Returns ``model(images)``; on a CPU a few images at a time, so that a layer's output is still in the cache when
    the next layer reads it."""
    chunk = CPU_CHUNK if images.device.type == "cpu" else len(images)
    outputs = [model(part) for part in images.split(chunk)]
    if len(outputs) == 1:
        return outputs[0]
    return [torch.cat(levels) for levels in zip(*outputs)]


def _mean_losses(names: Sequence[str], loss_sums: np.ndarray) -> dict[str, float]:
    """Returns the losses for ``result.extras``. ``loss_sums``: see `JoinedShards.loss_sums`."""
    total, normalizer, *parts = loss_sums.tolist()
    sums = {"total": total, **dict(zip(names, parts))}
    return {f"val/{name}": value / max(normalizer, 1.0) for name, value in sums.items()}


def _to_host(detections: Detections) -> Detections:
    return Detections(*(values.cpu() for values in detections))
