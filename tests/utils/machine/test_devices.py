from __future__ import annotations

import platform
from pathlib import Path

import torch

from tests.helpers.messages import refused
from utils.machine.devices import parse_devices, resolve_amp

CPU = torch.device("cpu")


def test_an_autocast_type_is_used_or_refused():
    assert resolve_amp("off", CPU) is None
    assert resolve_amp("bf16", CPU) is torch.bfloat16
    with refused("--amp fp16: not supported on CPUs; use --amp bf16 or --amp off"):
        resolve_amp("fp16", CPU)
    if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
        has_bfloat16 = {"avx512_bf16", "amx_bf16"} & set(flags.split())
        assert resolve_amp("auto", CPU) is (torch.bfloat16 if has_bfloat16 else None)


def test_several_gpus_are_parsed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert parse_devices("0,1") == (torch.device("cuda", 0), torch.device("cuda", 1))
    for text, message in (
        ("1,1", "--device 1,1: lists a GPU twice"),
        ("3", "--device 3: there is no GPU 3; this machine has GPUs 0 to 2"),
    ):
        with refused(message):
            parse_devices(text)
