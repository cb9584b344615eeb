"""Layers that stay as they are while the rest is trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from utils.errors import UserError


def layers_to_freeze(asked: Sequence[int], count: int) -> set[int]:
    """The layers that ``--freeze`` means in a model of ``count``: a single number n means 0 to n - 1.

    Raises UserError for layers that are not there, and where none would be left to train.
    """
    flag = f"--freeze {' '.join(map(str, asked))}"
    if any(not 0 <= layer <= count - (len(asked) > 1) for layer in asked):
        raise UserError(f"{flag}: the model has layers 0 to {count - 1}")
    frozen = set(range(asked[0])) if len(asked) == 1 else set(asked)
    if len(frozen) == count:
        raise UserError(f"{flag}: would leave nothing to train")
    return frozen


def freeze_layers(model: nn.Module, layers: Collection[int]) -> None:
    """Stops gradients and batch statistics of ``model.model[i]`` for each i of ``layers``.

    Their batch norms normalise with the stored statistics from now on, whatever mode the model is put into.
    """
    for index in layers:
        layer = model.model[index]
        layer.requires_grad_(False)
        for module in layer.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(False)
                module.register_forward_pre_hook(_keep_statistics)


def _keep_statistics(module: nn.Module, _inputs: tuple) -> None:
    module.training = False
