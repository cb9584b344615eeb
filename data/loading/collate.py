"""Renders a requested batch: its samples, which are collated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from data.samples.dataset import LoadImagesAndLabels
from utils.batches import Batch, BatchRequest, Sample, Targets


def render_batch(samples: LoadImagesAndLabels, request: BatchRequest, pixels: np.ndarray | None = None) -> Batch:
    """Renders a batch. ``pixels`` (B, H, W, C): memory for its images; None to allocate it."""
    if pixels is None:
        pixel_format = samples.sample_index.pixels
        pixels = np.empty((len(request.images), *request.canvas_hw, pixel_format.channels), pixel_format.dtype)
    if len(request.images) < len(request.keys):  # some images consist of four samples
        return collate_quad(samples.render(request), request, pixels)
    return collate(samples.render(request, list(pixels)), pixels)


def collate(samples: Sequence[Sample], pixels: np.ndarray) -> Batch:
    """Collates samples into a batch, with images of shape (B, C, H, W) in the channels_last layout.

    The images are copied to ``pixels`` (B, H, W, C), unless they were rendered there.
    """
    for sample, out in zip(samples, pixels):
        if not np.may_share_memory(sample.image, out):  # it was not rendered in place
            out[:] = sample.image
    return Batch(
        images=torch.from_numpy(pixels).permute(0, 3, 1, 2),
        targets=Targets.from_labels([sample.labels for sample in samples]),
        indices=torch.tensor([s.index for s in samples], dtype=torch.int64),
        original_hw=torch.tensor([s.original_hw for s in samples], dtype=torch.int32).reshape(-1, 2),
        letterbox=torch.tensor([(*s.gain_xy, *s.pad_xy) for s in samples], dtype=torch.float64).reshape(-1, 4),
        paths=tuple(s.path for s in samples),
    )


def collate_quad(samples: Sequence[Sample], request: BatchRequest, pixels: np.ndarray) -> Batch:
    """Collates as `collate` does, but joins four samples of half the canvas size into one image (``--quad``)."""
    groups = [[samples[i] for i in members] for members in request.images]
    return collate([group[0] if len(group) == 1 else _side_by_side(group) for group in groups], pixels)


def _side_by_side(samples: Sequence[Sample]) -> Sample:
    """Joins four samples in two rows. The result has the index and the path of the first sample."""
    first, second, third, fourth = (sample.image for sample in samples)
    corners = np.array([[0, 0], [0.5, 0], [0, 0.5], [0.5, 0.5]], np.float32)
    labels = np.concatenate([sample.labels for sample in samples])
    labels[:, 1:] /= 2
    labels[:, 1:3] += np.repeat(corners, [len(sample.labels) for sample in samples], 0)
    image = np.vstack([np.hstack([first, second]), np.hstack([third, fourth])])
    return replace(samples[0], image=image, labels=labels)
