"""Reads modules and state dicts from PyTorch files of other programs, without running code in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.files.pickle_program import Record
from utils.files.torch_file import TorchFile

# A damaged file may contain records that contain each other.
MAX_MODULES = 100_000
MAX_TENSORS = 100_000


def is_module(value: Any) -> bool:
    """Returns True if ``value`` is the record of an `nn.Module`."""
    return isinstance(value, Record) and isinstance(value.get("_modules"), dict)


class ForeignFile(TorchFile):
    """Context manager that opens a PyTorch file of any program, to read data only.

    Raises UserError, beginning with the path, for other files and for contradictions in the file.
    """

    def tensor(self, value: Any) -> Tensor | None:
        """Returns the tensor of a record, a floating one as float32; None for other values."""
        view = self.view(value)
        if view is None:
            return None
        dtype = torch.float32 if view.is_floating_point() else view.dtype
        return view.to(dtype, copy=True).contiguous()

    def state_dict(self, value: Any) -> dict[str, Tensor]:
        """Returns parameters and buffers by name, of a module record or a mapping from names to tensors."""
        named_values = value.items() if isinstance(value, dict) else self._named_leaves(value)
        tensors = ((name, self.tensor(leaf)) for name, leaf in named_values if isinstance(name, str))
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def modules(self, root: Any) -> Iterator[tuple[str, Record]]:
        """Yields the module records in ``root``, itself first, with their dotted names; none if it is not a module."""
        pending = [("", root)]
        visited = 0
        while pending:
            name, module = pending.pop()
            visited += 1
            if visited > MAX_MODULES:
                raise self.refuse("its modules contain each other")
            if is_module(module):
                yield name, module
                children = list(module.get("_modules").items())
                pending.extend((f"{name}.{child_name}".lstrip("."), child) for child_name, child in reversed(children))

    def _named_leaves(self, root: Any) -> Iterator[tuple[str, Any]]:
        """Yields the parameters and persistent buffers in ``root`` with their dotted names."""
        count = 0
        for prefix, module in self.modules(root):
            non_persistent = module.get("_non_persistent_buffers_set")
            if not isinstance(non_persistent, list):
                non_persistent = []
            for group in ("_parameters", "_buffers"):
                leaves = module.get(group)
                if not isinstance(leaves, dict):
                    continue
                for name, leaf in leaves.items():
                    count += 1
                    if count > MAX_TENSORS:
                        raise self.refuse(f"it has more than {MAX_TENSORS:,} tensors")
                    if name not in non_persistent:
                        yield f"{prefix}.{name}".lstrip("."), leaf
