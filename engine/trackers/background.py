"""Tracking services (MLflow, Weights & Biases): they are called in a thread of their own, so that a slow or broken
server costs the run neither time nor its life."""

from __future__ import annotations

import json
import queue
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from engine.hooks.result_files import CsvTracker, Tracker
from utils.errors import UserError, first_line
from utils.files.safe_io import open_regular, write_whole
from utils.logger import get_logger
from utils.strings import counted

CLOSE_S, FINISH_S = 10.0, 60.0  # of waiting for a service at the end: for epochs, or after errors; with files
MOST_BYTES = 1 << 20
REPORT_FILES = ("report.html", "results.csv", "results.png", "settings.yaml", "confusion_matrix.png", "PR_curve.png")


class RunNote:
    """What a later process must know to continue the tracked run: a small JSON file in the run's folder.

    Args:
        is_new: forget the note of an earlier run in the same folder.
    """

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self.path = path
        self._content: dict[str, Any] = {} if is_new or not path.exists() else self._read()

    @property
    def key(self) -> str:
        """The identity of the tracked run, made and stored before the service hears of it."""
        if "id" not in self._content:
            self.update(id=uuid.uuid4().hex[:16])
        return str(self._content["id"])

    def get(self, name: str) -> Any:
        """None if it was never stored."""
        return self._content.get(name)

    def update(self, **values: Any) -> None:
        self._content |= values
        write_whole(self.path, json.dumps(self._content) + "\n")

    def _read(self) -> dict[str, Any]:
        try:
            with open_regular(self.path, MOST_BYTES) as file:
                content = json.load(file)
            if not isinstance(content, dict) or not isinstance(content.get("id"), str):
                raise ValueError
            return content
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{self.path}: cannot be read or is damaged; move it away for a new tracked run") from None


class Service:
    """A run as one tracking service holds it. `BackgroundTracker` calls the methods in one thread, in this order; any
    of them may raise anything."""

    name = ""

    def open(self, settings: Mapping[str, Any]) -> Collection[int]:
        """Continues the tracked run, or starts it. Returns the epochs that it already has."""
        raise NotImplementedError

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        """The results of an epoch, from 1, by the names of results.csv."""
        raise NotImplementedError

    def store(self, path: Path) -> None:
        """Stores a file of the complete run."""
        raise NotImplementedError

    def close(self, *, is_complete: bool) -> None:
        """Ends the tracked run, for now if it is not complete."""
        raise NotImplementedError


class BackgroundTracker(Tracker):
    """Brings ``service`` up to date with results.csv in a thread: each epoch is tracked once, whatever was interrupted.

    An error costs one warning; the next epoch tries again. When the run resumes, epochs that the service does not have
    are logged first, and repeated ones that it has are skipped.

    Args:
        results: results.csv, called before this tracker.
        close_s, finish_s: the longest wait at the end for the service, for epochs alone and with files.
    """

    def __init__(
        self, service: Service, results: CsvTracker, *, close_s: float = CLOSE_S, finish_s: float = FINISH_S
    ) -> None:
        self._service, self._results = service, results
        self._close_s, self._finish_s = close_s, finish_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=service.name, daemon=True)
        self._settings: dict[str, Any] = {}
        self._rows: dict[int, dict[str, str]] = {}
        self._known: set[int] | None = None  # epochs that the service has; None: it could not be opened yet
        self._has_warned = self._is_complete = False

    def start(self, config: dict[str, Any], epoch: int) -> None:
        self._settings = dict(config)
        self._thread.start()
        self._update()

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        self._update()

    def finish(self, folder: Path) -> None:
        self._is_complete = True
        for path in (folder / name for name in REPORT_FILES):
            if path.exists():
                self._calls.put(partial(self._store, path))

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._update()
        self._calls.put(self._close)
        self._calls.put(None)
        limit = self._finish_s if self._is_complete and not self._has_warned else self._close_s
        self._thread.join(limit)
        if self._thread.is_alive():
            text = "%s: no answer in %.0f s; results.csv has all epochs"
            get_logger().warning(text, self._service.name, limit)
        elif missing := self._rows.keys() - (self._known or set()):
            get_logger().warning("%s lacks %s that results.csv has", self._service.name, counted(len(missing), "epoch"))

    def _update(self) -> None:
        self._rows = dict(self._results.table.rows)
        self._calls.put(self._synchronize)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # of any kind, even SystemExit: tracking is no reason to end a run
                self._warn(first_line(error))

    def _synchronize(self) -> None:
        """Logs the epochs that the service does not have."""
        if self._known is None:
            self._known = set(self._service.open(self._settings))
        for epoch, row in sorted(self._rows.items()):
            if epoch not in self._known:
                self._service.log(epoch, {name: float(cell) for name, cell in row.items() if name != "epoch"})
                self._known.add(epoch)

    def _store(self, path: Path) -> None:
        if self._known is not None:
            self._service.store(path)

    def _close(self) -> None:
        if self._known is not None:
            self._service.close(is_complete=self._is_complete)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            get_logger().warning("%s: %s; tried again after each epoch", self._service.name, reason)
