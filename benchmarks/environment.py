"""Describes where something is measured: the repository, its commit, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from utils.machine.resources import available_cores

ROOT = Path(__file__).parents[1]  # the repository, in which all commands are run


def machine() -> str:
    """Describes the machine: CPU, cores this process may use, memory, GPU if torch sees one, torch's version."""
    import torch

    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return f"{available_cores()} cores of {cpu}, {memory:.0f} GiB{gpu}, torch {torch.__version__}"


def commit() -> str:
    """Returns the commit of the working tree, with a + if tracked files have changed.

    Returns "unknown" outside a repository and on a machine without git.
    """

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed
