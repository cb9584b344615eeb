"""``--image-weights``: images of classes with a low AP are drawn more often."""

from __future__ import annotations

import numpy as np

from data.loading.loader import InfiniteDataLoader
from engine.hooks.hook import Action, Epoch, Hook, Training


class ClassWeights(Hook):
    """Gives the loader weights of classes that follow from the newest validation.

    Args:
        loader: with the weights of a run that has not been validated yet.
    """

    decides_next_epoch = True

    def __init__(self, loader: InfiniteDataLoader) -> None:
        self._base = np.array(loader.class_weights)

    def start(self, trainer: Training) -> Action:
        if trainer.progress.class_weights:  # of a resumed run
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))
        return Action.CONTINUE

    def scored(self, trainer: Training, epoch: Epoch) -> Action:
        if epoch.class_ap is not None:
            trainer.progress.class_weights = (self._base * (1 - np.nan_to_num(epoch.class_ap)) ** 2).tolist()
            trainer.loader.set_class_weights(np.asarray(trainer.progress.class_weights))
        return Action.CONTINUE
