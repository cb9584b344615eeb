"""Validation: each rank runs the model on its shard of the images, rank 0 scores all detections.

If the batches do not depend on the number of ranks, neither does any bit of the result: boxes are sorted by image
before they are scored, and loss sums by batch before they are added.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from data.loading.prefetcher import Prefetcher
from engine.evaluation.metrics import score_detections
from models.detector import IMAGES_IN_CACHE
from models.postprocess.detections import (
    SELECTIONS,
    SHOWN,
    ValidationSettings,
    iou_of_selections,
    select_for_validation,
)
from models.postprocess.stitching import TileStitcher
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.distributed.context import DistributedContext, eval_mode, gather_arrays, unwrap
from utils.structures import Batch, Detections, DetectionTable, EvalResult, GroundTruth, to_float

if TYPE_CHECKING:
    from data.loading.loader import ValidationLoader
    from models.losses.base import Criterion

Stitch = Callable[[DetectionTable, np.ndarray], tuple[DetectionTable, np.ndarray]]
Postprocess = Callable[[nn.Module, list[Tensor]], dict[str, Detections]]


class PhaseTimer:
    """Seconds by phase of a loop over batches; on CUDA by events on the current stream, so that the host does not
    wait."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._phases = device, list[tuple[str, Any, Any]]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._phases.append((name, start, self._now()))

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Totals so far; waits for the device."""
        on_gpu, totals = self._device.type == "cuda", defaultdict[str, float](float)
        if on_gpu:
            torch.cuda.synchronize(self._device)
        for name, start, end in self._phases:
            totals[name] += start.elapsed_time(end) / 1000 if on_gpu else end - start
        return totals


@dataclass(kw_only=True, eq=False)
class Evaluator:
    """Scores a model on a split.

    ``detections`` and ``shown`` are those of the last run, by image, on rank 0: what is scored, and what detection
    shows. ``preview`` is the last run's first batch on this rank and what detection shows in it, in canvas pixels.
    """

    ground_truth: GroundTruth  # of all images; the loaders of all ranks together yield each image once
    num_classes: int
    # Maps the model and its raw outputs (float32) to detections in canvas pixels: `SCORED`, `SHOWN` and `PLAIN`, see
    # `models.postprocess.detections.select_for_validation`.
    postprocess: Postprocess
    ctx: DistributedContext  # of this process, with the model's device; every rank must call `run`
    amp_dtype: torch.dtype | None = None  # autocast type of the forward pass; None: no autocast
    # By the names of ``postprocess``: joins the detections of tiles, which the loaders then yield instead of images.
    stitch: Mapping[str, Stitch] | None = None
    criterion: Criterion | None = None  # as in training, with ``names``; adds validation losses to the result
    fuses: bool = False  # whether the model is fused for each run, see `Detector.fuse`
    progress: Callable[[Iterable[Batch]], Iterable[Batch]] = iter  # wraps the loader to show the progress
    detections: DetectionTable | None = field(default=None, init=False)
    shown: DetectionTable | None = field(default=None, init=False)
    preview: tuple[Batch, Detections] | None = field(default=None, init=False)

    def run(
        self, model: nn.Module, loader: Iterable[Batch], *, should_stop: Callable[[], bool] = lambda: False
    ) -> EvalResult | None:
        """Scores ``model`` on ``loader``: the result on rank 0, None elsewhere. Modules keep their training modes.

        ``should_stop`` is called before each batch; once it is true on a rank, there is no result.

        ``result.extras`` holds, per image, ``ms/inference`` and ``ms/nms`` (of one device) and ``ms/total`` (wall clock
        of all ranks); ``data_wait``, the fraction of time spent waiting for batches; and with a criterion ``val/total``
        and ``val/<part>``, sums over all images divided by the sum of the normalizers.
        """
        self.detections = None
        self.shown = None
        self.preview = None
        model = unwrap(model)
        with eval_mode(model.fuse(one_to_one=None) if self.fuses else model) as bare:
            gathered = gather_arrays(self.ctx, self._run_shard(bare, loader, should_stop))
        if gathered is None or not all(shard["complete"].all() for shard in gathered):
            return None
        arrays = {key: np.concatenate([shard[key] for shard in gathered]) for key in gathered[0]}
        images = self.ground_truth.num_images
        visits = np.bincount(arrays["seen"], minlength=images)
        if visits.size != images or not (visits == 1).all():
            raise RuntimeError(f"{images} images were to be seen once each; visits: {visits.tolist()}")
        self.detections, self.shown, plain = (_table_of(arrays, name) for name in SELECTIONS)
        result = score_detections(self.ground_truth, self.detections, self.num_classes, shown=self.shown, plain=plain)
        inference, nms, wait, total = arrays["seconds"].T
        milliseconds = {"inference": inference.sum(), "nms": nms.sum(), "total": total.max()}
        result.extras.update({f"ms/{name}": float(s / max(images, 1) * 1000) for name, s in milliseconds.items()})
        result.extras["data_wait"] = float(wait.sum() / max(total.sum(), 1e-9))
        if self.criterion is not None:
            total, normalizer, *parts = arrays["loss_sums"][np.argsort(arrays["loss_batch"])].sum(0).tolist()
            losses = zip(("total", *self.criterion.names), (total, *parts))
            result.extras.update({f"val/{name}": value / max(normalizer, 1.0) for name, value in losses})
        return result

    @torch.no_grad()
    def _run_shard(
        self, model: nn.Module, loader: Iterable[Batch], should_stop: Callable[[], bool]
    ) -> dict[str, np.ndarray]:
        timer = PhaseTimer(self.ctx.device)
        channels_last = is_channels_last(model)
        tables = defaultdict[str, list[DetectionTable]](list)
        seen: list[np.ndarray] = []
        first_image: list[int] = []
        losses: list[Tensor] = []
        complete = True
        started = time.perf_counter()
        batches = Prefetcher(iter(self.progress(loader)), device=self.ctx.device)
        for batch in batches:
            if should_stop():
                complete = False
                break
            if batch.images.shape[0] == 0:
                continue
            seen.append(batch.indices.numpy())
            images = to_float(batch.images, self.ctx.device, torch.float32, channels_last)
            with (
                timer.phase("inference"),
                torch.autocast(self.ctx.device.type, self.amp_dtype, enabled=self.amp_dtype is not None),
            ):
                raw = [level.float() for level in _in_parts(model, images)]
                teacher_maps = self.criterion.teacher_maps(images) if self.criterion else None
            batches.prefetch(1)  # before NMS, for which the host waits
            with timer.phase("nms"):
                selected = self.postprocess(model, raw)
            selected = {name: Detections(*(t.cpu() for t in found)) for name, found in selected.items()}
            if self.criterion is not None:
                first_image.append(int(batch.indices[0]))
                output = self.criterion(raw, batch.targets, teacher_maps)
                sums = torch.stack([output.total.float(), output.normalizer.float()])
                losses.append(torch.cat([sums, output.parts.float()]))
            for name, detections in selected.items():
                tables[name].append(_to_table(detections, batch))
            self.preview = self.preview or (batch, selected[SHOWN])
        seconds = timer.seconds() | {"wait": batches.take_wait(), "total": time.perf_counter() - started}
        found = {name: DetectionTable.concatenate(tables[name]) for name in SELECTIONS}
        visited = np.concatenate([np.zeros(0, np.int64), *seen])
        if self.stitch is not None and complete:
            tiles = visited
            for name, stitch in self.stitch.items():
                found[name], visited = stitch(found[name], tiles)
        parts = 2 + len(getattr(self.criterion, "names", ()))
        return {
            **{f"{name}/{part}": getattr(found[name], part) for name in found for part in DetectionTable.__slots__},
            "seen": visited,
            "complete": np.array([complete]),
            "loss_batch": np.array(first_image, dtype=np.int64),
            "loss_sums": torch.stack(losses).double().cpu().numpy() if losses else np.zeros((0, parts)),
            "seconds": np.array([[seconds.get(k, 0.0) for k in ("inference", "nms", "wait", "total")]]),
        }


def training_evaluator(
    ctx: DistributedContext, model: nn.Module, criterion: Criterion, loader: ValidationLoader
) -> Evaluator:
    """Validates averaged weights of ``model`` as val.py does, in float32 whatever the type of training, and with the
    loss: the threshold that it finds is used in float32. ``loader``: what will be evaluated."""
    return Evaluator(
        ground_truth=loader.index.ground_truth(),
        num_classes=model.num_classes,
        postprocess=select_for_validation,
        ctx=ctx,
        fuses=True,
        stitch=stitchers_of(loader, model.nms_iou, ValidationSettings()),
        criterion=criterion,
    )


def stitchers_of(
    loader: ValidationLoader, nms_iou: float | None, settings: ValidationSettings
) -> dict[str, Stitch] | None:
    """What joins the detections in tiles; None if ``loader`` yields whole images. ``nms_iou``: of the model."""
    tiles = loader.samples.tiles
    if tiles is None:
        return None
    ious = iou_of_selections(nms_iou, settings)
    return {name: TileStitcher(tiles.image, tiles.windows, ious[name], settings.max_det) for name in ious}


def is_channels_last(model: nn.Module) -> bool:
    """Whether convolution kernels are in NHWC memory format (1 x 1 kernels are in both and do not count)."""
    return any(
        p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        for p in model.parameters()
    )


def _in_parts(model: nn.Module, images: Tensor) -> list[Tensor]:
    """``model(images)``; on a CPU a few images at a time, so that a layer's output is still in the cache when the next
    layer reads it."""
    parts = [model(part) for part in images.split(IMAGES_IN_CACHE if images.device.type == "cpu" else len(images))]
    return parts[0] if len(parts) == 1 else [torch.cat(levels) for levels in zip(*parts)]


def _table_of(arrays: dict[str, np.ndarray], name: str) -> DetectionTable:
    """The table ``name`` of a rank's or all ranks' arrays, by image."""
    found = DetectionTable(*(arrays[f"{name}/{part}"] for part in DetectionTable.__slots__))
    return found.take(np.argsort(found.image_index, kind="stable"))


def _to_table(detections: Detections, batch: Batch) -> DetectionTable:
    """Detections of a batch, on the host, in original pixels, clipped to the image."""
    boxes, scores, classes, counts = (t.numpy() for t in detections)
    row, slot = np.nonzero(np.arange(boxes.shape[1]) < counts[:, None])
    gains_and_pads = batch.letterbox.numpy()[row].T
    height, width = batch.original_hw.numpy().astype(np.float64)[row].T
    original = letterbox_to_original(boxes[row, slot].astype(np.float64), *gains_and_pads)
    return DetectionTable(
        image_index=batch.indices.numpy().astype(np.int64)[row],
        boxes_xyxy_px=clip_xyxy(original, width, height),
        scores=scores[row, slot].astype(np.float64),
        classes=classes[row, slot].astype(np.int64),
    )
