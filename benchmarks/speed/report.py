"""Formats the measurements of two sides as tables."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.flag_types import at_least
from benchmarks.peer import add_peer_flag


@dataclass(frozen=True)
class Comparison:
    """One line of a table: repeated measurements of the same thing on both sides."""

    label: str
    unit: str  # empty: none
    ours: Sequence[float]
    peer: Sequence[float] = ()  # empty: not measured
    higher_is_better: bool = False

    @property
    def advantage(self) -> float | None:
        """Returns the ratio of the medians, above 1 if ours is better; None without a peer."""
        if not self.peer:
            return None
        ours = statistics.median(self.ours)
        peer = statistics.median(self.peer)
        if ours == peer:  # also if both are 0
            return 1.0
        better, worse = (ours, peer) if self.higher_is_better else (peer, ours)
        return better / worse if worse else float("inf")

    def cells(self) -> list[str]:
        advantage = "" if self.advantage is None else f"{self.advantage:.2f}"
        label = f"{self.label} [{self.unit}]" if self.unit else self.label
        return [label, _median(self.ours), _median(self.peer), advantage]


def _median(values: Sequence[float]) -> str:
    if not values:
        return ""
    text = f"{statistics.median(values):.4g}"
    if len(values) == 1:
        return text
    return f"{text} ({min(values):.3g} to {max(values):.3g})"


def add_flags(parser: argparse.ArgumentParser, *, rounds: int = 5) -> None:
    """Adds the flags that all comparisons share."""
    add_peer_flag(parser)
    parser.add_argument("--rounds", type=at_least(1), default=rounds, help="turns of each side; medians are compared")


def show(title: str, rows: Sequence[Comparison]) -> None:
    print(f"\n{title}\n{table(rows)}", flush=True)


def table(rows: Sequence[Comparison]) -> str:
    cells = [["median (min to max)", "ours", "peer", "times better"], *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |" for line in cells)
