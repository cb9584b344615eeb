"""Which floating-point type the forward pass runs in."""

from __future__ import annotations

import torch

from utils.errors import UserError

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
        return torch.bfloat16 if device.type == "cpu" and _cpu_multiplies_bf16() else None
    if choice == "fp16" and device.type == "cpu":
        raise UserError("--amp fp16: not on a CPU; use --amp bf16 or --amp off")
    return _DTYPES[choice]


def _cpu_multiplies_bf16() -> bool:
    """Whether the CPU has matrix instructions for bfloat16; without them it is emulated, many times slower.

    Not timed at start-up: beside a busy process timing went either way (0.5 to 2.0 times float32 in five tries), and
    the same command must give the same run.
    """
    if hasattr(torch.cpu, "get_capabilities"):  # torch >= 2.11
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
