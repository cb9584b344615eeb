"""``--tracker``: trainings report to MLflow and Weights & Biases, whatever the services do."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from engine.train.trackers import TRACKERS
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.repository import ROOT
from tests.helpers.same_content import read_csv
from tests.helpers.scripts import SMALL, call, error_of
from tests.helpers.tiny import write_dataset, write_model


class FakeWandb:
    """The part of the package wandb that a training uses, with the server's runs in memory. ``fail`` is called before
    each call of ``init`` and ``log``."""

    Settings = dict

    def __init__(self, *, offline: bool = False) -> None:
        self.offline = offline
        self.steps: dict[str, list[int]] = {}  # by id
        self.configs: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.exit_codes: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.fail: Callable[[], object] = lambda: None

    def setup(self) -> SimpleNamespace:
        return SimpleNamespace(settings=SimpleNamespace(mode="offline" if self.offline else "online"))

    def login(self, **_: object) -> bool:
        return True

    def init(self, *, id: str, config: dict[str, Any], **_: object) -> SimpleNamespace:
        self.fail()
        self.threads.add(threading.current_thread())
        self.configs.append(config)
        steps = self.steps.setdefault(id, [])

        def log(row: dict[str, float], step: int) -> None:
            self.fail()
            assert row["train/box"] > 0
            steps.append(step)

        return SimpleNamespace(
            id=id,
            offline=self.offline,
            url="",
            dir=f"/wandb/{id}/files",
            step=0 if self.offline or not steps else steps[-1] + 1,
            log=log,
            save=lambda path, **_: self.files.append(Path(path).name),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """The flags of a training in ``runs/exp`` of the test's folder."""
    data = write_dataset(tmp_path / "set", train=8, val=4)
    model = write_model(tmp_path / "tiny.yaml")
    return ["--data", str(data), "--model", str(model), "--project", str(tmp_path / "runs"), *SMALL]


@pytest.mark.parametrize("offline", [False, True])
def test_a_resumed_run_continues_its_tracked_run_with_each_epoch_once(tmp_path, monkeypatch, flags, offline):
    wandb = FakeWandb(offline=offline)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    call(train.main, *flags, "--epochs", "2", "--tracker", "wandb")
    call(train.main, "--resume", tmp_path / "runs" / "exp" / "last.pt", "--epochs", "4", "--tracker", "wandb")
    assert list(wandb.steps.values()) == [[1, 2, 3, 4]]
    assert {"imgsz": 64, "mosaic": 1.0}.items() <= wandb.configs[0].items()
    assert set(wandb.files) == {"results.csv", "settings.yaml"}
    assert wandb.exit_codes == [0, 0]
    assert threading.current_thread() not in wandb.threads
    call(train.main, *flags, "--epochs", "1", "--tracker", "wandb")
    assert [len(steps) for steps in wandb.steps.values()] == [4, 1]  # another run


@pytest.mark.parametrize("failure", ["for a while", "always", "hangs"])
def test_a_failing_service_costs_one_warning_and_no_epoch(tmp_path, monkeypatch, capsys, flags, failure):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    answer = threading.Event()
    num_calls = 0

    def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        if failure == "hangs":
            answer.wait(60)
        elif failure == "always" or num_calls == 2:
            raise ConnectionError("no route to host for url: /?key=t0ken/api\nsecond line")

    wandb.fail = fail
    if failure == "hangs":
        monkeypatch.setattr("engine.train.trackers.FINISH_S", 0.1)
    call(train.main, *flags, "--epochs", "3", "--tracker", "wandb")
    answer.set()
    output = capsys.readouterr().out
    assert output.count("warning: Weights & Biases") == 1
    assert "t0ken" not in output
    assert len(read_csv(tmp_path / "runs" / "exp" / "results.csv")) == 3
    if failure == "for a while":
        assert list(wandb.steps.values()) == [[1, 2, 3]]


def test_wandb_is_not_led_out_of_the_folder_of_the_run(tmp_path, monkeypatch, flags):
    """SECURITY.md, "Writing": it prefers a folder .wandb to wandb."""
    folder = tmp_path / "runs" / "exp"
    folder.mkdir(parents=True)
    (folder / ".wandb").symlink_to(tmp_path)
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    call(train.main, *flags, "--epochs", "1", "--exist-ok", "--tracker", "wandb")
    assert not wandb.configs


def test_wandb_takes_no_address_from_the_working_folder(tmp_path, monkeypatch):
    """SECURITY.md, "Secrets": a data set could name a server, which would be sent the API key."""
    wandb = pytest.importorskip("wandb")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:1\n")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    TRACKERS["wandb"]()
    assert wandb.setup().settings.base_url.startswith("https://api.")  # its own, which differs between versions
    wandb.teardown()


def test_a_missing_package_is_one_line_before_the_run_has_a_folder(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as if it were not installed
    line = error_of(capsys, train.main, *flags, "--tracker", "mlflow")
    assert "--tracker mlflow: " in line
    assert "pip install mlflow" in line
    assert not (tmp_path / "runs").exists()


def tracked_epochs(store: Path) -> int:
    """Returns the newest epoch in a store of MLflow, which may not be complete yet."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
        with contextlib.closing(connection):
            return connection.execute("SELECT max(step) FROM metrics").fetchone()[0] or 0
    return 0


@pytest.mark.slow
def test_a_killed_and_resumed_training_is_one_run_in_mlflow(tmp_path, monkeypatch, flags):
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    project = tmp_path / "runs"
    table = project / "exp" / "results.csv"
    with Processes(tmp_path / "log") as processes:
        script = [python(), "train.py"]
        tracked = ["--tracker", "mlflow"]
        process = processes.start([*script, *flags, "--epochs", "400", *tracked], ROOT)
        processes.until(lambda: tracked_epochs(project / "mlflow.db") > 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = len(read_csv(table))
        processes.start([*script, "--resume", str(project / "exp"), "--epochs", str(done + 3), *tracked], ROOT)
        assert processes.codes()[-1] == 0, processes.output()
    client = MlflowClient(tracking_uri=f"sqlite:///{project / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    history = client.get_metric_history(run.info.run_id, "metrics/AP")
    assert [metric.step for metric in history] == list(range(1, done + 4))
    assert run.info.status == "FINISHED"
    assert {"lr0", "imgsz", "tracker"} <= run.data.params.keys()
