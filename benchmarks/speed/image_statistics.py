"""Measures the statistics and the rate of training images, for the loaders of both sides. Also imported in peers'
environments, so it only uses torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

NEUTRAL = 2  # levels between the channels of a gray pixel, at most
BRIGHTEST = 170  # that the gray of 114 around images may become; overexposed areas are flat too
PICTURED = 24  # batches that are looked at
SKIPPED = 10  # batches that lay ready while the other side had its turn


def describe(batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Statistics by which the strength of augmentation can be compared.

    Args:
        batches: uint8 (B, 3, H, W) and boxes (M, 4) cx, cy, w, h, normalized.
    """
    boxes, padding, brightness, saturation, pictures = [], [], [], [], 0
    for images, targets in batches:
        pictures += len(images)
        boxes.append(targets)
        brightest = images.amax(1)
        is_gray = (brightest - images.amin(1) <= NEUTRAL) & (brightest <= BRIGHTEST)
        is_flat = (images[..., 1:] == images[..., :-1]).all(1)
        padding.append((is_gray[..., 1:] & is_flat).float().mean((1, 2)))
        values = images.float() / 255
        high, low = values.amax(1), values.amin(1)
        brightness.append(high.mean((1, 2)))
        saturation.append(((high - low) / high.clamp(min=1e-6)).mean((1, 2)))
    widths, heights = torch.cat(boxes)[:, 2:].unbind(1)
    return {
        "boxes a picture": len(widths) / pictures,
        "box side, share of the picture": float((widths * heights).sqrt().mean()),
        "box width / height, log": float((widths / heights).log().mean()),
        "padding": float(torch.cat(padding).mean()),
        "brightness": float(torch.cat(brightness).mean()),
        "brightness, deviation between pictures": float(torch.cat(brightness).std()),
        "saturation": float(torch.cat(saturation).mean()),
        "saturation, deviation between pictures": float(torch.cat(saturation).std()),
    }


def rate_of(counts: Iterator[int], seconds: float) -> float:
    """Images per second over the next ``seconds``, without those that were ready before."""
    for _ in range(SKIPPED):
        next(counts)
    images, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        images += next(counts)
    return images / elapsed
