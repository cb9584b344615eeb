"""A training as a child process: what is passed on, and why it failed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.messages import refused
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model
from tools.experiment import training
from tools.experiment.training import ERRORS_TXT, Pruning, check_has_results, fitness_by_epoch, train
from utils.config.parser import parse_config
from utils.config.settings import TrainConfig
from utils.errors import Stopped
from utils.process.child import RunFailed
from utils.process.signals import StopSignals

pytestmark = pytest.mark.usefixtures("preloaded")


def config_of(tmp_path: Path, *more: str) -> TrainConfig:
    data = write_dataset(tmp_path / "set", train=4, val=2)
    model = write_model(tmp_path / "tiny.yaml")
    flags = ["--data", str(data), "--model", str(model), *SMALL, "--cache-dir", str(tmp_path), *more]
    return parse_config(TrainConfig, flags)


def test_a_finished_training_is_not_repeated(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    config = config_of(tmp_path, "--epochs", "2")
    seen = []

    def should_prune(epoch: int, fitness: float) -> bool:
        seen.append(epoch)
        return epoch == 2  # the last epoch cannot be pruned

    with StopSignals() as signals:
        for _ in range(2):
            assert train(config, folder, signals, Pruning("metrics/AP", should_prune)).code == 0
            saved_at = (folder / "last.pt").stat().st_mtime_ns
    assert seen == [1, 2, 1, 2]
    assert (folder / "last.pt").stat().st_mtime_ns == saved_at
    table = folder / "results.csv"
    assert [epoch for epoch, _ in fitness_by_epoch(table, "metrics/AP")] == [1, 2]
    check_has_results(folder)
    table.write_text("")  # after a power cut
    with refused(
        f"{table}: has lost the results of a complete training; restore it, or remove its folder to repeat it"
    ):
        check_has_results(folder)
    table.write_text("epoch\nx")
    with StopSignals() as signals:
        with refused(f"{table}: not a results file of this program; move it away"):
            train(config, folder, signals, Pruning("metrics/AP", should_prune))  # not one that has nothing to score
        assert train(config, folder, signals).code == 0  # a fold is scored without results.csv
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)  # is not deferred any more


def test_why_a_training_failed(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    config = config_of(tmp_path, "--epochs", "5", "--batch-size", "1", "--set", "box=1e38")
    with StopSignals() as signals:
        result = train(config, folder, signals)
    assert (result.code, result.has_begun) == (2, True)
    with refused(
        "stopped: the last 20 steps were not finite...--resume .../runs/a/last.pt, with a lower lr0 (--set lr0=...) or "
        "with --amp off",
        RunFailed,
    ):
        result.check()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("last.pt", "x" * 100, "/last.pt: "),
        ("results.csv", "epoch,time\n1,1\n2,2\n", ": has results of 2 epochs, but no last.pt to continue from; "),
    ],
)
def test_a_checkpoint_that_is_damaged_or_missing_is_refused(tmp_path, name, content, reason):
    """A search then ends, and the trial stays unfinished: once last.pt is restored, the trial continues."""
    (tmp_path / name).write_text(content)
    with StopSignals() as signals:
        result = train(TrainConfig(), tmp_path, signals)
    assert (result.code, result.has_begun) == (2, False)
    assert f"{tmp_path}{reason}" in result.reason
    assert (tmp_path / name).read_text() == content


def test_the_traceback_of_a_crash_is_kept_when_the_training_is_started_again(tmp_path):
    (tmp_path / ERRORS_TXT).write_text("Traceback ...\n")
    with StopSignals() as signals:
        result = train(TrainConfig(data=str(tmp_path / "none.yaml")), tmp_path, signals)
    assert (result.code, result.has_begun) == (2, False)
    assert (tmp_path / ERRORS_TXT).read_text().startswith("Traceback ...\n")


def test_a_repeated_epoch_is_reported_with_its_new_fitness(tmp_path):
    """A process was killed between results.csv and last.pt: the weights of the first value do not exist any more."""
    table = tmp_path / "results.csv"
    seen: list[tuple[int, float]] = []
    reports = training.EpochReports(table, 3, Pruning("metrics/AP", lambda *report: seen.append(report) is not None))
    for rows in ("1,0.1\n2,0.5\n", "1,0.1\n", "1,0.1\n2,0.4\n", "1,0.1\n2,0.4\n3,0.2\n"):
        table.write_text(f"epoch,metrics/AP\n{rows}")
        reports.report_new()
    assert seen == [(1, 0.1), (2, 0.5), (2, 0.4), (3, 0.2)]
