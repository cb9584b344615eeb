"""Parses ``--device``, and chooses a device's autocast dtype (``--amp``) by what it multiplies natively."""

from __future__ import annotations

import re

import torch

from utils.errors import UserError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_current(device: torch.device) -> None:
    """Makes a GPU the current device of CUDA events, streams and pinned copies."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def parse_devices(device: str) -> tuple[torch.device, ...]:
    """Parses ``--device``, which may list several CUDA devices. Raises UserError for devices that do not exist."""
    name = re.sub("cuda:(?=[0-9])", "", device.strip().lower())
    if not name and not torch.cuda.is_available():
        name = "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cpu":
        return (torch.device("cpu"),)
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("--device mps: no Apple GPU is available here; use --device cpu")
        return (torch.device("mps"),)
    numbers = ["0"] if name in ("", "cuda") else [part.strip() for part in name.split(",") if part.strip()]
    if not numbers or not all(re.fullmatch("[0-9]{1,9}", part) for part in numbers):
        raise UserError(f"--device {device}: must be cpu, mps, a GPU number, or several such as 0,1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    absent = [part for part in numbers if int(part) >= count]
    if absent:
        hint = f"this machine has GPUs 0 to {count - 1}" if count else "no CUDA GPU is available here; use --device cpu"
        raise UserError(f"--device {device}: there is no GPU {absent[0]}; {hint}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--device {device}: lists a GPU twice")
    return tuple(torch.device("cuda", int(part)) for part in numbers)


def devices_for_ranks(device: str) -> tuple[torch.device, ...]:
    """Returns the visible GPUs, one of which this process uses, or an empty tuple if processes run on the CPU."""
    name = device.strip().lower()
    if name == "cpu" or (name == "" and not torch.cuda.is_available()):
        return ()
    if name == "mps":
        raise UserError("--device mps: supports one process only; start without torchrun")
    devices = parse_devices(device)
    if name in ("", "cuda"):
        devices = tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    return devices


def resolve_amp(choice: str, device: torch.device) -> torch.dtype | None:
    """Returns the autocast dtype for ``--amp``, or None for float32.

    ``auto`` selects bfloat16 if the device supports it natively: CUDA devices since Ampere, and CPUs with AVX512-BF16
    or AMX. Older CUDA devices get float16 with a gradient scaler.
    """
    if choice == "off":
        return None
    if choice == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        return torch.bfloat16 if device.type == "cpu" and cpu_multiplies_bf16() else None
    if choice == "fp16" and device.type == "cpu":
        raise UserError("--amp fp16: not supported on CPUs; use --amp bf16 or --amp off")
    return _DTYPES[choice]


def cpu_multiplies_bf16() -> bool:
    """Returns whether the CPU has matrix instructions for bfloat16. Without them it is emulated, many times slower.

    This is not measured at start-up: beside another busy process, timings went either way (0.5 to 2.0 times float32 in
    five tries), and the same command must give the same run.
    """
    if hasattr(torch.cpu, "get_capabilities"):  # torch >= 2.11
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
