"""The packages that the project says it needs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def requirements() -> dict[str, set[str]]:
    """The names of required packages, in lower case, by extra; those of every installation under ""."""
    found = {}
    for file in ROOT.glob("requirements*.txt"):
        lines = file.read_text(encoding="utf-8").partition("# Development")[0].lower()
        found[file.stem.removeprefix("requirements").removeprefix("-")] = set(re.findall(r"^[\w.-]+", lines, re.M))
    return found
