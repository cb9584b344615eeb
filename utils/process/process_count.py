"""Checks how many processes ``--spawn`` starts."""

from __future__ import annotations

import os

from utils.errors import UserError
from utils.machine.resources import available_cores, available_memory
from utils.strings import counted

PROCESS_BYTES = 600 * 10**6  # memory of a training or validating process on a CPU before its first batch
_GPU_FILES = ("nvidia", "nvhost", "kfd", "dxg")  # in /dev: CUDA, Jetson, ROCm, WSL


def check_processes(spawn: int, device: str, *, threads: int | None = None) -> None:
    """Raises UserError if ``--spawn`` would start more processes than there are cores (unless they may use a GPU) or
    than fit into memory. Call it before torch is imported, which alone can fill the memory if there are too many
    processes.

    Args:
        device: the value of `--device`.
        threads: the value of `--threads`, with which users accept sharing cores; 0: not given; None: no such flag.
    """
    cores = available_cores()
    free = available_memory()
    problem = ""
    if spawn > cores and not threads and not _may_have_gpu(device):
        problem = f"on {counted(cores, 'CPU core')}; start at most {cores}"
        if threads is not None:
            problem += ", or add --threads 1 if they are to share cores"
    elif spawn > 1 and spawn * PROCESS_BYTES > free:
        needed = f"need about {spawn * PROCESS_BYTES / 1e9:.1f} GB before the first batch"
        problem = f"{needed}, and {free / 1e9:.1f} GB are free; start at most {max(free // PROCESS_BYTES, 1)}"
    if problem:
        raise UserError(f"--spawn {spawn}: {spawn} processes {problem}")


def _may_have_gpu(device: str) -> bool:
    """Returns whether a process with this ``--device`` may find a GPU, judging by the system's device files."""
    if device.strip().lower() == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(name.startswith(_GPU_FILES) for name in os.listdir("/dev"))
