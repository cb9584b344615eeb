"""Keeps a tracking service up to date with a run, in a separate thread, so that a slow or broken server does not hold
up the run.

The services' own queues are not enough. With a server that is down or does not answer, ``wandb.init`` returns after
91 s, and a process with MLflow's asynchronous logging (``log_batch(synchronous=False)``), whose exit flushes the queue,
was still there four minutes after its last line (wandb 0.31, MLflow 3.17).
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from engine.checkpoint.newest_run import newest_run_id
from engine.hooks.hook import Epoch, Hook, Training
from engine.run.results_csv import ResultsTable
from utils.errors import UserError, first_line
from utils.files.safe_io import read_text, write_whole
from utils.logger import get_logger
from utils.schema import Count, build
from utils.strings import counted

CLOSE_S = 10.0  # longest wait for a service at the end of a run if only epochs are missing, or after errors
FINISH_S = 60.0  # longest wait if files are stored as well
MAX_NOTE_BYTES = 1 << 16  # size limit of the file of a `TrackedRun`
REPORT_FILES = ("report.html", "results.csv", "results.png", "settings.yaml", "confusion_matrix.png", "PR_curve.png")


@dataclass(frozen=True)
class TrackedRun:
    """The note with which a later process continues the tracked run: a small JSON file in the run's folder."""

    key: str = ""  # the service's key for its run; "": not known
    epoch: Count = 0  # the last one tracked
    # Id of the training (`engine.checkpoint.newest_run`). Without a key, the service continues the tracked run that was
    # created with this id in the same folder, if it has one; "": it creates a new one.
    run_id: str = ""
    # Folder of the training, resolved; "": not known. A copy becomes another tracked run while this folder can be seen;
    # a copy on another machine cannot be told from a run that was moved there, and continues this one.
    folder: str = ""

    @staticmethod
    def read(path: Path) -> TrackedRun:
        """Raises UserError for a file that is not such a note."""
        text = read_text(path, MAX_NOTE_BYTES)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: damaged ({first_line(error)})") from None
        return build(TrackedRun, content, str(path))


class Service(Protocol):
    """A run in a tracking service. `Tracking` calls the methods in one thread, in this order; any may raise."""

    flag: str  # value of ``--tracker``
    name: str  # in messages

    def open(self, folder: Path, tracked: TrackedRun, settings: Mapping[str, Any]) -> TrackedRun:
        """Continues ``tracked``, or starts a tracked run for the training in ``folder``. Returns its key and the last
        epoch that the service has. Called again if it raises."""

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        """Logs the results of an epoch, from 1, by the names of results.csv."""

    def store(self, path: Path) -> None:
        """Stores a file of the complete run."""

    def close(self, *, is_complete: bool) -> None:
        """Ends the tracked run, for now if it is not complete."""


class Tracking(Hook):
    """Keeps ``service`` up to date with ``table``, the content of results.csv, in a thread on rank 0. Each epoch is
    tracked once.

    Only the first error is logged; the next epoch tries again. ``close_s``, ``finish_s``: the longest wait at the end,
    for epochs alone and with files.
    """

    def __init__(
        self, service: Service, table: ResultsTable, *, close_s: float = CLOSE_S, finish_s: float = FINISH_S
    ) -> None:
        self._service = service
        self._table = table
        self._close_s = close_s
        self._finish_s = finish_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._make_calls, name=service.name, daemon=True)
        self._tracked_rows: dict[int, Mapping[str, str]] = {}  # by epoch; results.csv may get other values later
        self._is_open = False
        self._is_complete = False
        self._has_warned = False

    def start(self, trainer: Training) -> None:
        run = trainer.run
        self._folder = run.folder
        self._run_id = run.run_id
        self._settings = run.settings.by_name()
        self._path = run.folder / f"tracked_{self._service.flag}.json"
        self._tracked = self._choose_tracked_run(trainer)
        self._thread.start()
        self._queue_update()

    def _choose_tracked_run(self, trainer: Training) -> TrackedRun:
        """Returns the tracked run that this start of the training continues; one without a key may be new. A run
        diverges if its next epochs may differ from those tracked before: no service takes new values for an epoch that
        it has.

        ===================================== ======== ===============================================================
        note in the run's folder              diverges continues
        ===================================== ======== ===============================================================
        damaged                               any      a new tracked run, which gets all epochs
        none, of an earlier run, or copied    no       the one that the service has for this run and folder, or a new
        none, of an earlier run, or copied    yes      a new one
        of this run, ahead of the checkpoint  yes      a new one
        of this run otherwise                 any      that of the note
        ===================================== ======== ===============================================================
        """
        name = self._service.name
        new = TrackedRun()
        diverges = _diverges_from_tracked(trainer)
        try:
            note = TrackedRun.read(self._path) if self._path.exists() else None
        except UserError as error:
            get_logger().warning("%s; %s gets a new run with all epochs", error, name)
            return new
        if note is None or note.run_id != self._run_id or self._is_copied(note):
            return new if diverges else TrackedRun(run_id=self._run_id)
        is_ahead = note.epoch > trainer.progress.epoch
        if is_ahead and diverges:
            get_logger().info(
                "%s: a new run, because the epochs after %d may differ from those tracked before",
                name,
                trainer.progress.epoch,
            )
            return new
        return note

    def _is_copied(self, note: TrackedRun) -> bool:
        """Returns True if the note was copied here with the run, and not moved: the original folder still has the
        run."""
        original = Path(note.folder)
        if not note.folder or newest_run_id(original) != self._run_id:
            return False
        return not original.samefile(self._folder)

    def report(self, trainer: Training, epoch: Epoch) -> None:
        self._queue_update()

    def finish(self, trainer: Training) -> None:
        self._is_complete = True

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._queue_update()
        self._calls.put(self._end)
        self._calls.put(None)
        name = self._service.name
        stores_files = self._is_complete and not self._has_warned
        timeout_s = self._finish_s if stores_files else self._close_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            get_logger().warning("%s: no answer in %.0f s; results.csv has all epochs", name, timeout_s)
            return
        missing = sum(epoch > self._tracked.epoch for epoch in self._table.rows)
        if missing:
            get_logger().warning("%s lacks %s that results.csv has", name, counted(missing, "epoch"))
        rows = self._table.rows
        for epoch, row in self._tracked_rows.items():
            if epoch in rows and row.keys() != rows[epoch].keys():  # `--val-every` had left out its validation
                get_logger().warning("%s lacks the scores of epoch %d, added to results.csv later", name, epoch)

    def _queue_update(self) -> None:
        """Queues the epochs that results.csv has now."""
        self._calls.put(partial(self._synchronize, dict(self._table.rows)))

    def _make_calls(self) -> None:
        """Makes the queued calls until it reads None. Runs in the thread."""
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # any error, even SystemExit: tracking must not end a run
                if not self._has_warned:
                    reason = first_line(error)
                    get_logger().warning("%s: %s; tried again after each epoch", self._service.name, reason)
                self._has_warned = True

    def _synchronize(self, rows: Mapping[int, Mapping[str, str]]) -> None:
        """Logs the epochs that the service does not have."""
        if not self._is_open:
            self._remember(self._service.open(self._folder, self._tracked, self._settings))
            self._is_open = True
        for epoch, row in sorted(rows.items()):
            if epoch > self._tracked.epoch:
                self._service.log(epoch, {name: float(cell) for name, cell in row.items() if name != "epoch"})
                self._remember(replace(self._tracked, epoch=epoch))
            self._tracked_rows.setdefault(epoch, row)

    def _remember(self, tracked: TrackedRun) -> None:
        """Records how far the service has come, also in the run's folder."""
        self._tracked = replace(tracked, run_id=self._run_id, folder=str(self._folder.resolve()))
        write_whole(self._path, json.dumps(asdict(self._tracked)) + "\n")

    def _end(self) -> None:
        """Stores the files of a complete run, and ends the tracked run."""
        if not self._is_open:
            return
        if self._is_complete:
            for name in REPORT_FILES:
                path = self._folder / name
                if path.exists():
                    self._service.store(path)
        self._service.close(is_complete=self._is_complete)


def _diverges_from_tracked(trainer: Training) -> bool:
    """Returns True if the epochs after the checkpoint will differ from those that were tracked before."""
    started_from = trainer.run.started_from
    return started_from is not None and not trainer.checkpointer.description.trains_like(started_from.description)
