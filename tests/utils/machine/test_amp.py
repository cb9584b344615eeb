from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from tests.helpers.messages import refused
from utils.machine.devices import resolve_amp

CPU = torch.device("cpu")


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="x86 Linux only")
def test_auto_on_a_cpu_follows_the_cpus_flags():
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    expected = torch.bfloat16 if {"avx512_bf16", "amx_bf16"} & set(flags) else None
    assert resolve_amp("auto", CPU) is expected


def test_a_requested_autocast_type_is_used_or_refused():
    assert resolve_amp("off", CPU) is None
    assert resolve_amp("bf16", CPU) is torch.bfloat16
    with refused():
        resolve_amp("fp16", CPU)
