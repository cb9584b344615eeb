"""Wrappers around models, and temporary eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def is_parallel(model: nn.Module) -> bool:
    """Returns whether ``model`` is wrapped in DataParallel or DistributedDataParallel."""
    return isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)


def unwrap(model: nn.Module) -> nn.Module:
    """Removes the wrappers DataParallel, DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        else:
            inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Sets the model to eval mode, and restores the mode of each module afterwards (frozen batch norms stay frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, training in modes:
            module.training = training
