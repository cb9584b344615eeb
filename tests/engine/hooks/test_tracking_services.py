"""MLflow and Weights & Biases track each epoch once, offline, and across resumes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from engine.hooks.tracking import TrackedRun
from engine.hooks.tracking_services import Mlflow, Wandb
from tests.engine.hooks.tracked_run import CONFIG, SETTINGS, run_process
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.repository import ROOT
from tests.helpers.scripts import SMALL, error_of, run_python
from tests.helpers.tiny import write_dataset, write_model
from utils.logger import configure_logging


@pytest.fixture(autouse=True)
def _log() -> None:
    configure_logging(True)


@pytest.fixture
def mlflow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow with its local store."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)


def tracked(project: Path) -> list:
    """Returns the MLflow runs below a folder of runs, each with the steps of its epochs."""
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
