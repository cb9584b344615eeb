"""``--image-weights``: the classes whose images are drawn more often."""

from __future__ import annotations

import numpy as np

from data.loading.loader import InfiniteDataLoader
from engine.hooks.hook import Epoch, Hook, Training


class ClassWeights(Hook):
    """``--image-weights``: images of classes with a low AP in the newest validation are drawn more often.

    ``loader``: its weights are those before the first validation.
    """

    decides_next_epoch = True

    def __init__(self, loader: InfiniteDataLoader) -> None:
        self._base = np.array(loader.class_weights)

    def start(self, trainer: Training) -> None:
        if trainer.progress.class_weights:  # a resumed run has them
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))

    def record(self, trainer: Training, epoch: Epoch) -> None:
        if epoch.class_ap is not None:
            weights = self._base * (1 - np.nan_to_num(epoch.class_ap)) ** 2
            trainer.progress.weigh_classes(weights.tolist())
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))
