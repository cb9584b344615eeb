"""Which floating-point type the forward pass runs in."""

from __future__ import annotations

import time

import torch
from torch import nn

from utils.errors import UserError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_amp(choice: str, device: torch.device) -> torch.dtype | None:
    """``--amp`` to an autocast type, None for float32.

    ``auto`` takes bfloat16 where it is faster: always on CUDA devices that have it, on a CPU when a convolution
    measured here is. Older CUDA devices get float16 with a loss scaler.
    """
    if choice == "off":
        return None
    if choice == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if device.type == "cpu" and _cpu_gains_from_bf16() else None
    if choice == "fp16" and device.type == "cpu":
        raise UserError("--amp fp16: not on a CPU; use --amp bf16 or --amp off")
    return _DTYPES[choice]


def _cpu_gains_from_bf16(margin: float = 1.2) -> bool:
    """Times one convolution, forward and backward, in both types; bf16 must win clearly, emulation never does."""
    with torch.random.fork_rng(devices=[]):
        layer = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)
        images = torch.zeros(4, 64, 40, 40).to(memory_format=torch.channels_last).requires_grad_()
    seconds = {}
    for enabled in (False, True, False, True):
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                layer(images).sum().backward()
            best = min(best, time.perf_counter() - start)
        seconds[enabled] = min(best, seconds.get(enabled, best))
    return seconds[True] * margin < seconds[False]
