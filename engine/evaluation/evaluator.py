"""Validation: every rank runs its share of the images, rank 0 scores them all.

The result is the same to the last bit on any number of ranks, given batches that do not depend on that number: boxes
are put in the order of the images before they are scored, and loss sums in the order of the batches before they are
added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.evaluation.average_precision import score_detections
from engine.evaluation.timer import StageClock
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.distributed.collectives import eval_mode, gather_arrays, unwrap
from utils.distributed.context import DistributedContext
from utils.structures import Batch, Detections, DetectionTable, EvalResult, GroundTruth

IMAGES_IN_CACHE = 4  # on a CPU; yolov8n at 640 px, float32, one thread: 0.78 s for 16 images, 0.93 s at once

Postprocess = Callable[[nn.Module, list[Tensor]], Detections]


class _Pending(NamedTuple):
    """Detections on their way to the host."""

    detections: Detections
    ready: torch.cuda.Event | None
    batch: Batch


class Evaluator:
    """Scores a model on a split.

    Args:
        ground_truth: labels of all images that the loaders of all ranks yield together, each once.
        num_classes: C.
        postprocess: model and its raw maps (float32) to detections in canvas pixels.
        ctx: this process's place; every rank must call `run`.
        device: where the model is.
        amp_dtype: autocast type of the forward pass, None for none.
        criterion: as in training, with ``names``; adds validation losses to the result.
        for_inference: the bare model to a faster one of the same outputs, made anew for each run; None: as it is.
        progress: wraps the loader to show how far it is.

    Attributes:
        detections: on rank 0, what the last run found, by image; None elsewhere and before.
        preview: the last run's first batch on this rank and its detections (canvas pixels), to be drawn.
    """

    def __init__(
        self,
        *,
        ground_truth: GroundTruth,
        num_classes: int,
        postprocess: Postprocess,
        ctx: DistributedContext,
        device: torch.device,
        amp_dtype: torch.dtype | None = None,
        criterion: nn.Module | None = None,
        for_inference: Callable[[nn.Module], nn.Module] | None = None,
        progress: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
    ) -> None:
        self._gt = ground_truth
        self._num_classes = num_classes
        self._postprocess = postprocess
        self._ctx = ctx
        self._device = torch.device(device)
        self._amp_dtype = amp_dtype
        self._criterion = criterion
        self._for_inference = for_inference or (lambda model: model)
        self._progress = progress
        self.detections: DetectionTable | None = None
        self.preview: tuple[Batch, Detections] | None = None

    def run(
        self, model: nn.Module, loader: Iterable[Batch], *, should_stop: Callable[[], bool] = lambda: False
    ) -> EvalResult | None:
        """Scores ``model`` on ``loader``; the result on rank 0, None elsewhere. Modes of training are left as found.

        ``should_stop`` is asked before each batch. Once it says so on any rank, that rank leaves its other batches out,
        and there is no result.

        ``result.extras`` holds ``ms/inference`` and ``ms/nms`` (an image, on one device), ``ms/total`` (an image, wall
        clock over all ranks), ``data_wait`` (share of the time spent waiting for batches), and with a criterion
        ``val/total`` and ``val/<part>``: sums over all images divided by the sum of the normalisers.
        """
        self.detections, self.preview = None, None
        with eval_mode(self._for_inference(unwrap(model))) as bare, without_kernel_search():
            gathered = gather_arrays(self._ctx, self._run_share(bare, loader, should_stop))
        if gathered is None or not all(share["complete"].all() for share in gathered):
            return None
        arrays = {key: np.concatenate([share[key] for share in gathered]) for key in gathered[0]}
        self.detections = self._merge(arrays)
        result = score_detections(self._gt, self.detections, self._num_classes)
        result.extras.update(self._timing(arrays) | self._losses(arrays))
        return result

    @torch.no_grad()
    def _run_share(
        self, model: nn.Module, loader: Iterable[Batch], should_stop: Callable[[], bool]
    ) -> dict[str, np.ndarray]:
        clock = StageClock(self._device)
        channels_last = is_channels_last(model)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        tables: list[DetectionTable] = []
        seen: list[np.ndarray] = []
        first_image: list[int] = []
        losses: list[Tensor] = []
        pending: _Pending | None = None
        complete = True
        started = time.perf_counter()
        for batch in clock.waits(self._progress(loader)):
            if should_stop():
                complete = False
                break
            if batch.images.shape[0] == 0:
                continue
            seen.append(batch.indices.numpy())
            images = to_float(batch.images, self._device, dtype, channels_last)
            with (
                clock.stage("inference"),
                torch.autocast(self._device.type, self._amp_dtype, enabled=self._amp_dtype is not None),
            ):
                raw = [level.float() for level in _in_parts(model, images)]
            with clock.stage("nms"):
                detections = self._postprocess(model, raw)
            if self._criterion is not None:
                first_image.append(int(batch.indices[0]))
                losses.append(self._loss_sums(raw, batch))
            # The copy is read one batch later, when it has had time to arrive.
            if pending is not None:
                tables.append(_to_table(pending))
            pending = self._send(detections, batch)
            self.preview = self.preview or (batch, pending.detections)
        if pending is not None:
            tables.append(_to_table(pending))
        seconds = clock.seconds() | {"total": time.perf_counter() - started}
        parts = 2 + len(getattr(self._criterion, "names", ()))
        return {
            "image_index": _join([t.image_index for t in tables], np.int64),
            "boxes": _join([t.boxes_xyxy_px for t in tables], np.float64).reshape(-1, 4),
            "scores": _join([t.scores for t in tables], np.float64),
            "classes": _join([t.classes for t in tables], np.int64),
            "seen": _join(seen, np.int64),
            "complete": np.array([complete]),
            "loss_batch": np.array(first_image, dtype=np.int64),
            "loss_sums": torch.stack(losses).double().cpu().numpy() if losses else np.zeros((0, parts)),
            "seconds": np.array([[seconds.get(k, 0.0) for k in ("inference", "nms", "wait", "total")]]),
        }

    def _loss_sums(self, raw: list[Tensor], batch: Batch) -> Tensor:
        """float (2 + P,): total, normaliser, parts."""
        targets = batch.targets.to(self._device, non_blocking=True)
        output = self._criterion(raw, targets, batch.max_targets, batch.targets.numpy())
        return torch.cat([torch.stack([output.total.float(), output.normaliser.float()]), output.parts.float()])

    def _send(self, detections: Detections, batch: Batch) -> _Pending:
        if self._device.type != "cuda":
            return _Pending(Detections(*(t.cpu() for t in detections)), None, batch)
        host = Detections(*(t.to("cpu", non_blocking=True) for t in detections))  # into pinned memory
        ready = torch.cuda.Event()
        ready.record()
        return _Pending(host, ready, batch)

    def _merge(self, arrays: dict[str, np.ndarray]) -> DetectionTable:
        """All ranks' detections in the order of the images, those of an image as they came."""
        visits = np.bincount(arrays["seen"], minlength=self._gt.num_images)
        if visits.size != self._gt.num_images or not (visits == 1).all():
            raise RuntimeError(f"{self._gt.num_images} images were to be seen once each; visits: {visits.tolist()}")
        order = np.argsort(arrays["image_index"], kind="stable")
        return DetectionTable(*(arrays[k][order] for k in ("image_index", "boxes", "scores", "classes")))

    def _timing(self, arrays: dict[str, np.ndarray]) -> dict[str, float]:
        inference, nms, wait, total = arrays["seconds"].T
        images = max(self._gt.num_images, 1)
        return {
            "ms/inference": float(inference.sum() / images * 1000),
            "ms/nms": float(nms.sum() / images * 1000),
            "ms/total": float(total.max() / images * 1000),
            "data_wait": float(wait.sum() / max(total.sum(), 1e-9)),
        }

    def _losses(self, arrays: dict[str, np.ndarray]) -> dict[str, float]:
        if self._criterion is None:
            return {}
        sums = arrays["loss_sums"][np.argsort(arrays["loss_batch"])].sum(0)
        names = ("total", *self._criterion.names)
        values = np.delete(sums, 1) / max(sums[1], 1.0)
        return {f"val/{name}": float(value) for name, value in zip(names, values)}


@contextmanager
def without_kernel_search() -> Iterator[None]:
    """Keeps cuDNN from timing its kernels for each new size, which takes longer than a batch of that size: rectangular
    batches have many. Sizes that training has met keep the kernels that were found for them."""
    searched = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searched


def is_channels_last(model: nn.Module) -> bool:
    """True when the convolution kernels lie in NHWC memory (1 x 1 kernels could be either and do not count)."""
    return any(
        p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        for p in model.parameters()
    )


def to_float(images: Tensor, device: torch.device, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """uint8 (B, 3, H, W) to [0, 1] on ``device``; the copy to the device is of bytes."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(device, non_blocking=True).to(dtype, memory_format=layout).div_(255)


def _in_parts(model: nn.Module, images: Tensor) -> list[Tensor]:
    """``model(images)``, on a CPU a few images at a time: what a layer writes is then still in the cache when the next
    one reads it."""
    parts = [model(part) for part in images.split(IMAGES_IN_CACHE if images.device.type == "cpu" else len(images))]
    return parts[0] if len(parts) == 1 else [torch.cat(levels) for levels in zip(*parts)]


def _to_table(pending: _Pending) -> DetectionTable:
    """Detections of one batch in original pixels, clipped to the image."""
    if pending.ready is not None:
        pending.ready.synchronize()
    boxes, scores, classes, counts = (t.numpy() for t in pending.detections)
    batch = pending.batch
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


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)
