"""Small tensors that travel between processes inside the message."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

INLINE_BYTES = 65536


class InlineTensors:
    """Base of dataclasses of tensors that workers send. Torch makes a file and a connection for every tensor, which
    takes longer than to copy a few numbers into the message that is sent anyway."""

    __slots__ = ()

    def __reduce__(self) -> tuple:
        return _rebuilt, (type(self), tuple(_packed(getattr(self, field.name)) for field in fields(self)))


class _Packed:
    """A tensor as numpy's array, which is pickled whole."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __reduce__(self) -> tuple:
        return _Packed, (self.array,)


def _packed(value: Any) -> Any:
    is_small = isinstance(value, Tensor) and value.device.type == "cpu" and value.nbytes <= INLINE_BYTES
    if not is_small or value.dtype == torch.bfloat16:
        return value
    return _Packed(value.detach().numpy())


def _rebuilt(kind: type, values: tuple) -> Any:
    return kind(*(torch.from_numpy(v.array) if isinstance(v, _Packed) else v for v in values))
