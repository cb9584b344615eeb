"""Where weights come from, and their license, as checkpoints and exported files store it."""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = "unknown"


class Origin(NamedTuple):
    """As text; `UNKNOWN` where nothing says."""

    weights: str  # that training started from
    license: str  # of the trained weights


RANDOM = Origin("random weights", "yours to choose (trained from random weights)")
