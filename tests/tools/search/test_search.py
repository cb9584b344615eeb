"""`python -m tools.search` with real trainings, which are interrupted, shared, pruned and failing."""

from __future__ import annotations

import csv
import os
import signal

import pytest
import torch

from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scripts import error_of
from tests.helpers.searches import RANGES, SMALL, read_trials
from tests.helpers.tiny import write_weights
from tools.search.__main__ import main
from train import main as train
from utils.config.recipes import hyperparameters_from
from utils.config.settings import Hyperparameters
from utils.files.torch_file import read_checkpoint

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("preloaded")


def created(folder) -> int:
    """Returns the trials that the journal has created."""
    return sum('"op_code":4' in line for line in (folder / "journal.log").read_text().splitlines())


@pytest.mark.slow
def test_an_interrupted_search_finds_the_same(root_and_flags, tmp_path, capsys):
    """Ctrl-C in the first trial, kill -9 in the second: the trials have the hyper-parameters and the fitness of an
    uninterrupted search."""
    root, flags = root_and_flags
    flags = [*flags, "--trials", "2", "--epochs", "6"]
    main([*flags, "--name", "whole"])
    printed = capsys.readouterr().out
    whole = root / "whole"
    broken = root / "broken"
    assert "2 trials: 2 complete" in printed
    assert f"--fitness recall --hyp {whole / 'best.yaml'}" in printed
    command = [python(), "-m", "tools.search", *flags, "--name", "broken"]
    with Processes(tmp_path / "log") as processes:
        process = processes.start(command)
        processes.until(lambda: (broken / "trials" / "0000" / "run" / "last.pt").exists())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, processes.output()
        processes.wait_gone()
        assert processes.output().rstrip().endswith(f"stopped; the same command continues the work in {broken}")
        assert "Traceback" not in processes.output()
        process = processes.start(command)
        processes.until(lambda: (broken / "trials" / "0001" / "run" / "last.pt").exists())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        processes.wait_gone()
    assert not (broken / "trials.csv").exists()
    main([*flags, "--name", "broken"])
    assert "continuing" in capsys.readouterr().out
    assert read_trials(broken) == read_trials(whole)
    assert [row["state"] for row in read_trials(broken)] == ["complete"] * 2
    assert created(broken) == 2
    best = hyperparameters_from(str(whole / "best.yaml"))
    assert best.ema_tau == 2.0
    assert best.lr0 == pytest.approx(float(max(read_trials(whole), key=lambda row: float(row["recall"]))["lr0"]))
    assert best.box == Hyperparameters().box
    assert "baseline" not in printed  # a search of lr0 has none: train.py chooses the learning rate
    assert (whole / "trials.png").stat().st_size > 5000
    kept = [path.parent.parent.name for path in whole.rglob("best.pt")]
    assert len(kept) == 1
    for more, line in (
        (["--epochs", "7"], "was started with --epochs 6, not 7"),
        (["--model", "yolov8n"], "was started with --model "),
        (["--set", "box=3"], "was started with hyper-parameter box "),
    ):
        assert line in error_of(capsys, main, *flags, "--name", "broken", *more)
    (root / "wider.yaml").write_text(RANGES.replace("0.05", "0.5"))
    line = error_of(capsys, main, *flags, "--name", "broken", "--hyp", str(root / "wider.yaml"))
    assert "was started with the range of lr0 [0.001, 0.05, 'log'], not [0.001, 0.5, 'log']" in line
    main([*flags, "--name", "broken", "--trials", "2"])  # nothing is left to do
    assert created(broken) == 2


@pytest.mark.slow
def test_the_first_trial_is_the_default_run_bit_for_bit(root_and_flags, tmp_path, monkeypatch):
    """From weights, in a run so short that train.py raises the rate of new layers."""
    root, flags = root_and_flags
    weights = write_weights(tmp_path / "start.pt", ["light", "other"])
    flags = ["--data", flags[flags.index("--data") + 1], "--weights", str(weights), *SMALL, "--epochs", "2"]
    flags += ["--project", str(tmp_path), "--cache-dir", str(root)]
    for ranges in ("all", "optimizer"):
        main([*flags, "--hyp", ranges, "--trials", "1", "--name", ranges])
        train([*flags, "--name", f"default-{ranges}"])
        searched, default = (
            read_checkpoint(path)["ema"]
            for path in (tmp_path / ranges / "trials/0000/run/best.pt", tmp_path / f"default-{ranges}" / "best.pt")
        )
        assert all(torch.equal(searched[name], default[name]) for name in default)


def study_of(folder, trials: int, value: float, steps: int) -> None:
    """Writes a search in ``folder`` that has had ``trials`` trials, whose fitness was ``value`` after each step."""
    folder.mkdir()
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize")
    distributions = {
        "lr0": optuna.distributions.FloatDistribution(0.001, 0.05, log=True),
        "mosaic": optuna.distributions.CategoricalDistribution((0.0, 1.0)),
        "close_mosaic": optuna.distributions.IntDistribution(0, 3),
    }
    for number in range(trials):
        study.add_trial(
            optuna.trial.create_trial(
                params={"lr0": 0.01 + number / 1000, "mosaic": 1.0, "close_mosaic": number % 4},
                distributions=distributions,
                value=value,
                intermediate_values=dict.fromkeys(range(1, steps + 1), value),
            )
        )


@pytest.mark.parametrize("pruner", ["median", pytest.param("none", marks=pytest.mark.slow)])
def test_a_hopeless_trial_ends_early(root_and_flags, pruner):
    root, flags = root_and_flags
    folder = root / f"pruned by {pruner}"
    study_of(folder, 5, 2.0, 12)  # no fitness can reach it
    more = ["--trials", "6", "--epochs", "12", "--prune-after", "2", "--pruner", pruner, "--name", folder.name]
    main([*flags, *more])
    row = read_trials(folder)[5]
    with open(folder / "trials" / "0005" / "run" / "results.csv", newline="") as file:
        epochs = len(list(csv.DictReader(file)))
    if pruner == "none":
        assert (row["state"], row["epochs"], epochs) == ("complete", "12", 12)
    else:
        assert (row["state"], row["epochs"]) == ("pruned", "2")
        assert 2 <= epochs < 12
    assert not list((folder / "trials" / "0005").rglob("*.pt"))  # it is not the best


@pytest.mark.slow
def test_failed_trials_do_not_end_the_search(root_and_flags, capsys):
    root, flags = root_and_flags
    (root / "explosive.yaml").write_text("cls: {choice: [0.5, 1.0e+38]}\nema_tau: 2\n")
    flags = [*flags, "--hyp", str(root / "explosive.yaml"), "--epochs", "3", "--batch-size", "1"]
    main([*flags, "--trials", "4", "--name", "explosive"])
    rows = read_trials(root / "explosive")
    assert rows[0]["cls"] == "0.5"  # the recipe's own value comes first
    for row in rows:
        assert row["state"] == ("complete" if row["cls"] == "0.5" else "failed")
        assert ("not finite" in row["reason"]) == (row["state"] == "failed")
    assert {row["state"] for row in rows} == {"complete", "failed"}


@pytest.mark.slow
def test_trials_are_scored_by_cross_validation(root_and_flags, capsys):
    root, flags = root_and_flags
    flags = [*flags, "--trials", "2", "--epochs", "1", "--folds", "2", "--name", "folds"]
    main(flags)
    for number, row in enumerate(read_trials(root / "folds")):
        with open(root / "folds" / "trials" / f"{number:04}" / "results.csv", newline="") as file:
            pooled = list(csv.DictReader(file))[-1]
        assert (pooled["fold"], int(pooled["images"])) == ("pooled", 12)
        assert float(row["recall"]) == pytest.approx(float(pooled["recall"]), abs=1e-6)
        assert row["folds"] == "2"
