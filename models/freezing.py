"""Layers that stay as they are while the rest is trained."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


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
