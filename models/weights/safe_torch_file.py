"""Reads modules and state dicts from PyTorch files of other programs, as inert data (utils/files/torch_file.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.files.torch_file import Record, TorchFile

MAX_MODULES = MAX_TENSORS = 100_000  # records may contain each other


def is_module(value: Any) -> bool:
    return isinstance(value, Record) and isinstance(value.get("_modules"), dict)


class ForeignFile(TorchFile):
    """A PyTorch file of any program, opened for reading data only: a context manager. Raises UserError, beginning with
    the path, for other files and for contradictions in the file."""

    def tensor(self, value: Any) -> Tensor | None:
        """The tensor of a record, floating ones as float32; None for other values."""
        view = self.view(value)
        if view is None:
            return None
        dtype = torch.float32 if view.is_floating_point() else view.dtype
        return view.to(dtype, copy=True).contiguous()

    def state_dict(self, value: Any) -> dict[str, Tensor]:
        """Parameters and buffers by name, of a module record or a mapping from names to tensors."""
        if isinstance(value, dict):
            tensors = ((k, self.tensor(v)) for k, v in value.items() if isinstance(k, str))
        else:
            tensors = ((name, self.tensor(leaf)) for name, leaf in self._leaves(value))
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def modules(self, root: Any) -> Iterator[tuple[str, Record]]:
        """The module records in ``root``, itself first, with their dotted names; none if it is not a module."""
        pending, visited = [("", root)], 0
        while pending:
            name, module = pending.pop()
            visited += 1
            if visited > MAX_MODULES:
                raise self.refuse("its modules contain each other")
            if is_module(module):
                yield name, module
                children = list(module.get("_modules").items())
                pending.extend((f"{name}.{child}".lstrip("."), part) for child, part in reversed(children))

    def _leaves(self, root: Any) -> Iterator[tuple[str, Any]]:
        count = 0
        for prefix, module in self.modules(root):
            transient = module.get("_non_persistent_buffers_set")
            transient = transient if isinstance(transient, list) else []
            for group in ("_parameters", "_buffers"):
                leaves = module.get(group)
                for name, leaf in leaves.items() if isinstance(leaves, dict) else ():
                    count += 1
                    if count > MAX_TENSORS:
                        raise self.refuse(f"it has more than {MAX_TENSORS:,} tensors")
                    if name not in transient:
                        yield f"{prefix}.{name}".lstrip("."), leaf
