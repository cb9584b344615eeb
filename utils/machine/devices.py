"""The devices that ``--device`` names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from utils.errors import UserError


def make_current(device: torch.device) -> None:
    """Makes a GPU the default of CUDA events, streams and pinned copies."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def parse_devices(device: str) -> tuple[torch.device, ...]:
    """Parses ``--device``; several devices are possible with CUDA only. Raises UserError for devices that do not
    exist."""
    text = device.strip().lower().replace("cuda:", "")
    if not text and not torch.cuda.is_available():
        text = "mps" if torch.backends.mps.is_available() else "cpu"
    if text == "cpu":
        return (torch.device("cpu"),)
    if text == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("--device mps: no Apple GPU is available here; use --device cpu")
        return (torch.device("mps"),)
    numbers = ["0"] if text in ("", "cuda") else [part.strip() for part in text.split(",") if part.strip()]
    if not numbers or not all(re.fullmatch("[0-9]{1,9}", part) for part in numbers):
        raise UserError(f"--device {device}: must be cpu, mps, a GPU number, or several such as 0,1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    absent = [part for part in numbers if int(part) >= count]
    if absent:
        have = f"this machine has GPUs 0 to {count - 1}" if count else "no CUDA GPU is available here; use --device cpu"
        raise UserError(f"--device {device}: there is no GPU {absent[0]}; {have}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--device {device}: a GPU is named twice")
    return tuple(torch.device("cuda", int(part)) for part in numbers)


def devices_for_ranks(device: str) -> tuple[torch.device, ...]:
    """The visible GPUs, one of which this process uses; empty if processes run on the CPU."""
    text = device.strip().lower()
    if text == "cpu" or (text == "" and not torch.cuda.is_available()):
        return ()
    if text == "mps":
        raise UserError("--device mps: supports one process only; start without torchrun")
    devices = parse_devices(device)
    if text in ("", "cuda"):
        devices = tuple(torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    return devices


def identities(devices: Sequence[torch.device]) -> list[str]:
    """Names of GPUs that do not depend on which GPUs are visible."""
    return [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
