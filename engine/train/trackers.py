"""``--tracker``: reports a run to MLflow or Weights & Biases, in a thread of its own, so that a slow or broken server
delays no step and ends no run.

The tracked run is known by the run's id, which checkpoints store: a resumed run continues it. The vendors' telemetry is
off, unless the user's environment turns it on.

The services' own queues are not enough. With a server that is down or does not answer, ``wandb.init`` returns after
91 s, and a process with MLflow's asynchronous logging (``log_batch(synchronous=False)``), whose exit flushes the queue,
was still there four minutes after its last line (wandb 0.31, MLflow 3.17).
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.train.ledger import Epoch
from engine.train.loop import Hook, Trainer
from utils.address import as_address, full_address
from utils.errors import UserError, first_line
from utils.files.safe_io import folder_below, open_direct
from utils.logger import get_logger
from utils.machine.packages import require_package
from utils.program_folders import cache_folder

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient
    from wandb import Run as WandbRun

CLOSE_S = 10.0  # longest wait at the end for epochs alone
FINISH_S = 60.0  # longest wait at the end of a complete run, whose files are stored as well
FILES = ("report.html", "results.csv", "results.png", "settings.yaml", "confusion_matrix.png", "PR_curve.png")
EXPERIMENT = "lockstep"
RUN_ID_TAG = "lockstep_run_id"  # tag of a run in MLflow
MAX_PARAMETERS = 100  # MLflow's limit of parameters in a request; values have at most 6000 characters


class Tracker(Hook, ABC):
    """Keeps a service up to date with the rows of the run, in a thread. After an error, the next epoch tries again;
    only the first one is logged.

    A subclass opens its run, logs epochs and ends. These methods run in the thread; any may raise.
    """

    on_rank_0 = True
    name: str  # of the service

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # an item for each epoch; False: the end
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._is_complete = False
        self._has_failed = False

    @abstractmethod
    def open(self, trainer: Trainer) -> int:
        """Continues the tracked run, or creates it. Returns the last epoch that it has, 0 if none."""

    @abstractmethod
    def log(self, epoch: int, row: dict[str, float]) -> None:
        """Logs the results of an epoch, from 1, by the names of results.csv."""

    @abstractmethod
    def end(self, files: list[Path], *, is_complete: bool) -> None:
        """Stores ``files``, and ends the tracked run, for now if it is not complete."""

    def start(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first_epochs = trainer.progress.epoch  # of earlier starts
        self._thread.start()
        self._wakes.put(True)

    def epoch_saved(self, trainer: Trainer, epoch: Epoch) -> None:
        self._wakes.put(True)

    def finish(self, trainer: Trainer) -> None:
        self._is_complete = True

    def close(self) -> None:
        if self._thread.is_alive():
            self._wakes.put(False)
            self._thread.join(FINISH_S if self._is_complete and not self._has_failed else CLOSE_S)
            if self._thread.is_alive() and not self._has_failed:
                get_logger().warning("%s does not answer; results.csv has all epochs", self.name)

    def _work(self) -> None:
        """Logs the epochs that the service does not have yet, until the end."""
        tracked: int | None = None  # the newest epoch that the service has; None: its run is not open
        is_running = True
        while is_running:
            is_running = self._wakes.get()
            try:
                if tracked is None:
                    tracked = self.open(self._trainer)
                for epoch, row in sorted(dict(self._trainer.ledger.table.rows).items()):
                    if epoch > tracked:
                        self.log(epoch, {name: row[name] for name in row if name != "epoch"})
                        tracked = epoch
                if not is_running:
                    paths = [self._trainer.saver.folder / name for name in FILES if self._is_complete]
                    self.end([path for path in paths if path.exists()], is_complete=self._is_complete)
            except BaseException as error:  # any error, even SystemExit: tracking must not end a run
                if not self._has_failed:
                    message = "%s: %s; tried again after each epoch, and results.csv has all of them"
                    reason = re.sub(r"[?#]\S*", "", first_line(error))  # queries of addresses without their host
                    get_logger().warning(message, self.name, reason)
                self._has_failed = True


class Mlflow(Tracker):
    """A run in MLflow: on the server that MLFLOW_TRACKING_URI names, or else, without files, in a SQLite file in the
    folder of runs. It is found by its tag."""

    name = "MLflow"
    _client: MlflowClient
    _id: str

    def __init__(self) -> None:
        """Raises UserError if a package is missing."""
        super().__init__()
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else a message for each step
        # At the end of a run, MLflow prints the server's address, with its login.
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        self._uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        for package in ("mlflow",) if self._uri else ("mlflow", "sqlalchemy", "alembic"):
            require_package(package, "--tracker mlflow", "leave out --tracker mlflow")

    def open(self, trainer: Trainer) -> int:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        folder = trainer.saver.folder.resolve()
        own_id = trainer.saver.description.run_id
        database = folder.parent / "mlflow.db"
        if not self._uri:
            open(database, "ab", opener=open_direct).close()  # raises where a link leads elsewhere
        location = as_address(self._uri or f"sqlite:///{database}")
        self._client = client = MlflowClient(tracking_uri=full_address(location))
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = client.get_experiment_by_name(title)
        experiment_id = client.create_experiment(title) if experiment is None else experiment.experiment_id
        run_id = own_id.replace("'", "''")  # a checkpoint has it
        found = client.search_runs([experiment_id], f"tags.{RUN_ID_TAG} = '{run_id}'")
        if found:
            tracked = found[0]
        else:
            name = os.environ.get("MLFLOW_RUN_NAME") or folder.name
            tracked = client.create_run(experiment_id, tags={RUN_ID_TAG: own_id}, run_name=name)
            get_logger().info("MLflow: run %s in %s", name, location)
        self._id = tracked.info.run_id
        client.update_run(self._id, status="RUNNING")
        # MLflow takes no new value for a parameter that it has.
        settings = trainer.settings.by_name()
        parameters = [Param(name, str(settings[name])[:6000]) for name in settings if name not in tracked.data.params]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            client.log_batch(self._id, params=parameters[start : start + MAX_PARAMETERS])
        return max((metric.step for metric in client.get_metric_history(self._id, "time")), default=0)

    def log(self, epoch: int, row: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        # A name may contain that of a class (``--fitness``), with characters that MLflow refuses.
        metrics = [Metric(re.sub(r"[^\w.\- :/]", "_", name), row[name], now_ms, epoch) for name in row]
        self._client.log_batch(self._id, metrics)

    def end(self, files: list[Path], *, is_complete: bool) -> None:
        for path in files if self._uri else ():
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, "FINISHED" if is_complete else "KILLED")


class Wandb(Tracker):
    """A run in Weights & Biases, or with WANDB_MODE=offline in files that ``wandb sync`` uploads later."""

    name = "Weights & Biases"
    _run: WandbRun

    def __init__(self) -> None:
        """Raises UserError if the package is missing, or would ask for an account."""
        super().__init__()
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_DISABLE_GIT", "true")  # the settings of a repository may name programs
        os.environ.setdefault("WANDB_CACHE_DIR", str(cache_folder() / "wandb"))  # for its own log files
        wandb = require_package("wandb", "--tracker wandb", "leave out --tracker wandb")
        try:  # asks neither a server nor the user
            with contextlib.chdir(os.sep):  # a file wandb/settings in the working folder may name a server
                settings = wandb.setup().settings
            has_key = settings.mode != "online" or wandb.login(prompt=False, verify=False)
        except Exception as error:  # a malformed key, or settings that it refuses
            raise UserError(f"--tracker wandb: {first_line(error)}") from None
        if not has_key:
            raise UserError(
                "--tracker wandb: there is no API key; run wandb login, or set WANDB_MODE=offline, which needs none"
            )

    def open(self, trainer: Trainer) -> int:
        import wandb

        folder = trainer.saver.folder.resolve()
        folder_below(folder, ".wandb" if os.path.lexists(folder / ".wandb") else "wandb")  # as wandb chooses
        self._run = tracked = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or EXPERIMENT,
            name=os.environ.get("WANDB_NAME") or folder.name,
            id=trainer.saver.description.run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or folder,
            config=trainer.settings.by_name(),
            allow_val_change=True,
            # Without its record of the machine, which has the command line, and in it whole addresses.
            settings=wandb.Settings(silent=True, console="off", save_code=False, x_disable_meta=True),
        )
        location = tracked.url
        if tracked.offline:
            location = f"offline; upload with: wandb sync {shlex.quote(str(Path(tracked.dir).parent))}"
        get_logger().info("Weights & Biases: %s", location)
        return self._first_epochs if tracked.offline else max(tracked.step - 1, 0)  # offline it cannot tell

    def log(self, epoch: int, row: dict[str, float]) -> None:
        self._run.log(row, step=epoch)

    def end(self, files: list[Path], *, is_complete: bool) -> None:
        for path in files:
            self._run.save(str(path), base_path=str(path.parent), policy="now")
        self._run.finish(exit_code=0 if is_complete else 1)


TRACKERS: dict[str, type[Tracker]] = {"mlflow": Mlflow, "wandb": Wandb}
