"""Formats the measurements of two sides as tables, and describes the machine."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.speed.turns import ROOT
from utils.machine.resources import available_cores


@dataclass(frozen=True)
class Comparison:
    """One line of a table: repeated measurements of the same thing on both sides."""

    what: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float] = field(default=())  # empty: not measured
    higher_is_better: bool = False

    @property
    def advantage(self) -> float | None:
        """Returns the ratio of the medians, above 1 if ours is better; None without a peer."""
        if not self.peer:
            return None
        ours = statistics.median(self.ours)
        peer = statistics.median(self.peer)
        better, worse = (ours, peer) if self.higher_is_better else (peer, ours)
        return better / worse if worse else float("inf")

    def cells(self) -> list[str]:
        advantage = "" if self.advantage is None else f"{self.advantage:.2f}"
        return [f"{self.what} [{self.unit}]", _median(self.ours), _median(self.peer), advantage]


def _median(values: Sequence[float]) -> str:
    if not values:
        return ""
    text = f"{statistics.median(values):.4g}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):.3g} to {max(values):.3g})"


def add_flags(parser: argparse.ArgumentParser, *, rounds: int = 5) -> None:
    """Adds the flags that all comparisons share."""
    parser.add_argument("--peer", default="", help="Python of an environment that has Ultralytics; empty: ours alone")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each side; medians are compared")


def show(title: str, rows: Sequence[Comparison]) -> None:
    print(f"\n{title}\n{table(rows)}", flush=True)


def table(rows: Sequence[Comparison]) -> str:
    cells = [["median (least to most)", "ours", "peer", "times better"], *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |" for line in cells)


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
