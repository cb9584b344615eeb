"""Mosaic and MixUp: chooses the images of each layer, and the corner of each image on the layer.

Mosaic (Bochkovskiy et al. 2020) pastes four images around a random point of a frame of twice the canvas' size. MixUp
(Zhang et al. 2018) blends two layers. All patches of a batch are computed at once, elementwise, so that none depends on
the others. Legend: L layers, M patches (images, or crops of them, on a layer), N images in the data set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.augment.transforms import Augmentation, SharedColumns
from utils.batches import SampleKey


class Mosaic(Augmentation):
    """``mosaic``: pastes four images around a point."""

    name = "mosaic"
    num_uniforms = 6
    columns = SharedColumns.MOSAIC
    _APPLY = 0  # columns of the random numbers: whether to apply it, which images to paste, and around which point
    _PARTNERS = slice(1, 4)
    _POINT = slice(4, 6)

    def choose_images(
        self,
        uniforms: np.ndarray,
        keys: Sequence[SampleKey],
        *,
        indices: Sequence[int],
        allow_mosaic: np.ndarray,
        pool: PartnerPool,
    ) -> list[list[int]]:
        """Chooses the images of each layer: one, or four.

        Args:
            uniforms: (L, 6) in [0, 1).
            indices: main image of each layer.
            allow_mosaic: bool (L,).
            pool: images to choose from.
        """
        is_mosaic = (uniforms[:, self._APPLY] < self.hyp.mosaic) & allow_mosaic
        partner_uniforms = uniforms[:, self._PARTNERS].tolist()
        return [
            [index, *choose_partners(row, index, key.block, pool)] if mosaic else [index]
            for row, index, key, mosaic in zip(partner_uniforms, indices, keys, is_mosaic.tolist())
        ]

    def corners(
        self,
        uniforms: np.ndarray,
        *,
        quadrants: np.ndarray,
        is_mosaic: np.ndarray,
        sizes: np.ndarray,
        canvas_wh: np.ndarray,
    ) -> np.ndarray:
        """Returns upper left corners (M, 2) on the frame: around a random point for a mosaic, otherwise centered.

        Args:
            uniforms: (M, 6), numbers of each patch's layer.
            quadrants: (M,), position in the mosaic, left to right, top to bottom.
            is_mosaic: bool (M,).
            sizes, canvas_wh: (M, 2).
        """
        points = np.floor((0.5 + uniforms[:, self._POINT]) * canvas_wh)
        ends_at_point = np.stack([quadrants % 2 == 0, quadrants < 2], 1)
        mosaic_corners = np.where(ends_at_point, points - sizes, points)
        return np.where(is_mosaic[:, None], mosaic_corners, np.floor((canvas_wh - sizes) / 2))


def choose_mixup(
    uniforms: np.ndarray, keys: Sequence[SampleKey], *, allow_mixup: np.ndarray, probability: float, pool: PartnerPool
) -> tuple[list[int], list[int]]:
    """Returns positions in ``keys`` of the samples to mix, and the main image of each one's second layer.

    ``uniforms``: (n, 2), the columns `SharedColumns.MIXUP`; ``allow_mixup``: bool (n,), whether a sample may be mixed.
    """
    mixed = np.flatnonzero(allow_mixup & (uniforms[:, 0] < probability)).tolist()
    partners = [choose_partners(uniforms[n, 1:].tolist(), keys[n].index, keys[n].block, pool)[0] for n in mixed]
    return mixed, partners


class PartnerPool:
    """Draws partners from all samples, each as often as it occurs in an epoch.

    ``weights``: float64 (N,), 0 for samples that are never drawn; see `data.samples.dataset.AugmentedImages`.
    """

    def __init__(self, weights: np.ndarray) -> None:
        self._ends = np.cumsum(weights)

    def draw(self, uniforms: Sequence[float]) -> list[int]:
        """Returns a sample for each of ``uniforms``, in [0, 1)."""
        total = self._ends[-1]
        positions = np.minimum(np.multiply(uniforms, total), np.nextafter(total, 0))  # a product may be rounded up
        return np.searchsorted(self._ends, positions, side="right").tolist()


def choose_partners(uniforms: Sequence[float], index: int, block: Sequence[int], pool: PartnerPool) -> list[int]:
    """Chooses an image to combine with ``index`` for each of ``uniforms``.

    Chooses from ``pool``, or from ``block`` if it is not empty, without repetition if it is large enough.
    """
    if not block:
        return pool.draw(uniforms)
    candidates: list[int] = []
    partners = []
    for uniform in uniforms:
        if not candidates:
            candidates = [i for i in block if i != index] or [index]
        partners.append(candidates.pop(int(uniform * len(candidates))))
    return partners
