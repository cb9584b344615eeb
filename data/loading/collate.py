"""Samples to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.sampler import Cell
from utils.structures import Batch, Sample, bucketed


def collate(samples: Sequence[Sample], cells: Sequence[Cell], pixels: Tensor) -> Batch:
    """A batch of samples, each in its cell of a picture. Several samples in a picture carry the first one's identity.

    Images are stored (B, H, W, 3) and seen as (B, 3, H, W): the channels_last layout, without a copy.

    Args:
        samples, cells: the samples and their cells, pictures in order.
        pixels: uint8 (B, H, W, 3); samples that were rendered into it are not copied.
    """
    for sample, out in zip(samples, cell_views(pixels.numpy(), cells)):
        if not np.may_share_memory(sample.image, out):
            out[:] = sample.image
    targets = _targets(samples, cells)
    counts = np.bincount(targets[:, 0].astype(np.int64), minlength=len(pixels)).tolist()
    firsts = [sample for sample, cell in zip(samples, cells) if cell.row == cell.column == 0]
    return Batch(
        images=pixels.permute(0, 3, 1, 2),
        targets=torch.from_numpy(targets),
        max_targets=bucketed(max(counts, default=0)),
        indices=torch.tensor([s.index for s in firsts], dtype=torch.int64),
        original_hw=torch.tensor([s.original_hw for s in firsts], dtype=torch.int32).reshape(-1, 2),
        letterbox=torch.tensor([(*s.gain_xy, *s.pad_xy) for s in firsts], dtype=torch.float64).reshape(-1, 4),
        paths=tuple(s.path for s in firsts),
        counts=tuple(counts),
    )


def cell_views(pixels: np.ndarray, cells: Sequence[Cell]) -> list[np.ndarray]:
    """The part (h, w, 3) of ``pixels`` (B, H, W, 3) that belongs to each cell."""
    views = []
    for cell in cells:
        height, width = pixels.shape[1] // cell.grid[0], pixels.shape[2] // cell.grid[1]
        top, left = cell.row * height, cell.column * width
        views.append(pixels[cell.picture, top : top + height, left : left + width])
    return views


def _targets(samples: Sequence[Sample], cells: Sequence[Cell]) -> np.ndarray:
    """float32 (M, 6) as `Batch.targets`, from labels normalised to the cells."""
    if not samples:
        return np.zeros((0, 6), np.float32)
    labels = np.concatenate([sample.labels for sample in samples])
    frames = [(cell.picture, *cell.grid[::-1], cell.column / cell.grid[1], cell.row / cell.grid[0]) for cell in cells]
    frame = np.repeat(np.array(frames, np.float32), [len(sample.labels) for sample in samples], 0)
    targets = np.concatenate([frame[:, :1], labels], 1)
    targets[:, 2:] /= np.tile(frame[:, 1:3], 2)
    targets[:, 2:4] += frame[:, 3:]
    return targets
