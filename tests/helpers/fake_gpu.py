"""A GPU for machines without one: its tensors have shapes, types, strides and devices, but no values.

An operation on tensors of different devices raises. So does a host sync: an operation on the GPU whose value or shape
the host would have to wait for (`.item()`, `nonzero`, indexing by a mask). Tensors copied to the host read as zeros.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._device import _device_constructors

_select_conv_backend = torch._C._select_conv_backend
_CONV_BACKENDS = torch._C._ConvBackend  # type: ignore[attr-defined]


class _Mode(FakeTensorMode):
    def __deepcopy__(self, memo: dict) -> _Mode:  # tensors refer to it
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cpu":
            is_known = getattr(args[0], "constant", None) is not None  # as of `torch.tensor(3)`
            if not is_known:
                return 0.0 if args[0].is_floating_point() else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Event:
    """Stands in for `torch.cuda.Event`. The one in `tests.helpers.fake_streams` also tracks the order of work."""

    def __init__(self, *, blocking: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@cache
def _mode() -> _Mode:
    """Returns the mode of the whole process: the code under test caches tensors, and tensors of two modes do not
    mix."""
    return _Mode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def _of_channels(x: Tensor, count: int) -> list[Tensor]:
    return [x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(count)]


_SYNC_BN: dict[str, Any] = {  # kernels of CUDA whose results torch 2.15 does not know without a GPU
    "batch_norm_stats": lambda x, eps: _of_channels(x, 2),
    "batch_norm_gather_stats_with_counts": lambda x, *rest: _of_channels(x, 2),
    "batch_norm_elemt": lambda x, *rest: torch.empty_like(x),
    "batch_norm_backward_reduce": lambda grad, x, *rest: _of_channels(x, 4),
    "batch_norm_backward_elemt": lambda grad, x, *rest: torch.empty_like(x),
}


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Inside the block, tensors have no values and may be on ``cuda``, and `nn.Module.to` moves models there that were
    built before. Backward passes run in Python, because torch's engine needs CUDA streams for them."""
    empty = torch.empty
    _device_constructors()  # cached by torch; not with the stand-ins for constructors below
    with (
        warnings.catch_warnings(),
        mock.patch.object(Tensor, "backward", _backward),
        mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.object(Tensor, "numpy", _read_on_host(Tensor.numpy)),
        mock.patch.object(Tensor, "tolist", _read_on_host(Tensor.tolist)),
        mock.patch.object(nn.Module, "_apply", _converted),
        mock.patch("torch.cuda.Event", _Event),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),  # broadcast asks
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options)),
        mock.patch("torch._fused_sgd_", _check_fused_sgd),  # as of torch 2.15 its result is not known without a GPU
        mock.patch("torch.nn.utils.clip_grad._has_foreach_support", return_value=True),  # not of tensors of this kind
        mock.patch("torch._C._select_conv_backend", _conv_backend),
        mock.patch.multiple(torch, **_SYNC_BN),
        _mode(),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy does
        yield


def _read_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function``, a method that reads values, so that it reads zeros from host tensors without values."""

    def read(tensor: Tensor, **options: bool) -> Any:
        with unset_fake_temporarily():  # else torch makes a copy without values, also of a tensor that has some
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
                tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
            return function(tensor, **options)

    return read


def _check_fused_sgd(*lists: list[Tensor], **options: Any) -> None:
    tensors = [tensor for tensors in lists for tensor in tensors]
    tensors += [value for value in options.values() if isinstance(value, Tensor)]
    assert len({tensor.device for tensor in tensors}) == 1, "tensors of different devices"
    for same in zip(*lists):  # parameter, gradient, momentum: the kernel does not check it
        assert len({tensor.stride() for tensor in same}) == 1, "tensors of different strides"


def _conv_backend(*tensors: Tensor, **options: Any) -> Any:
    """Returns the backend that computes a convolution. Without a GPU, torch does not know that cuDNN takes bfloat16."""
    chosen = _select_conv_backend(*tensors, **options)
    return _CONV_BACKENDS.Cudnn if chosen == _CONV_BACKENDS.Slow2d else chosen


def _converted(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Does the work of `nn.Module.to`, which cannot replace tensors of this kind."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                converted = convert(parameter.detach())
                module._parameters[name] = nn.Parameter(converted, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
    return model


@torch.no_grad()
def _backward(loss: Tensor) -> None:
    """Adds the gradients of ``loss`` () to ``.grad``, like `Tensor.backward`."""
    root: Any = loss.grad_fn
    first_output = 0
    waiting: Counter[Any] = Counter()  # nodes to gradients that are still to come
    visited = {root}
    stack = [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                waiting[node] += 1
                if node not in visited:
                    visited.add(node)
                    stack.append(node)
    received: dict[Any, dict[int, Tensor]] = {root: {first_output: torch.ones_like(loss)}}
    ready = [root]
    while ready:
        node = ready.pop()
        gradients = received.pop(node, {})
        if hasattr(node, "variable"):
            leaf = node.variable
            gradient = gradients.get(0)
            if gradient is not None:
                leaf.grad = gradient.detach() if leaf.grad is None else leaf.grad + gradient
            continue
        edges = [(following, slot) for following, slot in node.next_functions if following is not None]
        for (following, slot), gradient in zip(edges, _applied(node, gradients, len(edges)), strict=True):
            if gradient is not None:
                slots = received.setdefault(following, {})
                slots[slot] = slots[slot] + gradient if slot in slots else gradient
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)


def _applied(node: Any, gradients: dict[int, Tensor], count: int) -> list[Tensor | None]:
    """Returns the gradients of a node's ``count`` inputs that need one, from its outputs' gradients by output
    number."""
    if not gradients:
        return [None] * count
    outputs = node._input_metadata
    values = [gradients.get(number) for number in range(len(outputs))]
    if not hasattr(node, "apply"):
        results = node(*values)
        results = results if isinstance(results, tuple) else (results,)
        needed = [following is not None for following, _ in node.next_functions]
    else:  # a function in Python, which gets zeros and also returns None for what is not a tensor
        filled = (
            torch.zeros(like.shape, dtype=like.dtype, device=like.device) if value is None else value
            for like, value in zip(outputs, values)
        )
        results = node.apply(*filled)
        results = results if isinstance(results, tuple) else (results,)
        needed = node.needs_input_grad
    return [result for result, is_needed in zip(results, needed) if is_needed]
