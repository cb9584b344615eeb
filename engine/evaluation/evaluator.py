"""Validation: each rank runs the model on its shard of the images, and rank 0 scores all detections.

If the batches do not depend on the number of ranks, neither does any bit of the result: boxes are sorted by image
before they are scored, and float64 adds the float32 losses of batches without rounding, in any order.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from data.loading.prefetcher import Prefetcher
from engine.evaluation.metrics import score_detections
from engine.evaluation.result import Evaluation, Preview
from models.detector import CPU_CHUNK, Detector
from models.losses.base import LossOutput
from models.modules import eval_mode, unwrap
from models.postprocess.detections import Selected
from models.postprocess.selection import ValidationSettings
from models.postprocess.tiles import TileStitcher
from utils.batches import Batch, to_float
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.detections import Detections, DetectionTable, to_host
from utils.distributed.context import DistributedContext, gather_on_main
from utils.labels import GroundTruth

if TYPE_CHECKING:
    from data.loading.loader import ValidationLoader
    from models.losses.base import Criterion

Postprocess = Callable[[nn.Module, list[Tensor]], Selected]
PHASES = ("inference", "nms", "wait", "total")  # whose seconds are measured
_COLUMNS = DetectionTable.__slots__


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluator:
    """Scores a model on a split."""

    ground_truth: GroundTruth  # objects in all images; the loaders of all ranks together yield each image once
    num_classes: int
    # Maps the model and its raw outputs (float32) to detections in canvas pixels, see
    # `models.postprocess.detections.select_for_validation`.
    postprocess: Postprocess
    ctx: DistributedContext  # this process, with the model's device; every rank must call `run`
    amp_dtype: torch.dtype | None = None  # autocast type of the forward pass; None: no autocast
    tiles: TileStitcher | None = None  # joins the detections in tiles, if the loaders yield tiles instead of images
    criterion: Criterion | None = None  # as in training; adds validation losses to the result
    fuses: bool = False  # fuse the model, a `Detector`, for each run
    chosen_confidence: float | None = None  # of P, R and F1, see `score_detections`
    protocol: str = ""  # how AP is measured, for the result; see `protocol_text`
    progress: Callable[[Iterable[Batch]], Iterable[Batch]] = iter  # wraps the loader in a progress bar

    def run(
        self, model: nn.Module, loader: Iterable[Batch], *, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Scores ``model`` on ``loader``. Modules keep their training modes.

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
            arrays, preview = self._run_shard(bare, loader, should_stop)
        shards = gather_on_main(self.ctx, arrays)
        if shards is None:
            return None
        arrays = shards[0] if len(shards) == 1 else _concatenated(shards)
        return self._score(arrays, preview) if arrays["is_complete"].all() else None

    @torch.no_grad()
    def _run_shard(
        self, model: nn.Module, loader: Iterable[Batch], should_stop: Callable[[], bool]
    ) -> tuple[dict[str, np.ndarray], Preview | None]:
        """Runs the model on this rank's batches. Returns arrays that can be concatenated over ranks, and the preview.

        The arrays are the columns of each selection of `Selected`, ``visited`` images, ``is_complete``, the seconds of
        `PHASES`, and of each batch with a loss (2 + P,) total, normalizer and parts.
        """
        timer = PhaseTimer(self.ctx.device)
        channels_last = is_channels_last(model)
        is_complete = True
        preview: Preview | None = None
        tables: dict[str, list[DetectionTable]] = {name: [] for name in Selected._fields}
        visited = [np.zeros(0, np.int64)]
        losses: list[Tensor] = []
        started = time.perf_counter()
        batches = Prefetcher(iter(self.progress(loader)), device=self.ctx.device)
        for batch in batches:
            if should_stop():
                is_complete = False
                break
            if batch.images.shape[0] == 0:
                continue
            images = to_float(batch.images, self.ctx.device, torch.float32, channels_last)
            with timer.phase("inference"), self._autocast():
                raw = [level.float() for level in _forward_in_chunks(model, images)]
            batches.prefetch(1)  # before NMS, for which the host waits
            with timer.phase("nms"):
                selected = self.postprocess(model, raw)
            selected = Selected(*to_host(*selected))
            if preview is None:
                preview = Preview.of(batch, selected.detected)
            for name, detections in selected._asdict().items():
                tables[name].append(_to_table(detections, batch))
            visited.append(batch.indices.numpy())
            if self.criterion is not None:
                losses.append(self._loss(self.criterion, raw, images, batch))
        seconds = timer.seconds() | {"wait": batches.pop_wait_time(), "total": time.perf_counter() - started}
        arrays = {
            "visited": np.concatenate(visited),
            "is_complete": np.array([is_complete]),
            "seconds": np.array([[seconds.get(name, 0.0) for name in PHASES]]),
            "losses": np.zeros((0, 2 + (len(self.criterion.names) if self.criterion else 0))),
        }
        if losses:
            arrays["losses"] = torch.stack(losses).double().cpu().numpy()
        if self.tiles is not None and is_complete:
            arrays["visited"] = self.tiles.images_of(arrays["visited"])
        # Tables take gigabytes for a large split: those of batches are released one selection after another.
        for number, name in enumerate(Selected._fields):
            table = DetectionTable.concatenate(tables.pop(name))
            if self.tiles is not None and is_complete:
                table = self.tiles.stitch(table, self.tiles.settings[number])
            for column in _COLUMNS:
                arrays[f"{name}/{column}"] = getattr(table, column)
        return arrays, preview

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ctx.device.type, self.amp_dtype, enabled=self.amp_dtype is not None)

    def _loss(self, criterion: Criterion, raw: list[Tensor], images: Tensor, batch: Batch) -> Tensor:
        """Returns total, normalizer and parts of the loss of the raw maps of ``images``: float32 (2 + P,)."""
        with self._autocast():
            teacher_maps = criterion.teacher_maps(images)
        loss: LossOutput = criterion(raw, batch.targets, teacher_maps)
        scalars = torch.stack([loss.total.float(), loss.normalizer.float()])
        return torch.cat([scalars, loss.parts.float()])

    def _score(self, arrays: dict[str, np.ndarray], preview: Preview | None) -> Evaluation:
        """Scores the detections of all ranks, and takes them from ``arrays``."""
        self._check_visits(arrays["visited"])
        for_ap = _sorted_table(arrays, "for_ap")
        detected = _sorted_table(arrays, "detected")
        scores = score_detections(self.ground_truth, for_ap, self.num_classes, detected, self.chosen_confidence)
        result = replace(scores.result, protocol=self.protocol)
        result.extras.update(self._times(arrays["seconds"]))
        if self.criterion is not None:
            total, normalizer, *parts = arrays["losses"].sum(0).tolist()
            sums = {"total": total, **dict(zip(self.criterion.names, parts))}
            result.extras.update({f"val/{name}": value / max(normalizer, 1.0) for name, value in sums.items()})
        return Evaluation(result, *scores[1:], for_ap, detected, preview)

    def _check_visits(self, visited: np.ndarray) -> None:
        """Raises RuntimeError unless the loaders of all ranks have yielded each image once."""
        images = self.ground_truth.num_images
        counts = np.bincount(visited, minlength=images)
        if counts.size != images or not (counts == 1).all():
            wrong = np.flatnonzero(counts != 1)
            first = ", ".join(f"image {i}: {counts[i]}" for i in wrong[:10].tolist())
            raise RuntimeError(f"expected {images} images exactly once each, {len(wrong)} had other counts ({first})")

    def _times(self, seconds: np.ndarray) -> dict[str, float]:
        """Returns the times for ``result.extras``. ``seconds``: (ranks, 4), columns as in `PHASES`."""
        inference, nms, wait, total = seconds.T
        per_image = 1000 / max(self.ground_truth.num_images, 1)
        return {
            "ms/inference": float(inference.sum() * per_image),
            "ms/nms": float(nms.sum() * per_image),
            "ms/total": float(total.max() * per_image),
            "data_wait": float(wait.sum() / max(total.sum(), 1e-9)),
        }


def tile_stitcher(loader: ValidationLoader, nms_iou: float | None, settings: ValidationSettings) -> TileStitcher | None:
    """Returns what joins the detections in tiles; None if ``loader`` yields whole images. ``nms_iou``: the model's."""
    tiles = loader.samples.tiles
    if tiles is None:
        return None
    return TileStitcher(tiles.image, tiles.windows, settings.selections(nms_iou))


class PhaseTimer:
    """Measures the phases of a loop over batches. On CUDA it records events, so that the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._totals: dict[str, float] = defaultdict(float)  # seconds
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the duration of the block to phase ``name``."""
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            started = self._now()
            yield
            self._totals[name] += self._now() - started

    def _now(self) -> float:
        if self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Returns the totals of all phases so far. Waits for the device."""
        totals = dict(self._totals)
        if self._events:
            torch.cuda.synchronize(self._device)
        for name, start, end in self._events:
            totals[name] = totals.get(name, 0.0) + start.elapsed_time(end) / 1000
        return totals


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


def _to_table(detections: Detections, batch: Batch) -> DetectionTable:
    """Converts detections of a batch, on the host, to original pixels, clipped to the image."""
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


def _concatenated(shards: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenates the arrays of all ranks, and removes them from ``shards``."""
    return {key: np.concatenate([shard.pop(key) for shard in shards]) for key in list(shards[0])}


def _sorted_table(arrays: dict[str, np.ndarray], name: str) -> DetectionTable:
    """Takes the detections of a selection from ``arrays``, sorted by image."""
    table = DetectionTable(*(arrays.pop(f"{name}/{column}") for column in _COLUMNS))
    image = table.image_index
    if (image[1:] >= image[:-1]).all():  # one rank has seen all images in order; sorting would copy the table
        return table
    return table.take(np.argsort(image, kind="stable"))
