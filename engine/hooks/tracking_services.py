"""``--tracker``: the services MLflow and Weights & Biases. Their vendor telemetry is off, unless the user's environment
turns it on."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.hooks.tracking import Service, TrackedRun
from utils.errors import UserError, first_line
from utils.logger import get_logger
from utils.machine.packages import require_package
from utils.program_folders import cache_folder

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from wandb import Run as WandbRun

STORE = "mlflow.db"  # in the folder of runs
ARTIFACTS = "mlartifacts"  # in the folder of runs as well
EXPERIMENT = "lockstep"
RUN_ID_TAG = "lockstep_run_id"  # tag of a run in MLflow
FOLDER_TAG = "folder"  # tag of a run in MLflow
MAX_PARAMETERS = 100  # MLflow's limit for a request
MAX_CHARACTERS = 6000  # MLflow's limit for the value of a parameter
MAX_NAME_CHARACTERS = 250  # MLflow's limit for the name of a metric
# Variables that turn off messages about each step.
QUIET = {"mlflow": {"MLFLOW_LOGGING_LEVEL": "WARNING"}, "wandb": {"WANDB_SILENT": "true"}}


class Mlflow:
    """A run in MLflow, on the server that MLFLOW_TRACKING_URI names, or else in a SQLite file in the folder of runs."""

    flag = "mlflow"
    name = "MLflow"

    _client: MlflowClient  # set by `open`, which is called first

    def __init__(self) -> None:
        self._run_id = ""

    def open(self, folder: Path, tracked: TrackedRun, settings: Mapping[str, Any]) -> TrackedRun:
        from mlflow.tracking import MlflowClient

        folder = folder.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder.parent / STORE}")
        if tracked.key and self._has_run(tracked.key):
            self._run_id = tracked.key
        elif not self._run_id:  # else an earlier call of this method found or created the run, then failed
            experiment_id = self._open_experiment(folder, uri)
            existing = self._find_run(experiment_id, folder, tracked.run_id)
            self._run_id = existing or self._create_run(experiment_id, folder, uri, tracked.run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_parameters(settings)
        epochs = [metric.step for metric in self._client.get_metric_history(self._run_id, "time")]
        return TrackedRun(self._run_id, max(epochs, default=0))

    def _has_run(self, key: str) -> bool:
        """Returns False for a run that the store does not have: the training was moved to another project."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(key)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def _open_experiment(self, folder: Path, uri: str | None) -> str:
        """Returns the id of the experiment, which is created if it does not exist."""
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(title)
        if experiment:
            return experiment.experiment_id
        artifacts = None if uri else (folder.parent / ARTIFACTS).as_uri()
        return self._client.create_experiment(title, artifact_location=artifacts)

    def _find_run(self, experiment_id: str, folder: Path, run_id: str) -> str:
        """Returns MLflow's id of the run that was created for the training ``run_id`` in ``folder``; "" if there is
        none. A copy of that folder has the same ``run_id``."""
        if not run_id:
            return ""
        runs = self._client.search_runs([experiment_id], f"tags.{RUN_ID_TAG} = '{run_id}'")
        matches = (run.info.run_id for run in runs if run.data.tags.get(FOLDER_TAG) == str(folder))
        return next(matches, "")

    def _create_run(self, experiment_id: str, folder: Path, uri: str | None, run_id: str) -> str:
        """Returns MLflow's id of a new run in the experiment, for the training ``run_id`` ("": for none)."""
        name = os.environ.get("MLFLOW_RUN_NAME") or folder.name
        tags = {FOLDER_TAG: str(folder)}
        if run_id:
            tags[RUN_ID_TAG] = run_id
        run = self._client.create_run(experiment_id, tags=tags, run_name=name)
        get_logger().info("MLflow: run %s in %s", name, uri or folder.parent / STORE)
        return run.info.run_id

    def _log_parameters(self, settings: Mapping[str, Any]) -> None:
        """Logs the settings that the run does not have: all of a new run, or those that an earlier process, killed
        while it logged them, has left out. MLflow takes no new value for a setting that it has."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        missing = {name: value for name, value in settings.items() if name not in known}
        parameters = [Param(name, str(value)[:MAX_CHARACTERS]) for name, value in missing.items()]
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
    """Replaces characters that MLflow refuses in ``name``, which may contain the name of a class (``--fitness``)."""
    return posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", name))[:MAX_NAME_CHARACTERS].rstrip("/")


class Wandb:
    """A run in Weights & Biases, or with WANDB_MODE=offline in files that ``wandb sync`` uploads later."""

    flag = "wandb"
    name = "Weights & Biases"
    _run: WandbRun  # set by `open`, which is called first

    def __init__(self) -> None:
        # For a new run without an id. If `open` fails after the service has created the run, the next call finds it by
        # this id.
        self._new_id = uuid.uuid4().hex[:16]

    def open(self, folder: Path, tracked: TrackedRun, settings: Mapping[str, Any]) -> TrackedRun:
        import wandb

        folder = folder.resolve()
        self._run = run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or EXPERIMENT,
            name=os.environ.get("WANDB_NAME") or folder.name,
            id=tracked.key or self._id_of(folder, tracked.run_id),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or folder,
            config=dict(settings),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )
        location = f"offline; upload with: wandb sync {Path(run.dir).parent}" if run.offline else run.url
        get_logger().info("Weights & Biases: %s", location)
        return TrackedRun(run.id, max(run.step - 1, tracked.epoch))  # files of an offline run are not read back

    def _id_of(self, folder: Path, run_id: str) -> str:
        """Returns the id of a tracked run: the same each time for the training ``run_id`` in ``folder``."""
        if not run_id:
            return self._new_id
        return f"{run_id}-{zlib.crc32(str(folder).encode('utf-8', 'surrogateescape')):08x}"  # copies have the same id

    def log(self, epoch: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=epoch)

    def store(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


SERVICES = {service.flag: service for service in (Mlflow, Wandb)}


def open_services(names: Sequence[str]) -> list[Service]:
    """Returns the services ``names``. Raises UserError for one whose package is not installed, or that would ask for an
    account."""
    for name in names:
        for variable, value in QUIET[name].items():
            os.environ.setdefault(variable, value)
        if name == "wandb":
            with contextlib.suppress(UserError):  # there is no home folder
                os.environ.setdefault("WANDB_CACHE_DIR", str(cache_folder() / "wandb"))  # for its own log files
        require_package(name, f"--tracker {name}", f"leave out --tracker {name}")
    if "mlflow" in names and not os.environ.get("MLFLOW_TRACKING_URI"):
        for package in ("sqlalchemy", "alembic"):
            require_package(package, "--tracker mlflow", "set MLFLOW_TRACKING_URI to a server's address")
    if "wandb" in names:
        _check_wandb_key()
    return [SERVICES[name]() for name in dict.fromkeys(names)]


def _check_wandb_key() -> None:
    """Raises UserError if Weights & Biases would need an API key and has none. Asks neither a server nor the user."""
    import wandb

    try:
        has_key = wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False)
    except Exception as error:  # a malformed key, or settings that it refuses
        raise UserError(f"--tracker wandb: {first_line(error)}") from None
    if not has_key:
        raise UserError(
            "--tracker wandb: there is no API key; run wandb login, or set WANDB_MODE=offline, which needs none"
        )
