"""Searches of hyper-parameters for tests."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from utils.config.tool_settings import SearchConfig

if TYPE_CHECKING:
    from tools.search.ranges import Space

SMALL = ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--amp", "off"]
RANGES = "lr0: [0.001, 0.05, log]\nmosaic: {choice: [0, 1]}\nclose_mosaic: [0, 3]\nema_tau: 2\n"


def space_of(folder: Path, text: str, **settings) -> Space:
    """Writes ranges into ``folder`` and reads them."""
    from tools.search.ranges import read_space  # needs optuna

    path = folder / "ranges.yaml"
    path.write_text(text)
    return read_space(SearchConfig(hyp=str(path), **settings))


def read_trials(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of a search's trials.csv, without times."""
    with open(folder / "trials.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]
