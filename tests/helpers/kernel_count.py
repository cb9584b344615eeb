"""Estimates on a CPU what code would cost on a GPU: launched kernels and host syncs."""

from __future__ import annotations

import math
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "repeat_interleave", "lift_fresh"}
_TENSORS_A_KERNEL = 64  # in foreach operations on pairs, cat and stack


def is_indexed_by_mask(name: str, args: tuple) -> bool:
    """Returns whether an operation, such as "index_put_", selects elements by a mask."""
    places = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in places)


class KernelCount(TorchDispatchMode):
    """Counts operations by name while active. Views and allocations launch nothing; a foreach kernel processes up to 64
    tensors. Waits are reads of values, shapes that depend on values, and tensors created from Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> KernelCount:
        tolist = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> list:
            self.waits["tolist"] += 1
            return tolist(tensor)

        self._tolist = mock.patch.object(torch.Tensor, "tolist", counted)  # on a CPU it needs no operation
        self._tolist.start()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        self._tolist.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func.name().split("::")
        name = name.split(".")[0]
        if namespace == "aten":
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            if not is_view and "empty" not in name:
                self.kernels[name] += self._launches(name, args)
            has_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None
            if (name in _WAITING and not has_size) or "unique" in name or is_indexed_by_mask(name, args):
                self.waits[name] += 1
        return func(*args, **(kwargs or {}))

    def _launches(self, name: str, args: tuple) -> int:
        """Returns the number of kernels that an operation launches."""
        if not name.startswith("_foreach") and name not in ("cat", "stack"):
            return 1
        return math.ceil(len(args[0]) / _TENSORS_A_KERNEL)


class NoSync(TorchDispatchMode):
    """Fails on operations that make the host wait for a device, or whose shapes depend on values."""

    FORBIDDEN = (
        "local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "unique", "unique_dim",
        "unique_consecutive",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert name.strip("_").removesuffix("2") not in self.FORBIDDEN, f"{name} waits for the device"
        assert not is_indexed_by_mask(name, args), "indexing by a mask waits for the device"
        if name in ("_to_copy", "copy_"):
            options = dict(zip(("self", "src", "non_blocking"), args)) | (kwargs or {})
            source = options.get("src", args[0]).device
            target = args[0].device if name == "copy_" else options.get("device", source)
            assert source.type == target.type or options.get("non_blocking"), f"a copy to {target} that waits"
        return func(*args, **(kwargs or {}))
