"""Plans of images of several sizes, and the memory from which the torch renderer draws them."""

from __future__ import annotations

import numpy as np
import torch

from data.augment.plan import SamplePlan
from data.render.pyramid import PackedPixels
from data.render.table import RenderTable, build_table
from tests.helpers.synthetic_index import draw_plan
from utils.batches import SampleKey
from utils.config.settings import Hyperparameters

SIZES = np.array([(240, 320), (320, 240), (256, 256), (180, 300), (90, 120)])


def draw(hyp: Hyperparameters, count: int, canvas: tuple[int, int], *, first: int = 0) -> list[SamplePlan]:
    """Draws the plans of ``count`` positions of an epoch, from position ``first``."""
    keys = [SampleKey(p % len(SIZES), 0, p, canvas) for p in range(first, first + count)]
    return [draw_plan(key, source_hw=SIZES, hyp=hyp, seed=3, epochs=50) for key in keys]


def allocate(pixels: int) -> torch.Tensor:
    """Returns memory for the packed pixels of images, uint8 (pixels, 3)."""
    return torch.empty((pixels, 3), dtype=torch.uint8)


def packed(plans: list[SamplePlan], images: list[np.ndarray]) -> tuple[RenderTable, torch.Tensor]:
    """Returns the table of a batch, and the pixels of its images."""
    sources = PackedPixels(images.__getitem__, allocate)
    table = build_table(plans, plans[0].canvas_hw, np.array([i.shape[:2] for i in images]), sources)
    return table, sources.pixels
