"""The base class of augmentations, and the random numbers that they draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from utils.batches import SampleKey
from utils.config.settings import Hyperparameters
from utils.rng import Stream, keyed_uniforms, named_stream


class SharedColumns:
    """Columns of the random stream that the built-in augmentations share.

    The numbers of a sample's first layer come first, then as many for a second layer, then the mixing numbers. All are
    always drawn, so that changing one probability affects no other choice.
    """

    MOSAIC = slice(0, 6)
    PERSPECTIVE = slice(6, 14)
    COLOR = slice(14, 17)
    FLIP = slice(17, 19)
    FIRST_LAYER = slice(0, 19)
    SECOND_LAYER = slice(19, 38)
    MIXUP = slice(38, 40)
    COUNT = 40


class Augmentation:
    """Base class of all augmentations.

    Built-in augmentations use fixed `columns` of a shared random stream. Any other augmentation draws from its own
    stream, seeded by its name, so adding one does not change the numbers of the others.
    """

    name: ClassVar[str]
    num_uniforms: ClassVar[int]  # random numbers per layer
    columns: ClassVar[slice | None] = None  # columns in the shared stream; None for a stream of its own

    def __init__(self, hyp: Hyperparameters) -> None:
        self.hyp = hyp


class RandomStreams:
    """The random numbers for the layers of a batch, which depend only on the seed and the samples' keys.

    The first layer of each key comes first, then the second layers of the samples that are mixed.
    """

    def __init__(self, seed: int, keys: Sequence[SampleKey]) -> None:
        self.seed = seed
        self._positions = [(key.epoch, key.position) for key in keys]
        self._shared = keyed_uniforms(seed, Stream.AUGMENT, self._positions, SharedColumns.COUNT)

    @property
    def mixing_uniforms(self) -> np.ndarray:
        """(n, 2) in [0, 1) for each key, which decide whether it has a second layer, and choose its image."""
        return self._shared[:, SharedColumns.MIXUP]

    def layer_uniforms(self, augmentation: Augmentation, mixed: list[int]) -> np.ndarray:
        """Returns the numbers of an augmentation, (L, `Augmentation.num_uniforms`) in [0, 1).

        ``mixed``: positions of the keys whose samples have a second layer.
        """
        columns = augmentation.columns
        count = augmentation.num_uniforms
        if columns is not None:
            first_layers = self._shared[:, SharedColumns.FIRST_LAYER]
            second_layers = self._shared[mixed, SharedColumns.SECOND_LAYER]
            return np.concatenate([first_layers[:, columns], second_layers[:, columns]])
        rows = keyed_uniforms(self.seed, named_stream(augmentation.name), self._positions, 2 * count)
        return np.concatenate([rows[:, :count], rows[mixed, count:]])
