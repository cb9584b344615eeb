"""Where the repository is, and the data sets and weights that may lie beside it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"  # tests that need it are skipped without it: the fixture `shared`
