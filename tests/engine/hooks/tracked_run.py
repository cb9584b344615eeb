"""A run whose epochs are tracked, and a service that keeps what it receives in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.checkpoint.progress import Progress
from engine.hooks.hook import Epoch, Hooks
from engine.hooks.tracking import Service, TrackedRun, Tracking
from engine.hooks.writers import ResultsCsv
from engine.run.results_csv import ResultsTable
from engine.run.run import RunSettings
from tests.helpers.training import hook_training, started_from
from utils.config.settings import Hyperparameters, TrainConfig

CONFIG = TrainConfig(batch_size=8, epochs=10)
OTHER_CONFIG = replace(CONFIG, batch_size=4)
SETTINGS = RunSettings(CONFIG, Hyperparameters()).by_name()


class MemoryService:
    """Keeps what it receives in memory. ``down`` makes each call fail; a call returns only when ``answer`` is set."""

    flag = "note"
    name = "Memory"

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.epochs: list[int] = []
        self.rows: list[dict[str, float]] = []
        self.files: list[str] = []
        self.keys: list[str] = []
        self.run_ids: list[str] = []
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

    def open(self, folder: Path, note: TrackedRun, settings: Mapping[str, Any]) -> TrackedRun:
        self._called()
        self.settings = dict(settings)
        self.keys.append(note.key)
        self.run_ids.append(note.run_id)
        return TrackedRun("k", max(self.epochs, default=0))

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


class Process:
    """A process of a run, which starts or resumes at epoch ``first``."""

    def __init__(
        self,
        folder: Path,
        service: Service,
        first: int = 1,
        config: TrainConfig = CONFIG,
        stored_config: TrainConfig = CONFIG,
        run_id: str = "run",
        **limits: float,
    ) -> None:
        """``config``: of this process; ``stored_config``: of the checkpoint from which it resumes."""
        path = folder / "results.csv"
        self.results = ResultsCsv(path, ResultsTable.read_if_exists(path))
        self.tracking = Tracking(service, self.results.table, **limits)
        progress = Progress(epoch=first - 1)
        self.trainer = hook_training(
            folder,
            config=config,
            run_id=run_id,
            progress=progress,
            started_from=started_from(progress, config=stored_config) if first > 1 else None,
        )
        self._hooks = Hooks([self.results, self.tracking])
        self._hooks.call("start", self.trainer)

    def track(self, epoch: int, row: Mapping[str, float] = MappingProxyType({})) -> None:
        scores = {"time": 1.0, "train/box": 1 / epoch, "metrics/AP": epoch / 10, **row}
        for point in ("record", "report"):
            self._hooks.call(point, self.trainer, Epoch(epoch, dict(scores)))


def run_process(
    folder: Path,
    service: Service,
    epochs: Sequence[int],
    *,
    row: Mapping[str, float] = MappingProxyType({}),
    complete: bool = True,
    **options: Any,
) -> None:
    """Tracks ``epochs`` in a process of a run, which starts or resumes at the first of them.

    ``complete``: the run ends with the last one. ``options``: of `Process`.
    """
    run = Process(folder, service, epochs[0], **options)
    for epoch in epochs:
        run.track(epoch, row)
    if complete:
        run.tracking.finish(run.trainer)
    run.tracking.close()
