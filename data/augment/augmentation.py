"""What an augmentation is, and the random numbers it may use.

An augmentation is one class. `GeometricTransform`s draw a matrix each, and the renderers apply their product.
`PixelOperation`s draw parameters, and have an OpenCV and a torch form. The lists are in `data.augment.plan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from utils.config.settings import Hyperparameters
from utils.rng import Stream, keyed_uniforms, named_stream
from utils.structures import SampleKey

# The first augmentations share one stream: these columns for a sample's picture, as many for one that may be mixed in,
# and two for the mixing. All are drawn, used or not, so that a changed probability leaves the other choices alone.
SHARED_COLUMNS = 19
MIXUP_COLUMNS = slice(2 * SHARED_COLUMNS, 2 * SHARED_COLUMNS + 2)


class Augmentation:
    """Base of all. Adding one changes no other's numbers: it has a stream of its own, which follows from its name."""

    name: ClassVar[str]
    numbers: ClassVar[int]  # uniform numbers a picture
    columns: ClassVar[slice | None] = None  # of the shared stream; None: a stream of its own

    def __init__(self, hyp: Hyperparameters) -> None:
        self.hyp = hyp


class GeometricTransform(Augmentation, ABC):
    """An augmentation that moves pixels."""

    @abstractmethod
    def matrices(self, u: np.ndarray, from_wh: np.ndarray, canvas_wh: np.ndarray) -> np.ndarray:
        """(P, 3, 3): from a frame of sizes ``from_wh`` (P, 2) to canvases of ``canvas_wh`` (P, 2).

        Only the first transform sees a frame that is not the canvas.

        Args:
            u: (P, `numbers`) in [0, 1).
        """


class PixelOperation(Augmentation, ABC):
    """An augmentation that changes pixels where they are."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether the hyper-parameters ask for it."""

    @abstractmethod
    def parameters(self, u: np.ndarray, canvas_hw: np.ndarray) -> np.ndarray:
        """(P, k) for ``u`` (P, `numbers`) in [0, 1) and canvases of sizes ``canvas_hw`` int (P, 2)."""

    @staticmethod
    @abstractmethod
    def apply_opencv(image: np.ndarray, parameters: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Applies one picture's ``parameters`` (k,) to ``image`` uint8 (H, W, 3). Returns ``image``, changed in place,
        or ``out``, which is of the same shape and holds the result."""

    @staticmethod
    @abstractmethod
    def apply_torch(images: Tensor, parameters: Tensor) -> Tensor:
        """Applies ``parameters`` float32 (L, k) to ``images`` float32 (L, H, W, 3) of 0 to 255; may leave that range.
        Sums and products of single numbers only, so that a picture does not depend on its batch."""


class Draws:
    """The numbers of a batch's pictures, each a function of the seed and its sample's key alone.

    Pictures are those of the keys, followed by the second ones of the samples ``mixed``.
    """

    def __init__(self, seed: int, keys: Sequence[SampleKey]) -> None:
        self.seed = seed
        self.mixed: list[int] = []
        self._positions = [(key.epoch, key.position) for key in keys]
        self._shared = keyed_uniforms(seed, Stream.AUGMENT, self._positions, MIXUP_COLUMNS.stop)

    @property
    def of_mixing(self) -> np.ndarray:
        """(n, 2), a row a key: whether it is mixed with a second picture, and with which."""
        return self._shared[:, MIXUP_COLUMNS]

    def of_pictures(self, augmentation: Augmentation) -> np.ndarray:
        """(P, `Augmentation.numbers`) in [0, 1)."""
        columns, count = augmentation.columns, augmentation.numbers
        if columns is not None:
            second = self._shared[self.mixed, SHARED_COLUMNS : 2 * SHARED_COLUMNS]
            return np.concatenate([self._shared[:, columns], second[:, columns]])
        rows = keyed_uniforms(self.seed, named_stream(augmentation.name), self._positions, 2 * count)
        return np.concatenate([rows[:, :count], rows[self.mixed, count:]])
