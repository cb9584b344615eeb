"""The operations for which torch has no deterministic GPU kernel, according to its documentation."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Names in the documentation of `torch.use_deterministic_algorithms`, and regular expressions for their operations.
_OPERATIONS = {
    "nn.AvgPool3d": "avg_pool3d_backward",
    "nn.AdaptiveAvgPool2d": "_?adaptive_avg_pool2d_backward",
    "nn.AdaptiveAvgPool3d": "_?adaptive_avg_pool3d_backward",
    "nn.AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "nn.FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "nn.FractionalMaxPool3d": "fractional_max_pool3d_backward",
    "nn.MaxUnpool1d": "max_unpool2d",
    "nn.MaxUnpool2d": "max_unpool2d",
    "nn.MaxUnpool3d": "max_unpool3d",
    "nn.functional.interpolate": "_?upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)(_aa)?_backward",
    "nn.ReflectionPad1d": "reflection_pad1d_backward",
    "nn.ReflectionPad2d": "reflection_pad2d_backward",
    "nn.ReflectionPad3d": "reflection_pad3d_backward",
    "nn.NLLLoss": "nll_loss(2d)?_forward",
    "nn.CTCLoss": "_ctc_loss_backward",
    "nn.EmbeddingBag": "_embedding_bag_.*backward",
    "Tensor.put_": "put_?",
    "histc": "histc",
    "bincount": "bincount",
    "median": "median",
    "nn.functional.grid_sample": "grid_sampler_[23]d_backward",
    "Tensor.scatter_reduce": "scatter_reduce_?",  # for products
    "Tensor.resize_": "resize_",  # for quantized tensors
}


def names_of_torch() -> list[str]:
    """Returns the names in the documentation of `torch.use_deterministic_algorithms`, without ``torch.``."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    begin = text.index("operations will throw a")
    end = text.index("In addition", begin)
    names = re.findall(r"^ *\* :(?:class|func):`torch\.([\w.]+)`", text[begin:end], re.MULTILINE)
    assert "histc" in names, "the documentation has another form"
    return names


class DeterministicOnly(TorchDispatchMode):
    """Fails on operations for which torch would raise under `torch.use_deterministic_algorithms` on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._refused = re.compile("|".join(_OPERATIONS[name] for name in names_of_torch()))  # KeyError: a new one

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().split("::")[1].split(".")[0]
        is_refused = self._refused.fullmatch(name) and not _is_exempt(name, args, kwargs)
        assert not is_refused, f"{name} has no deterministic kernel"
        return func(*args, **kwargs)


def _is_exempt(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether a nondeterministic operation is deterministic with these arguments."""
    if name.startswith("scatter_reduce"):
        return (*args, *kwargs.values())[4] != "prod"
    if name == "bincount":
        return len(args) < 2 and kwargs.get("weights") is None
    return name == "resize_"  # nothing here is quantized
