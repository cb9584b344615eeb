"""A compiler whose programs write their results to the same memory every time, as CUDA graphs do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd


def _replayed(graph: fx.GraphModule, _: list[Tensor]) -> Callable:
    memory: list = []

    def run(*inputs: Tensor) -> list:
        results = graph(*inputs)
        if not memory:
            memory.extend(r.clone() if isinstance(r, Tensor) else r for r in results)
        for place, result in zip(memory, results):
            if isinstance(result, Tensor):
                place.copy_(result)
        return [_seen_anew(place) if isinstance(place, Tensor) else place for place in memory]

    return make_boxed_func(run)


def _seen_anew(place: Tensor) -> Tensor:
    """A new tensor of the same memory without other references."""
    fresh = torch.empty(0, dtype=place.dtype)
    return fresh.set_(place.untyped_storage(), place.storage_offset(), place.size(), place.stride())


def replayed_memory() -> Callable:
    """A backend for ``torch.compile(backend=...)``."""
    return aot_autograd(fw_compiler=_replayed, bw_compiler=_replayed)
