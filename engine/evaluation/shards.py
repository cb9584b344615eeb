"""Detections and losses of the batches of one rank (`Shard`), and of all ranks (`JoinedShards`).

Between the two they are flat arrays, which are gathered on rank 0. For a large split they take gigabytes, so they are
released as soon as they have been joined or taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from engine.evaluation.result import Preview
from models.losses.base import LossOutput
from models.postprocess.selection import SELECTIONS, SHOWN
from utils.batches import Batch
from utils.boxes import clip_xyxy, letterbox_to_original
from utils.detections import Detections, DetectionTable

Stitch = Callable[[DetectionTable, np.ndarray], tuple[DetectionTable, np.ndarray]]
TIMES = ("inference", "nms", "wait", "total")  # seconds on a rank


class Shard:
    """Detections and losses of one rank's batches.

    Attributes:
        is_complete: False if the rank has left out batches, because it was told to stop.
        seconds: `TIMES` of the rank, set at the end.
        preview: the first batch.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self.seconds = [0.0] * len(TIMES)
        self.preview: Preview | None = None
        self._tables: dict[str, list[DetectionTable]] = defaultdict(list)  # keys: the names of `SELECTIONS`
        self._visited = [np.zeros(0, np.int64)]  # indices of images, or of tiles, of each batch
        self._first_images: list[int] = []  # first image of each batch with a loss; orders the batches of all ranks
        self._loss_sums: list[Tensor] = []  # (2 + P,) total, normalizer and parts

    def add(self, batch: Batch, selections: Mapping[str, Detections], loss: LossOutput | None) -> None:
        """Adds a batch. ``selections``: detections on the host, by the names of `SELECTIONS`."""
        if self.preview is None:
            self.preview = Preview.of(batch, selections[SHOWN])
        self._visited.append(batch.indices.numpy())
        for name, detections in selections.items():
            self._tables[name].append(_to_table(detections, batch))
        if loss is not None:
            self._first_images.append(int(batch.indices[0]))
            scalars = torch.stack([loss.total.float(), loss.normalizer.float()])
            self._loss_sums.append(torch.cat([scalars, loss.parts.float()]))

    def take_arrays(self, *, num_losses: int, stitch: Mapping[str, Stitch] | None) -> dict[str, np.ndarray]:
        """Returns arrays that can be concatenated over ranks, for `JoinedShards`, and releases the detections.

        Args:
            num_losses: number of parts of the loss.
            stitch: see `Evaluator`.
        """
        # The tables of batches are released one name after another, because they take gigabytes for a large split.
        tables = {name: DetectionTable.concatenate(self._tables.pop(name, [])) for name in SELECTIONS}
        visited = np.concatenate(self._visited)
        if stitch is not None and self.is_complete:
            tiles = visited
            for name, join_tiles in stitch.items():
                tables[name], visited = join_tiles(tables[name], tiles)
        loss_sums = np.zeros((0, 2 + num_losses))
        if self._loss_sums:
            loss_sums = torch.stack(self._loss_sums).double().cpu().numpy()
        arrays = {
            "visited": visited,
            "is_complete": np.array([self.is_complete]),
            "first_images": np.array(self._first_images, dtype=np.int64),
            "loss_sums": loss_sums,
            "seconds": np.array([self.seconds]),
        }
        for name, table in tables.items():
            for column in DetectionTable.__slots__:
                arrays[f"{name}/{column}"] = getattr(table, column)
        return arrays


class JoinedShards:
    """The shards of all ranks.

    Attributes:
        is_complete: whether all ranks have seen all their batches.
        visited: int64 (N,), indices of the images in these batches.
        seconds: float64 (ranks, 4), `TIMES`.
    """

    def __init__(self, shards: list[dict[str, np.ndarray]]) -> None:
        """``shards``: the result of `Shard.take_arrays` on each rank; they are emptied."""
        self._arrays = _joined(shards)
        self.is_complete = bool(self._arrays["is_complete"].all())
        self.visited = self._arrays["visited"]
        self.seconds = self._arrays["seconds"]

    def take_table(self, name: str) -> DetectionTable:
        """Returns the detections ``name``, one of `SELECTIONS`, sorted by image, and releases them."""
        table = DetectionTable(*(self._arrays.pop(f"{name}/{column}") for column in DetectionTable.__slots__))
        image = table.image_index
        if (image[1:] >= image[:-1]).all():  # one rank has seen all images in order; sorting would copy the table
            return table
        return table.take(np.argsort(image, kind="stable"))

    def loss_sums(self) -> np.ndarray:
        """Returns the total, the normalizer and the parts of the loss, float64 (2 + P,), added in an order of the
        batches that does not depend on the number of ranks."""
        in_order = np.argsort(self._arrays["first_images"])
        return self._arrays["loss_sums"][in_order].sum(0)


def _joined(shards: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenates the arrays of all ranks, and removes them from ``shards``."""
    if len(shards) == 1:
        return shards[0]
    return {key: np.concatenate([shard.pop(key) for shard in shards]) for key in list(shards[0])}


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
