"""The services of ``--tracker``. A package is imported when it is needed, after its vendor telemetry has been turned
off, unless the user's environment turns it on."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from engine.checkpoint.run import Run
from engine.hooks.hook import Training
from engine.hooks.result_files import ResultFiles, Tracker, TrackerHook
from engine.trackers.background import BackgroundTracker, RunNote, Service
from utils.errors import UserError, first_line
from utils.files.safe_io import open_file
from utils.logger import get_logger
from utils.machine.limits import require_package

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from wandb import Run as WandbRun

STORE, ARTIFACTS = "mlflow.db", "mlartifacts"  # in the folder of runs
KEY_TAG = "lockstep.run"
_SQLITE = b"SQLite format 3\0"  # the first bytes of a database, which may also be empty
MOST_PARAMETERS = 100  # in a request to MLflow
MOST_CHARACTERS = 6000  # of one
LONGEST_NAME = 250  # of a metric
EXPERIMENT = "lockstep"
# Vendor telemetry, and messages about each step.
QUIET = {
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"},
    "wandb": {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"},
}


def check_services(names: Collection[str], project: Path) -> None:
    """Imports the packages of the services, whose names are those of ``--tracker``.

    Args:
        project: the folder of runs.

    Raises UserError for one that is not installed, or would ask for an account, or cannot keep its store in
    ``project``.
    """
    for name in names:
        for variable, value in QUIET[name].items():
            os.environ.setdefault(variable, value)
        require_package(name, f"--tracker {name}", f"leave out --tracker {name}")
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI"):
        for package in ("sqlalchemy", "alembic"):
            require_package(package, "--tracker mlflow", "set MLFLOW_TRACKING_URI to a server's address")
        if {"%", "?"} & set(str(project.resolve())):
            raise UserError(
                f"--tracker mlflow: {project}: MLflow cannot keep its {STORE} in a folder with % or ? in its path; "
                "choose another --project, or set MLFLOW_TRACKING_URI"
            )
    if "wandb" in names:
        _check_wandb_key()


def _check_wandb_key() -> None:
    """Without asking a server, nor the user."""
    import wandb

    try:
        has_key = wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False)
    except Exception as error:  # a malformed key, or settings that it refuses
        reason = first_line(error)
        raise UserError(f"--tracker wandb: {reason}") from None
    if not has_key:
        raise UserError(
            "--tracker wandb: there is no API key; run wandb login, or set WANDB_MODE=offline, which needs none"
        )


def open_service(name: str, run: Run) -> Service:
    """The service of that name, which `check_services` accepts, for ``run``."""
    # A run that torchrun restarts before its first checkpoint has none, but has its folder.
    is_new = run.checkpoint is None and run.config.exist_ok
    note = RunNote(run.folder / f"tracked_{name}.json", is_new=is_new)
    return (MlflowService if name == "mlflow" else WandbService)(run.folder, note)


class MlflowService(Service):
    """A run in MLflow, on the server that MLFLOW_TRACKING_URI names, or else in a SQLite file in the folder of runs.

    It is found again by a tag.
    """

    name = "MLflow"

    def __init__(self, folder: Path, note: RunNote) -> None:
        self._folder, self._note = folder.resolve(), note
        self._run_id = ""
        self._client: MlflowClient | None = None

    def open(self, settings: Mapping[str, Any]) -> Collection[int]:
        from mlflow.tracking import MlflowClient

        project = self._folder.parent
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        place = None if uri else (project / ARTIFACTS).as_uri()
        if not uri:
            _check_store(project / STORE)
            uri = f"sqlite:///{project / STORE}"
        self._client = client = MlflowClient(tracking_uri=uri)
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = client.get_experiment_by_name(title)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = client.create_experiment(title, artifact_location=place)
        found = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{self._note.key}'")
        stored = [run.info.artifact_uri for run in found[:1]] + ([experiment.artifact_location] if experiment else [])
        if strange := [uri for uri in stored if place and not _is_below(uri, place)]:
            raise UserError(
                f"{project / STORE} would send files to {strange[0]}, not to {ARTIFACTS} next to it; if the folder of "
                "runs was moved, or you have not made this file, rename it"
            )
        if found:
            self._run_id, known = found[0].info.run_id, found[0].data.params
            client.update_run(self._run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_RUN_NAME") or self._folder.name
            tags = {KEY_TAG: self._note.key, "folder": str(self._folder)}
            self._run_id, known = client.create_run(experiment_id, tags=tags, run_name=name).info.run_id, {}
            get_logger().info("MLflow: run %s in %s", name, uri)
        self._log_settings({name: str(value)[:MOST_CHARACTERS] for name, value in settings.items()}, known)
        return {metric.step for metric in client.get_metric_history(self._run_id, "time")} if found else set()

    def _log_settings(self, settings: Mapping[str, str], known: Mapping[str, str]) -> None:
        """MLflow does not change parameters: those that differ in a resumed run become tags."""
        from mlflow.entities import Param

        new = [Param(name, value) for name, value in settings.items() if name not in known]
        for start in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[start : start + MOST_PARAMETERS])
        for name, value in settings.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run_id, f"resumed.{name}", value)

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(_metric_name(k), v, now_ms, epoch) for k, v in row.items()])

    def store(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self, *, is_complete: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_complete else "KILLED")


def _check_store(path: Path) -> None:
    """Raises UserError or OSError if something else has the name of the store: MLflow would try it for two minutes."""
    if os.path.lexists(path):
        with open(path, "rb", opener=open_file) as file:
            if file.read(len(_SQLITE)) not in (b"", _SQLITE):
                raise UserError(f"{path}: not an SQLite database; rename it")


def _is_below(uri: str, place: str) -> bool:
    return f"{uri}/".startswith(f"{place}/") and ".." not in unquote(uri).split("/")


def _metric_name(name: str) -> str:
    """``name`` with what MLflow refuses replaced: it may hold the name of a class (``--fitness``)."""
    return posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", name))[:LONGEST_NAME].rstrip("/")


class WandbService(Service):
    """A run in Weights & Biases, or with WANDB_MODE=offline in files that ``wandb sync`` uploads later."""

    name = "Weights & Biases"

    def __init__(self, folder: Path, note: RunNote) -> None:
        self._folder, self._note = folder, note
        self._run: WandbRun | None = None

    def open(self, settings: Mapping[str, Any]) -> Collection[int]:
        import wandb

        self._run = run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or EXPERIMENT,
            name=os.environ.get("WANDB_NAME") or self._folder.resolve().name,
            id=self._note.key,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or self._folder,
            config=dict(settings),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )
        if run.offline:
            get_logger().info("Weights & Biases: offline; upload with: wandb sync %s", Path(run.dir).parent)
        else:
            get_logger().info("Weights & Biases: %s", run.url)
        # Files of an offline run are not read back, so the note counts.
        return range(1, max(run.step, (self._note.get("epoch") or 0) + 1))

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        self._note.update(epoch=epoch)  # before: an epoch that a kill loses is better than one that counts twice
        self._run.log(dict(row), step=epoch)

    def store(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


class Services(TrackerHook):
    """The services of ``--tracker``. Comes after `ResultFiles`. Raises UserError as `check_services`."""

    def __init__(self, names: Sequence[str], project: Path) -> None:
        check_services(names, project)
        self._names = dict.fromkeys(names)

    def open(self, trainer: Training) -> Sequence[Tracker]:
        results = trainer.hooks.get(ResultFiles).results
        return [BackgroundTracker(open_service(name, trainer.run), results) for name in self._names]
