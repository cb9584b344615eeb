"""Compares checkpoints and batches bit for bit, results tables, and whole runs."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import torch

from utils.batches import Batch
from utils.files.torch_file import read_checkpoint

# What may differ between runs that must give the same weights: settings, and results with their times.
SETTINGS = ("config", "command", "hyp", "run", "run_id", "rows")


def assert_same_content(a, b, location: str = "") -> None:
    """Fails at the first tensor or value in which two checkpoints differ, except for settings."""
    assert type(a) is type(b), location
    if isinstance(a, dict):
        assert a.keys() == b.keys(), location
        for key in a:
            if key not in SETTINGS:
                assert_same_content(a[key], b[key], f"{location}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), location
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same_content(x, y, f"{location}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), location
    else:
        assert a == b or (a != a and b != b), f"{location}: {a} != {b}"


def without_times(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Returns rows of results.csv without the columns that differ from run to run: times and speeds."""
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith("speed/")} for row in rows]


def assert_same_batch(a: Batch, b: Batch, *, but: str = "") -> None:
    """Fails unless two batches are equal, except for the field ``but``."""
    for name in {"images", "indices", "original_hw", "letterbox"} - {but}:
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.targets.rows, b.targets.rows)
    assert (a.targets.counts, a.paths) == (b.targets.counts, b.paths)


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def assert_same_run(a: Path, b: Path) -> None:
    """Fails unless two run folders have equal checkpoints, bitwise except for where their data is, and equal tables
    except for times."""
    names = sorted(path.name for path in a.glob("*.pt"))
    assert names == sorted(path.name for path in b.glob("*.pt"))
    for name in names:
        first, second = (read_checkpoint(folder / name) for folder in (a, b))
        for content in (first, second):
            content["data"] = {}
        assert_same_content(first, second, name)
    one, two = (without_times(read_csv(folder / "results.csv")) for folder in (a, b))
    assert [*map(list, one)] == [*map(list, two)], "columns"
    assert one == two
