"""`python -m tools.search`: its ranges, and real searches that are killed, shared, pruned and failing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.same_content import read_csv
from tests.helpers.scripts import SMALL, error_of, training, write_inputs
from tests.helpers.tiny import write_weights
from tools.search import Search, main, open_study, read_ranges
from train import main as train
from utils.config.recipes import hyperparameters_from
from utils.config.tool_settings import SearchConfig
from utils.files.torch_file import read_checkpoint
from utils.program_folders import CONFIGS

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("preloaded")

RANGES = "lr0: [0.001, 0.05, log]\nmosaic: {choice: [0, 1]}\nclose_mosaic: [0, 3]\nema_tau: 2\n"


def ranges_of(folder: Path, text: str, **settings):
    path = folder / "ranges.yaml"
    path.write_text(text)
    return read_ranges(SearchConfig(data="demo", hyp=str(path), **settings))


def test_ranges_are_read(tmp_path):
    _, ranges = ranges_of(tmp_path, RANGES, override=["mixup=0.25"])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [study.ask(ranges).params for _ in range(200)]
    assert {type(values["close_mosaic"]) for values in drawn} == {int}
    assert {values["close_mosaic"] for values in drawn} == {0, 1, 2, 3}
    assert {values["mosaic"] for values in drawn} == {0.0, 1.0}
    below = sum(values["lr0"] < (0.001 * 0.05) ** 0.5 for values in drawn)
    assert 70 < below < 130  # uniform in the logarithm
    with refused("--set lr0=1: .../ranges.yaml searches lr0; remove one"):
        ranges_of(tmp_path, RANGES, override=["lr0=1"])


@pytest.mark.parametrize("path", sorted((CONFIGS / "search").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_ready_ranges_are_valid(path):
    assert len(read_ranges(SearchConfig(data="demo", hyp=path.stem))[1]) >= 4


@pytest.mark.parametrize(
    "text",
    [
        "lr: [0, 1]",
        "epochs: [1, 5]",  # a flag
        "lr0: [0.1, 0.01]",
        "lr0: [0, 0.01, log]",
        "mosaic: [0, 2]",
        "close_mosaic: [0, 2.5]",
        "mosaic: 1.0",  # nothing to search
        "",
    ],
)
def test_wrong_ranges_are_one_line(tmp_path, text):
    with refused("ranges.yaml: ..."):
        ranges_of(tmp_path, text)


def test_a_search_continues_with_the_settings_of_its_trainings(tmp_path):
    config = SearchConfig(data="demo", project=str(tmp_path), name="s")
    config.folder.mkdir()
    open_study(config, {"--epochs": 3})
    open_study(config, {"--epochs": 4})  # nothing has been trained yet
    (config.folder / "trials" / "0000").mkdir(parents=True)
    (config.folder / "trials" / "0000" / "settings.yaml").touch()
    open_study(config, {"--epochs": 4})
    with refused(f"{config.folder}: was started with --epochs 4, not 5; continue with the same settings, or ..."):
        open_study(config, {"--epochs": 5})
    (config.folder / "journal.log").write_text("a log\nof others\n")
    with refused(f"{config.folder}/journal.log: damaged (..."):
        open_study(config, {"--epochs": 4})


def test_the_first_trial_has_the_values_of_the_recipe_that_are_in_the_ranges(tmp_path):
    """A null has its meaning. The learning rate is chosen by train.py, and the next trial has other values."""
    text = f"{RANGES}fliplr: [0.6, 1]\nmixup: [0, 0.5]\n"
    for epochs, values in (
        (4, {"mosaic": 1.0, "mixup": 0.25, "close_mosaic": 2}),
        (100, {"mosaic": 1.0, "mixup": 0.25}),
    ):
        written, ranges = ranges_of(tmp_path, text)
        config = SearchConfig(
            data="demo", project=str(tmp_path), name=f"{epochs}", epochs=epochs, override=["mixup=0.25"]
        )
        config.folder.mkdir()
        search = Search(config, ranges, {"ema_tau": written["ema_tau"]}, "metrics/AP", open_study(config, {}))
        (first, _lock), (second, _) = search.claim(), search.claim()
        assert values.items() <= first.params.items()
        assert first.params.keys() == second.params.keys() == ranges.keys()
        assert first.params["mixup"] != second.params["mixup"]


@pytest.fixture(scope="module")
def root_and_flags(tmp_path_factory):
    root = write_inputs(tmp_path_factory.mktemp("search"), train=8, val=4)
    (root / "ranges.yaml").write_text(RANGES)
    return root, training(root, root, "--hyp", root / "ranges.yaml", "--fitness", "recall")


def study_of(folder: Path, trials: int, value: float, steps: int) -> None:
    """Writes a search in ``folder`` that has had ``trials`` trials, whose fitness was ``value`` after each step."""
    folder.mkdir()
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize")
    _, ranges = ranges_of(folder.parent, RANGES)
    for number in range(trials):
        study.add_trial(
            optuna.trial.create_trial(
                params={"lr0": 0.01 + number / 1000, "mosaic": 1.0, "close_mosaic": number % 4},
                distributions=ranges,
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
    row = read_csv(folder / "trials.csv")[5]
    epochs = len(read_csv(folder / "trials" / "0005" / "results.csv"))
    if pruner == "none":
        assert (row["state"], epochs) == ("complete", 12)
    else:
        assert row["state"] == "pruned"
        assert 2 <= epochs < 12
    assert not list((folder / "trials" / "0005").rglob("*.pt"))  # it is not the best


@pytest.mark.slow
def test_eight_trials_in_two_processes_that_are_killed(root_and_flags, tmp_path):
    """Both processes are killed in a training, twice. Eight trials are complete in the end, each training continues
    where it was, and no trial runs twice."""
    root, flags = root_and_flags
    folder = root / "shared"
    command = [python(), "-m", "tools.search", *flags, "--trials", "8", "--epochs", "40", "--name", "shared"]

    def epochs() -> dict[Path, int]:
        """Returns how many epochs each training has had."""
        return {path.parent: len(read_csv(path)) for path in folder.glob("trials/*/results.csv")}

    def in_training(before: dict[Path, int]) -> set[Path]:
        """Returns the folders of the trainings that have gone on since ``before``, and have not ended."""
        return {run for run, count in epochs().items() if before.get(run, 0) + 2 < count < 38}

    interrupted: set[Path] = set()
    with Processes(tmp_path / "log") as processes:
        for _ in range(2):
            before = epochs()
            started = [processes.start(command), processes.start(command)]
            processes.until(lambda before=before: len(in_training(before)) == 2)
            interrupted |= in_training(before)
            for process in started:
                os.kill(process.pid, signal.SIGKILL)
            processes.wait_gone()
        last = [processes.start(command), processes.start(command)]
        assert [process.wait(300) for process in last] == [0, 0], processes.output()
    rows = read_csv(folder / "trials.csv")
    states = [row["state"] for row in rows]
    assert states.count("complete") == 8
    assert set(states) == {"complete", "fail"}
    assert states.count("fail") == len(rows) - 8 >= 2
    completed = [row for row in rows if row["state"] == "complete"]
    assert len({tuple(row[name] for name in ("lr0", "mosaic", "close_mosaic")) for row in completed}) == 8
    assert [*epochs().values()] == [40] * 8, "a trial that was killed continues in its folder"
    assert all("resuming" in (run / "train.log").read_text() for run in interrupted)
    best = hyperparameters_from(str(folder / "best.yaml"))
    assert best.ema_tau == 2.0
    assert str(best.lr0) == max(completed, key=lambda row: float(row["metrics/recall"]))["lr0"]
    assert len(list(folder.rglob("best.pt"))) == 1


@pytest.mark.slow
def test_a_signal_stops_a_search_that_can_continue(root_and_flags, tmp_path, capsys):
    root, flags = root_and_flags
    folder = root / "stopped"
    flags = [*flags, "--trials", "1", "--epochs", "60", "--name", "stopped"]
    with Processes(tmp_path / "log") as processes:
        process = processes.start([python(), "-m", "tools.search", *flags])
        processes.until(lambda: (folder / "trials" / "0000" / "last.pt").exists())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, processes.output()
        processes.wait_gone()
        assert "stopped; the same command continues" in processes.output()
        assert "Traceback" not in processes.output()
    line = error_of(capsys, main, *flags, "--epochs", "61")
    assert "was started with --epochs 60, not 61" in line


@pytest.mark.slow
def test_the_first_trial_is_the_default_run_bit_for_bit(root_and_flags, tmp_path):
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
            for path in (tmp_path / ranges / "trials/0000/best.pt", tmp_path / f"default-{ranges}" / "best.pt")
        )
        assert all(torch.equal(searched[name], default[name]) for name in default)


@pytest.mark.slow
def test_failed_trials_do_not_end_the_search(root_and_flags):
    root, flags = root_and_flags
    (root / "explosive.yaml").write_text("cls: {choice: [0.5, 1.0e+38]}\nema_tau: 2\n")
    flags = [*flags, "--hyp", str(root / "explosive.yaml"), "--epochs", "3", "--batch-size", "1"]
    main([*flags, "--trials", "3", "--name", "explosive"])
    rows = read_csv(root / "explosive" / "trials.csv")
    assert rows[0]["cls"] == "0.5"  # the recipe's own value comes first
    for row in rows:
        assert row["state"] == ("complete" if row["cls"] == "0.5" else "fail")
        assert ("not finite" in row["reason"]) == (row["state"] == "fail")
    assert [row["state"] for row in rows].count("complete") == 3
    assert {row["state"] for row in rows} == {"complete", "fail"}


@pytest.mark.slow
def test_trials_are_scored_by_cross_validation(root_and_flags):
    root, flags = root_and_flags
    main([*flags, "--trials", "2", "--epochs", "1", "--folds", "2", "--name", "folds"])
    for number, row in enumerate(read_csv(root / "folds" / "trials.csv")):
        pooled = read_csv(root / "folds" / "trials" / f"{number:04}" / "results.csv")[-1]
        assert pooled["fold"] == "pooled"
        assert float(row["recall"]) == float(pooled["recall"])
    journal = (root / "folds" / "journal.log").read_text().splitlines()
    assert sum("intermediate_value" in json.loads(line) for line in journal) == 4  # of each fold
