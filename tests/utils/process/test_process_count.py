"""How many processes `--spawn` may start on a machine."""

from __future__ import annotations

import os

import pytest

from tests.helpers.messages import refused
from utils.process import process_count
from utils.process.process_count import check_processes


@pytest.fixture
def small_machine(monkeypatch) -> None:
    """Four cores, memory for eight processes, and no GPU."""
    monkeypatch.setattr(process_count, "available_cores", lambda: 4)
    monkeypatch.setattr(process_count, "available_memory", lambda: 8 * process_count.PROCESS_BYTES)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("count", "device", "threads", "files", "message"),
    [
        (4, "cpu", 0, [], ""),
        (5, "cpu", 0, [], "5 processes on 4 CPU cores; start at most 4, or add --threads 1 if they are to share cores"),
        (5, "", 0, [], "5 processes on 4 CPU cores; start at most 4, or add --threads 1 if they are to share cores"),
        (5, "", None, [], "5 processes on 4 CPU cores; start at most 4"),  # val.py
        (5, "", 0, ["nvidia0"], ""),
        (5, "cpu", 0, ["nvidia0"], "5 processes on 4 CPU cores; ..."),
        (8, "cpu", 1, [], ""),
        (9, "cpu", 1, [], "9 processes need about 5.4 GB before the first batch, and 4.8 GB are free; start at most 8"),
        (9, "0", 0, ["nvidia0"], "9 processes need about 5.4 GB ..."),
    ],
)
def test_more_processes_than_the_machine_carries_are_refused(monkeypatch, count, device, threads, files, message):
    monkeypatch.setattr(os, "listdir", lambda _: ["null", *files])
    if not message:
        check_processes(count, device, threads=threads)
        return
    with refused(f"--spawn {count}: {message}"):
        check_processes(count, device, threads=threads)
