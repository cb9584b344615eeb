"""``--tracker``: MLflow and Weights & Biases, called in a thread of their own, so that a slow or broken server does not
hold up the run. Their vendor telemetry is off, unless the user's environment turns it on.

Their own queues are not enough. With a server that is down or does not answer, ``wandb.init`` returns after 91 s, and a
process with MLflow's asynchronous logging (``log_batch(synchronous=False)``), whose exit flushes the queue, was still
there four minutes after its last line (wandb 0.31, MLflow 3.17).
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.hooks.hook import Epoch, Hook, Training
from engine.hooks.results import ResultsCsv
from utils.errors import UserError, first_line
from utils.files.folders import cache_folder
from utils.files.safe_io import write_whole
from utils.files.schema import Count, build
from utils.logger import get_logger
from utils.machine.packages import require_package
from utils.strings import counted

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from wandb import Run as WandbRun

CLOSE_S = 10.0  # longest wait for a service at the end of a run: for epochs alone, or after errors
FINISH_S = 60.0  # and with files
REPORT_FILES = ("report.html", "results.csv", "results.png", "settings.yaml", "confusion_matrix.png", "PR_curve.png")
STORE = "mlflow.db"  # in the folder of runs
ARTIFACTS = "mlartifacts"  # there, too
EXPERIMENT = "lockstep"
MAX_PARAMETERS = 100  # in a request to MLflow
MAX_CHARACTERS = 6000  # of a parameter
MAX_NAME_CHARACTERS = 250  # of a metric
# Variables that turn off messages about each step.
QUIET = {"mlflow": {"MLFLOW_LOGGING_LEVEL": "WARNING"}, "wandb": {"WANDB_SILENT": "true"}}


@dataclass(frozen=True)
class Note:
    """What a later process must know to continue the tracked run: a small JSON file in the run's folder."""

    key: str = ""  # by which the service finds its run; "": there is none yet
    epoch: Count = 0  # the last one tracked

    @staticmethod
    def read(path: Path) -> Note:
        return build(Note, json.loads(path.read_text("utf-8")), str(path))


class Service(Protocol):
    """A run in a tracking service. `Tracking` calls the methods in one thread, in this order; any may raise."""

    flag: str  # value of ``--tracker``
    name: str  # in messages

    def open(self, folder: Path, note: Note, settings: Mapping[str, Any]) -> Note:
        """Starts the tracked run for the run in ``folder``, or continues the one that ``note`` names. Returns its key
        and the last epoch that the service has. Called again if it raises."""

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        """Logs the results of an epoch, from 1, by the names of results.csv."""

    def store(self, path: Path) -> None:
        """Stores a file of the complete run."""

    def close(self, *, is_complete: bool) -> None:
        """Ends the tracked run, for now if it is not complete."""


class Tracking(Hook):
    """Brings ``service`` up to date with results.csv in a thread, on rank 0: each epoch is tracked once.

    An error costs one warning; the next epoch tries again. ``close_s``, ``finish_s``: the longest wait at the end, for
    epochs alone and with files.
    """

    def __init__(self, service: Service, *, close_s: float = CLOSE_S, finish_s: float = FINISH_S) -> None:
        self._service = service
        self._close_s = close_s
        self._finish_s = finish_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=service.name, daemon=True)
        self._is_open = False
        self._is_complete = False
        self._has_warned = False

    def start(self, trainer: Training) -> None:
        run = trainer.run
        self._folder = run.folder
        self._settings = run.settings.by_name()
        self._table = trainer.hooks.get(ResultsCsv).table
        self._path = run.folder / f"tracked_{self._service.flag}.json"
        if run.checkpoint is None and run.config.exist_ok:
            # An earlier run's. (A run that torchrun restarts before its first checkpoint begins anew, too.)
            self._path.unlink(missing_ok=True)
        self._note = Note.read(self._path) if self._path.exists() else Note()
        if self._note.epoch > trainer.progress.epoch and _trains_otherwise(trainer):
            name = self._service.name
            get_logger().info(
                "%s: a new run, as other epochs follow epoch %d than before", name, trainer.progress.epoch
            )
            self._note = Note()  # no service takes other values for an epoch that it has
        self._thread.start()
        self._update()

    def report(self, trainer: Training, epoch: Epoch) -> None:
        self._update()

    def finish(self, trainer: Training) -> None:
        self._is_complete = True

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._update()
        self._calls.put(self._end)
        self._calls.put(None)
        name = self._service.name
        stores_files = self._is_complete and not self._has_warned
        timeout_s = self._finish_s if stores_files else self._close_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            get_logger().warning("%s: no answer in %.0f s; results.csv has all epochs", name, timeout_s)
            return
        missing = sum(epoch > self._note.epoch for epoch in self._table.rows)
        if missing:
            get_logger().warning("%s lacks %s that results.csv has", name, counted(missing, "epoch"))

    def _update(self) -> None:
        self._calls.put(partial(self._synchronize, dict(self._table.rows)))

    def _run(self) -> None:
        """Makes the calls of the queue, up to None. Runs in the thread."""
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # of any kind, even SystemExit: tracking is no reason to end a run
                if not self._has_warned:
                    reason = first_line(error)
                    get_logger().warning("%s: %s; tried again after each epoch", self._service.name, reason)
                self._has_warned = True

    def _synchronize(self, rows: Mapping[int, Mapping[str, str]]) -> None:
        """Logs the epochs that the service does not have."""
        if not self._is_open:
            self._keep(self._service.open(self._folder, self._note, self._settings))
            self._is_open = True
        for epoch, row in sorted(rows.items()):
            if epoch > self._note.epoch:
                self._service.log(epoch, {name: float(cell) for name, cell in row.items() if name != "epoch"})
                self._keep(Note(self._note.key, epoch))

    def _keep(self, note: Note) -> None:
        """Stores the newest note in the run's folder."""
        self._note = note
        write_whole(self._path, json.dumps(asdict(note)) + "\n")

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


def _trains_otherwise(trainer: Training) -> bool:
    """Whether the epochs after the checkpoint will differ from those that were tracked before."""
    checkpoint = trainer.run.checkpoint
    return checkpoint is not None and not trainer.checkpointer.description.trains_like(checkpoint)


class Mlflow:
    """A run in MLflow, on the server that MLFLOW_TRACKING_URI names, or else in a SQLite file in the folder of runs."""

    flag = "mlflow"
    name = "MLflow"

    _client: MlflowClient  # set by `open`, which is called first

    def __init__(self) -> None:
        self._run_id = ""

    def open(self, folder: Path, note: Note, settings: Mapping[str, Any]) -> Note:
        from mlflow.tracking import MlflowClient

        folder = folder.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder.parent / STORE}")
        if note.key:
            self._client.update_run(note.key, status="RUNNING")
            self._run_id = note.key
            epochs = [metric.step for metric in self._client.get_metric_history(note.key, "time")]
            return Note(note.key, max(epochs, default=0))
        if not self._run_id:  # else an earlier call has failed after this
            self._run_id = self._create_run(folder, uri)
        self._log_parameters(settings)
        return Note(self._run_id)

    def _create_run(self, folder: Path, uri: str | None) -> str:
        """Returns the id of a new run in the experiment, which is made if it does not exist."""
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        name = os.environ.get("MLFLOW_RUN_NAME") or folder.name
        experiment = self._client.get_experiment_by_name(title)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            artifacts = None if uri else (folder.parent / ARTIFACTS).as_uri()
            experiment_id = self._client.create_experiment(title, artifact_location=artifacts)
        run = self._client.create_run(experiment_id, tags={"folder": str(folder)}, run_name=name)
        get_logger().info("MLflow: run %s in %s", name, uri or folder.parent / STORE)
        return run.info.run_id

    def _log_parameters(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, str(value)[:MAX_CHARACTERS]) for name, value in settings.items()]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + MAX_PARAMETERS])

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_metric_name(name), value, now_ms, epoch) for name, value in row.items()]
        self._client.log_batch(self._run_id, metrics)

    def store(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self, *, is_complete: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_complete else "KILLED")


def _metric_name(name: str) -> str:
    """Replaces what MLflow refuses in ``name``, which may hold the name of a class (``--fitness``)."""
    return posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", name))[:MAX_NAME_CHARACTERS].rstrip("/")


class Wandb:
    """A run in Weights & Biases, or with WANDB_MODE=offline in files that ``wandb sync`` uploads later."""

    flag = "wandb"
    name = "Weights & Biases"
    _run: WandbRun  # set by `open`, which is called first

    def open(self, folder: Path, note: Note, settings: Mapping[str, Any]) -> Note:
        import wandb

        folder = folder.resolve()
        self._run = run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or EXPERIMENT,
            name=os.environ.get("WANDB_NAME") or folder.name,
            id=note.key or uuid.uuid4().hex[:16],
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or folder,
            config=dict(settings),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )
        location = f"offline; upload with: wandb sync {Path(run.dir).parent}" if run.offline else run.url
        get_logger().info("Weights & Biases: %s", location)
        return Note(run.id, max(run.step - 1, note.epoch))  # files of an offline run are not read back

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=epoch)

    def store(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


SERVICES = {service.flag: service for service in (Mlflow, Wandb)}


def open_services(names: Sequence[str]) -> list[Tracking]:
    """Returns the hooks of the services ``names``. Raises UserError for one whose package is not installed, or that
    would ask for an account."""
    for name in names:
        for variable, value in QUIET[name].items():
            os.environ.setdefault(variable, value)
        if name == "wandb":
            with contextlib.suppress(UserError):  # there is no home folder
                os.environ.setdefault("WANDB_CACHE_DIR", str(cache_folder() / "wandb"))  # of its own log files
        require_package(name, f"--tracker {name}", f"leave out --tracker {name}")
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI"):
        for package in ("sqlalchemy", "alembic"):
            require_package(package, "--tracker mlflow", "set MLFLOW_TRACKING_URI to a server's address")
    if "wandb" in names:
        import wandb

        try:  # without asking a server, nor the user
            has_key = wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False)
        except Exception as error:  # a malformed key, or settings that it refuses
            raise UserError(f"--tracker wandb: {first_line(error)}") from None
        if not has_key:
            raise UserError(
                "--tracker wandb: there is no API key; run wandb login, or set WANDB_MODE=offline, which needs none"
            )
    return [Tracking(SERVICES[name]()) for name in dict.fromkeys(names)]
