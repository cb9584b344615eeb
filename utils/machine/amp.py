"""Automatic mixed precision: which type a device computes in."""

from __future__ import annotations

import torch

from utils.errors import UserError
from utils.machine.resources import cpu_multiplies_bf16

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_amp(choice: str, device: torch.device) -> torch.dtype | None:
    """``--amp`` to an autocast type, None for float32.

    ``auto`` takes bfloat16 where the device computes in it: CUDA devices since Ampere, CPUs with AVX512-BF16 or AMX.
    Older CUDA devices get float16 with a loss scaler.
    """
    if choice == "off":
        return None
    if choice == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if device.type == "cpu" and cpu_multiplies_bf16() else None
    if choice == "fp16" and device.type == "cpu":
        raise UserError("--amp fp16: not on a CPU; use --amp bf16 or --amp off")
    return _DTYPES[choice]
