"""MLflow and Weights & Biases get each epoch once, and a slow, broken or absent service costs the run nothing."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

import train
from engine.checkpoint.progress import Progress
from engine.hooks.hook import Epoch, Hooks
from engine.hooks.tracking import Service, TrackedRun, Tracking
from engine.hooks.tracking_services import Mlflow, Wandb
from engine.hooks.writers import ResultsCsv
from engine.run.results_csv import ResultsTable
from engine.run.run import RunSettings
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scripts import SMALL, error_of, run_python
from tests.helpers.tiny import write_dataset, write_model
from tests.helpers.training import hook_training, started_from
from utils.config.settings import Hyperparameters, TrainConfig
from utils.logger import configure_logging

ROOT = Path(__file__).parents[3]
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


@pytest.fixture(autouse=True)
def _log() -> None:
    configure_logging(True)


def test_results_settings_and_files_arrive_in_another_thread(tmp_path, capsys):
    for name in ("report.html", "results.png", "best.pt"):
        (tmp_path / name).write_text(name)
    service = MemoryService()
    run_process(tmp_path, service, range(1, 4))
    assert service.settings == SETTINGS
    assert service.epochs == [1, 2, 3]
    assert service.rows[1] == {"time": 1.0, "train/box": 0.5, "metrics/AP": 0.2}
    assert service.files == ["report.html", "results.csv", "results.png"]  # not the weights
    assert service.ends == [True]
    assert service.threads == {"Memory"}
    assert capsys.readouterr().out == ""


def test_each_epoch_is_tracked_once_across_resumes(tmp_path):
    """The second process repeats epochs 3 and 4, which the service has."""
    service = MemoryService()
    run_process(tmp_path, service, range(1, 5), complete=False)
    assert (service.epochs, service.files, service.ends) == ([1, 2, 3, 4], [], [False])
    run_process(tmp_path, service, range(3, 7))
    assert service.epochs == [1, 2, 3, 4, 5, 6]
    assert (service.keys, service.ends) == (["", "k"], [False, True])


@pytest.mark.parametrize(
    ("first", "config", "key", "epochs"),
    [
        (3, CONFIG, "k", [1, 2, 3, 4]),  # a repeated epoch has its earlier results
        (3, OTHER_CONFIG, "", [1, 2, 3]),  # a second tracked run, of the epochs that results.csv has
        (5, OTHER_CONFIG, "k", [1, 2, 3, 4, 5]),  # nothing is repeated
    ],
    ids=["repeats", "repeats with other settings", "repeats nothing"],
)
def test_a_run_that_goes_back_with_other_settings_is_another_tracked_run(tmp_path, first, config, key, epochs):
    service = MemoryService()
    run_process(tmp_path, service, range(1, 5))
    resumed = MemoryService()
    resumed.epochs = list(service.epochs) if key else []
    run_process(tmp_path, resumed, [first], config=config)
    assert (resumed.keys, resumed.epochs) == ([key], epochs)


@pytest.mark.parametrize(("run_id", "key"), [("run", "k"), ("other", "")])
def test_a_new_run_in_a_used_folder_is_another_tracked_run(tmp_path, run_id, key):
    """``--exist-ok``. A run that torchrun restarts before its first checkpoint stays the same."""
    run_process(tmp_path, MemoryService(), [1, 2], complete=False)
    service = MemoryService()
    run_process(tmp_path, service, [1], run_id=run_id)
    assert service.keys == [key]
    assert TrackedRun.read(tmp_path / "tracked_note.json") == TrackedRun("k", 1, run_id, str(tmp_path))


@pytest.mark.parametrize(
    ("place", "key"), [(shutil.copytree, ""), (shutil.move, "k"), (os.symlink, "k")], ids=["copied", "moved", "linked"]
)
def test_a_copied_run_is_another_tracked_run_and_a_moved_one_the_same(tmp_path, place, key):
    original = tmp_path / "exp"
    original.mkdir()
    (original / "settings.yaml").write_text("run_id: run\n")
    run_process(original, MemoryService(), [1, 2], complete=False)
    folder = tmp_path / "placed"
    place(original, folder)
    service = MemoryService()
    service.epochs = [1, 2] if key else []
    run_process(folder, service, [3])
    assert (service.keys, service.epochs) == ([key], [1, 2, 3])
    assert TrackedRun.read(folder / "tracked_note.json").folder == str(folder.resolve())


@pytest.mark.parametrize(
    ("config", "run_id"), [(CONFIG, "run"), (OTHER_CONFIG, "")], ids=["same settings", "other settings"]
)
def test_a_run_without_its_note_is_found_by_its_id_unless_other_epochs_may_follow(tmp_path, config, run_id):
    """The checkpoint may have been copied from a run whose later epochs the service has."""
    service = MemoryService()
    run_process(tmp_path, service, [3], config=config)
    assert (service.keys, service.run_ids) == ([""], [run_id])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"key": "k", "ep', "damaged ("),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"key": 5}', "key: must be text, got 5"),
        (b"[1]", "must be"),
    ],
)
def test_a_damaged_note_of_the_tracked_run_is_one_warning(tmp_path, capsys, content, reason):
    """A tracking problem must not end a run."""
    run_process(tmp_path, MemoryService(), [1, 2], complete=False)
    note = tmp_path / "tracked_note.json"
    note.write_bytes(content)
    service = MemoryService()
    run_process(tmp_path, service, [3])
    assert (service.keys, service.epochs) == ([""], [1, 2, 3])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {note}: ")
    assert reason in line
    assert line.endswith("; Memory gets a new run with all epochs")
    assert TrackedRun.read(note) == TrackedRun("k", 3, "run", str(tmp_path))


def test_a_broken_service_costs_one_warning_and_catches_up(tmp_path, capsys):
    service = MemoryService()
    service.down = True
    run = Process(tmp_path, service)
    for epoch in (1, 2):
        run.track(epoch)
    deadline = time.monotonic() + 60
    while not (out := capsys.readouterr().out) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert out == "warning: Memory: no route to host; tried again after each epoch\n"
    time.sleep(0.1)
    service.down = False
    run.track(3)
    run.tracking.close()
    assert (service.epochs, service.settings) == ([1, 2, 3], SETTINGS)
    assert capsys.readouterr().out == ""


def test_a_service_that_never_works_is_reported_at_the_end(tmp_path, capsys):
    service = MemoryService()
    service.down = True
    run_process(tmp_path, service, range(1, 4))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "warning: Memory lacks 3 epochs that results.csv has"
    assert len(lines) == 2
    assert not service.ends


def test_scores_that_come_after_their_epoch_was_tracked_are_missing(tmp_path, capsys):
    """The run is resumed with fewer epochs, so that its newest one, which was not validated, becomes the last."""
    unscored = Epoch(2, {"time": 1.0, "train/box": 0.5})
    run = Process(tmp_path, MemoryService())
    run.track(1)
    run.results.record(run.trainer, unscored)
    run.tracking.report(run.trainer, unscored)
    run.tracking.close()
    assert capsys.readouterr().out == ""
    run_process(tmp_path, MemoryService(), [3])
    assert capsys.readouterr().out == ""
    service = MemoryService()
    service.epochs = [1, 2, 3]
    run = Process(tmp_path, service, 4)
    run.track(2)
    run.tracking.close()
    assert service.epochs == [1, 2, 3]
    assert capsys.readouterr().out == "warning: Memory lacks the scores of epoch 2, added to results.csv later\n"


def test_a_service_that_hangs_delays_only_the_end_and_only_once(tmp_path, capsys):
    service = MemoryService()
    service.answer.clear()
    started = time.monotonic()
    run_process(tmp_path, service, range(1, 50), finish_s=0.5, close_s=120.0)
    assert time.monotonic() - started < 60
    assert capsys.readouterr().out == "warning: Memory: no answer in 0 s; results.csv has all epochs\n"
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 50
    service.answer.set()


@pytest.fixture
def mlflow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow with its local store."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)


def tracked(project: Path) -> list:
    """The MLflow runs below a folder of runs, each with the steps of its epochs."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{project.resolve() / 'mlflow.db'}")
    runs = [run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])]
    return [(run, {m: client.get_metric_history(run.info.run_id, m) for m in run.data.metrics}, client) for run in runs]


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_continues_the_same_run_with_each_epoch_once(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.hooks.tracking_services.MAX_PARAMETERS", 40)  # settings are sent in three parts
    folder = tmp_path / "runs" / "exp"
    folder.mkdir(parents=True)
    for epochs in ((1, 2, 3), (2, 3, 4, 5)):
        config = replace(CONFIG, epochs=epochs[-1])
        run_process(folder, Mlflow(), epochs, config=config, complete=False, close_s=60)
    ((run, history, _),) = tracked(tmp_path / "runs")
    assert [(m.step, m.value) for m in history["metrics/AP"]] == [(n, n / 10) for n in range(1, 6)]
    assert [m.step for m in history["train/box"]] == [1, 2, 3, 4, 5]
    assert run.data.params.keys() == SETTINGS.keys()
    assert run.data.params["epochs"] == "3"
    assert run.info.run_name == "exp"


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_continues_a_run_whose_note_is_lost(tmp_path):
    """A new run in its folder has replaced the note, or the process has ended before it was written."""
    for run_id, epochs in (("earlier", (1, 2, 3)), ("new", (1,)), ("earlier", (3, 4))):
        run_process(tmp_path, Mlflow(), epochs, run_id=run_id, complete=False, close_s=60)
    steps = {run.data.tags["lockstep_run_id"]: history["time"] for run, history, _ in tracked(tmp_path.parent)}
    assert {run_id: [m.step for m in metrics] for run_id, metrics in steps.items()} == {
        "earlier": [1, 2, 3, 4],
        "new": [1],
    }


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_has_a_run_of_its_own_for_a_checkpoint_in_another_folder(tmp_path):
    """``epochN.pt`` copied there, without the note."""
    for name, epochs in (("first", (1, 2)), ("second", (2, 3))):
        folder = tmp_path / name
        folder.mkdir()
        run_process(folder, Mlflow(), epochs, complete=False, close_s=60)
    steps = {run.info.run_name: [m.step for m in history["time"]] for run, history, _ in tracked(tmp_path)}
    assert steps == {"first": [1, 2], "second": [2, 3]}


@pytest.mark.parametrize(("code", "continued"), [("", "key"), ("RESOURCE_DOES_NOT_EXIST", "new"), ("DOWN", None)])
def test_mlflow_does_not_continue_a_run_that_its_store_does_not_have(tmp_path, monkeypatch, code, continued):
    """A training that was moved to another project has another store, and the note of the first."""

    class MlflowException(Exception):
        error_code = code

    class Updated(Exception):
        """Raised with the id of the continued run, because the test needs no further method of the client."""

    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            pass

        def get_run(self, key: str) -> None:
            if code:
                raise MlflowException(key)

        def get_experiment_by_name(self, title: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id="1")

        def create_run(self, experiment_id: str, **_: object) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id="new"))

        def update_run(self, key: str, status: str) -> None:
            raise Updated(key)

    modules = {"": {}, ".exceptions": {"MlflowException": MlflowException}, ".tracking": {"MlflowClient": MlflowClient}}
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, f"mlflow{name}", SimpleNamespace(**content))
    expected = MlflowException if continued is None else Updated  # another error is not an answer
    with pytest.raises(expected, match=f"^{continued or 'key'}$"):
        Mlflow().open(tmp_path, TrackedRun("key", 0), {})


@pytest.mark.usefixtures("mlflow_store")
def test_mlflow_takes_metrics_of_classes_with_any_name(tmp_path, capsys):
    folder = tmp_path / "exp"
    folder.mkdir()
    names = [f"metrics/AP:{name}" for name in ("a,b", "ö(ü)", "a//b", "a/../b", "plain", "n" * 300)]
    run_process(folder, Mlflow(), (1,), row=dict.fromkeys(names, 0.5), complete=False, close_s=60)
    assert "tried again" not in capsys.readouterr().out
    ((run, _, _),) = tracked(tmp_path)
    assert {"metrics/AP:a_b", "metrics/AP:ö_ü_", "metrics/AP:plain", "train/box"} <= run.data.metrics.keys()
    assert len(run.data.metrics) == 3 + len(names)


def test_wandb_offline_continues_the_same_id_with_each_epoch_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    for epochs in ((1, 2, 3), (2, 3, 4, 5)):
        run_process(tmp_path, Wandb(), epochs, complete=False, close_s=60)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {path.stem for path in files} == {f"run-{TrackedRun.read(tmp_path / 'tracked_wandb.json').key}"}
    assert sorted(steps_of(files)) == [1, 2, 3, 4, 5]


def steps_of(files: list[Path]) -> list[int]:
    """The steps in offline files: after a header of 7 bytes, protobuf records in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = []
    for data in (path.read_bytes() for path in files):
        at = 7
        parts = b""
        while at + 7 <= len(data):
            if at % 32768 > 32768 - 7:  # the rest of a block holds no header
                at += -at % 32768
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            parts = (b"" if kind in (1, 2) else parts) + data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = Record.FromString(parts)
                if record.WhichOneof("record_type") == "history":
                    steps.append(record.history.step.num)
    return steps


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_a_killed_and_resumed_training_is_one_tracked_run(tmp_path):
    write_dataset(tmp_path / "set", train=12, val=4)
    model = write_model(tmp_path / "tiny.yaml")
    project = tmp_path / "runs"
    flags = ["--data", str(tmp_path / "set" / "data.yaml"), "--model", str(model), "--project", str(project), *SMALL]
    with Processes(tmp_path / "log") as processes:
        script = [python(), "train.py"]
        process = processes.start([*script, *flags, "--epochs", "400", "--tracker", "mlflow"], ROOT)
        table = project / "exp" / "results.csv"
        note = project / "exp" / "tracked_mlflow.json"
        processes.until(lambda: note.exists() and TrackedRun.read(note).epoch > 5)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = len(table.read_text().splitlines()) - 1
        processes.start([*script, "--resume", str(project / "exp"), "--epochs", str(done + 3)], ROOT)
        assert processes.codes()[-1] == 0, processes.output()
    ((run, history, client),) = tracked(project)
    rows = table.read_text().splitlines()[1:]
    assert [m.step for m in history["metrics/AP"]] == [int(row.split(",")[0]) for row in rows]
    assert run.info.status == "FINISHED"
    assert run.data.params["lr0"] == "None"
    assert {a.path for a in client.list_artifacts(run.info.run_id)} >= {"results.csv", "settings.yaml"}


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_store")
def test_a_server_that_is_down_costs_a_warning(tmp_path, monkeypatch):
    data = write_dataset(tmp_path / "set", train=8, val=4)
    model = write_model(tmp_path / "tiny.yaml")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    flags = ["--project", tmp_path / "runs", "--epochs", "2", "--tracker", "mlflow", *SMALL]
    done = run_python("train.py", "--data", data, "--model", model, *flags)
    assert done.stdout.count("warning: MLflow: ") == 1, done.stdout
    assert "warning: MLflow lacks 2 epochs that results.csv has" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_wandb_makes_one_run_however_often_it_is_asked(tmp_path, monkeypatch):
    """The service may have created the run of a call that ends with an error."""
    ids = []

    def init(**options: Any) -> SimpleNamespace:
        ids.append(options["id"])
        if len(ids) < 3:
            raise TimeoutError("no answer within 90 s")
        return SimpleNamespace(id=options["id"], offline=False, url="", step=0)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    service = Wandb()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            service.open(tmp_path, TrackedRun(), SETTINGS)
    assert service.open(tmp_path, TrackedRun(), SETTINGS).key == ids[0]
    assert len(set(ids)) == 1
    of_run = [service.open(tmp_path / name, TrackedRun(run_id="a"), SETTINGS).key for name in ("x", "x", "y")]
    assert of_run[0] == of_run[1] != of_run[2]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_one_line_before_anything_is_read(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    unread = write_dataset(tmp_path, train=0, val=0)
    line = error_of(capsys, train.main, *SMALL, "--data", unread, "--tracker", name)
    assert line.startswith(f"error: --tracker {name}: the package {name} ")
    assert line.endswith(f"pip install {name}, or leave out --tracker {name}")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "--tracker wandb: there is no API key; run wandb login, or set WANDB_MODE=offline, which needs none"),
        ({"WANDB_API_KEY": "short"}, "--tracker wandb: "),
        ({"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}, ""),  # a server is not asked yet
        ({"WANDB_MODE": "offline"}, ""),
    ],
)
def test_the_key_of_wandb_is_checked_without_its_server(tmp_path, variables, line):
    pytest.importorskip("wandb")
    code = (
        "from engine.hooks.tracking_services import open_services\n"
        "from utils.errors import UserError\n"
        "try: open_services(['wandb'])\nexcept UserError as error: print(error)"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment = kept | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [python(), "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n") == (1 if line else 0), done.stdout
    assert done.stdout.startswith(line)
