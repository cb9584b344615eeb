"""Tracking services: each epoch once, and no cost to the run when the service is slow, broken or absent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.hooks.result_files import CsvTracker
from engine.trackers.background import BackgroundTracker, RunNote, Service
from tests.helpers.messages import refused
from utils.logger import configure_logging


class MemoryService(Service):
    """Keeps in memory what it is given; ``down`` makes each call fail, and ``answer`` must be set for one to return."""

    name = "Memory"

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.epochs: list[int] = []
        self.rows: list[dict[str, float]] = []
        self.files: list[str] = []
        self.ends: list[bool] = []
        self.threads: set[str] = set()
        self.down = False
        self.answer = threading.Event()
        self.answer.set()

    def _called(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.answer.wait(30)
        if self.down:
            raise ConnectionError("no route to host\nsecond line")

    def open(self, settings: Mapping[str, Any]) -> Collection[int]:
        self._called()
        self.settings = dict(settings)
        return tuple(self.epochs)

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        self._called()
        self.epochs.append(epoch)
        self.rows.append(dict(row))

    def store(self, path: Path) -> None:
        self._called()
        self.files.append(path.name)

    def close(self, *, is_complete: bool) -> None:
        self._called()
        self.ends.append(is_complete)


def process(folder: Path, service: MemoryService, epochs: range, *, complete: bool = True, **limits: float) -> None:
    """The calls of one process, which starts or resumes at the first of ``epochs``."""
    results = CsvTracker(folder / "results.csv")
    tracker = BackgroundTracker(service, results, **limits)
    for each in (results, tracker):
        each.start({"lr0": 0.01, "model": "yolov8n"}, epochs[0])
    for epoch in epochs:
        for each in (results, tracker):
            each.epoch(epoch, {"train/box": 1 / epoch, "metrics/AP": epoch / 10})
    if complete:
        tracker.finish(folder)
    tracker.close()


@pytest.fixture(autouse=True)
def _log() -> None:
    configure_logging(True)


def test_results_settings_and_files_arrive_in_another_thread(tmp_path, capsys):
    for name in ("report.html", "results.png", "best.pt"):
        (tmp_path / name).write_text(name)
    service = MemoryService()
    process(tmp_path, service, range(1, 4))
    assert service.settings == {"lr0": 0.01, "model": "yolov8n"}
    assert service.epochs == [1, 2, 3]
    assert service.rows[1] == {"train/box": 0.5, "metrics/AP": 0.2}
    assert service.files == ["report.html", "results.csv", "results.png"]  # not the weights
    assert service.ends == [True]
    assert service.threads == {"Memory"}
    assert capsys.readouterr().out == ""


def test_each_epoch_is_tracked_once_across_resumes(tmp_path):
    """The second process repeats epochs 3 and 4; the service had lost epoch 2 when the first was killed."""
    service = MemoryService()
    process(tmp_path, service, range(1, 5), complete=False)
    service.epochs.remove(2)
    process(tmp_path, service, range(3, 7))
    assert sorted(service.epochs) == [1, 2, 3, 4, 5, 6]
    assert service.ends == [False, True]


def test_a_broken_service_costs_one_warning_and_catches_up(tmp_path, capsys):
    service = MemoryService()
    results = CsvTracker(tmp_path / "results.csv")
    tracker = BackgroundTracker(service, results)
    service.down = True
    tracker.start({"lr0": 0.01}, 1)
    for epoch in (1, 2):
        results.epoch(epoch, {"train/box": 1.0})
        tracker.epoch(epoch, {})
    deadline = time.monotonic() + 10
    while not (out := capsys.readouterr().out) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert out == "warning: Memory: no route to host; tried again after each epoch\n"
    time.sleep(0.1)
    service.down = False
    results.epoch(3, {"train/box": 1.0})
    tracker.close()
    assert (service.epochs, service.settings) == ([1, 2, 3], {"lr0": 0.01})
    assert capsys.readouterr().out == ""


def test_a_service_that_never_works_is_reported_at_the_end(tmp_path, capsys):
    service = MemoryService()
    service.down = True
    process(tmp_path, service, range(1, 4))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "warning: Memory lacks 3 epochs that results.csv has"
    assert len(lines) == 2
    assert not service.ends


def test_a_service_that_hangs_delays_only_the_end_and_only_once(tmp_path, capsys):
    service = MemoryService()
    service.answer.clear()
    begun = time.monotonic()
    process(tmp_path, service, range(1, 50), finish_s=0.5, close_s=20.0)
    assert time.monotonic() - begun < 5
    assert capsys.readouterr().out == "warning: Memory: no answer in 0 s; results.csv has all epochs\n"
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 50
    service.answer.set()


def test_a_stopped_run_waits_for_its_epochs_but_stores_no_files(tmp_path):
    service = MemoryService()
    process(tmp_path, service, range(1, 3), complete=False)
    assert (service.epochs, service.files, service.ends) == ([1, 2], [], [False])


def test_a_note_keeps_its_identity_until_a_new_run_replaces_it(tmp_path):
    path = tmp_path / "tracked_memory.json"
    key = RunNote(path, is_new=False).key
    again = RunNote(path, is_new=False)
    again.update(epoch=7)
    assert (again.key, RunNote(path, is_new=False).get("epoch")) == (key, 7)
    other = RunNote(path, is_new=True)
    assert other.key != key
    assert json.loads(path.read_text()) == {"id": other.key}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": 3}', "\0", "[" * 100_000])
def test_a_damaged_note_is_one_line(tmp_path, text):
    (tmp_path / "note.json").write_text(text)
    with refused():
        RunNote(tmp_path / "note.json", is_new=False)
