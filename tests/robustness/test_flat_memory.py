"""Memory, open files, threads and processes do not grow over fifty epochs of a training (benchmarks/memory.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import early_and_late, readings_by_epoch
from tests.helpers.tiny import write_dataset, write_model

EPOCHS = 50


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cache"), [(2, "ram"), (1, "none")])
def test_memory_files_and_processes_stay_constant_over_fifty_epochs(tmp_path: Path, ranks: int, cache: str):
    data = write_dataset(tmp_path / "set", train=40)
    model = write_model(tmp_path / "tiny.yaml")
    flags = ["--data", str(data), "--model", str(model), "--imgsz", "64", "--batch-size", "4", "--device", "cpu",
             "--workers", "2", "--cache", cache, "--noplots", "--epochs", str(EPOCHS),
             "--spawn", str(ranks)]  # fmt: skip
    readings = readings_by_epoch(flags, tmp_path)
    assert len(readings) > EPOCHS - 5
    early, late = early_and_late(readings)
    print(f"{ranks} rank(s), --cache {cache}: {early} -> {late}")
    assert late.private_mb < 1.05 * early.private_mb + 2, readings
    assert late.pss_mb < 1.02 * early.pss_mb + 2, readings
    assert (late.files, late.threads, late.processes) == (early.files, early.threads, early.processes), readings
