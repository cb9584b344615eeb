"""`python -m tools.search`: ranges, and studies as real processes that are interrupted, shared, pruned and failing."""

from __future__ import annotations

import csv
import errno
import fcntl
import os
import shutil
import signal
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.evaluation.metrics import Fitness
from engine.run.results_csv import ResultsTable
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scripts import ROOT, call, error_of
from tests.helpers.tiny import write_dataset, write_model, write_weights
from tools.runs import training
from tools.search.__main__ import main
from train import main as train
from utils.child import RunResult
from utils.config.recipes import hyperparameters_from
from utils.config.search_settings import SearchConfig
from utils.config.settings import Hyperparameters, TrainConfig
from utils.config.settings_file import read_settings_file
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint
from utils.files.locks import FileLock
from utils.process.identity import this_process
from utils.program_folders import CONFIGS

optuna = pytest.importorskip("optuna")
SMALL = ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--amp", "off"]
RANGES = "lr0: [0.001, 0.05, log]\nmosaic: {choice: [0, 1]}\nclose_mosaic: [0, 3]\nema_tau: 2\n"

pytestmark = pytest.mark.usefixtures("preloaded")


def space_of(tmp_path, text: str, **settings):
    from tools.search.ranges import read_space

    path = tmp_path / "ranges.yaml"
    path.write_text(text)
    return read_space(SearchConfig(hyp=str(path), **settings))


def test_ranges_are_read(tmp_path):
    space = space_of(tmp_path, RANGES, override=["mixup=0.25"])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(study.ask()) for _ in range(200)]
    assert {type(values["close_mosaic"]) for values in drawn} == {int}
    assert {values["close_mosaic"] for values in drawn} == {0, 1, 2, 3}
    assert {values["mosaic"] for values in drawn} == {0.0, 1.0}
    below = sum(values["lr0"] < (0.001 * 0.05) ** 0.5 for values in drawn)
    assert 70 < below < 130  # uniform in the logarithm
    assert space.baseline_values(epochs=100) == {"mosaic": 1.0}  # the recipe's close_mosaic is 10, beyond the range
    assert space.baseline_values(epochs=4) == {"mosaic": 1.0, "close_mosaic": 2}
    recipe = space.recipe({"lr0": 0.01, "mosaic": 1.0, "close_mosaic": 2})
    assert recipe == {"lr0": 0.01, "ema_tau": 2.0, "mosaic": 1.0, "close_mosaic": 2, "mixup": 0.25}


def test_null_among_the_choices_is_the_recipes_own_value(tmp_path):
    """The fixed part is what train.py would use. A hyper-parameter is not both searched and set."""
    space = space_of(tmp_path, "close_mosaic: {choice: [null, 10]}\nclose_scale: {choice: [0, 10]}\n")
    assert space.baseline_values(epochs=100) == {"close_mosaic": None, "close_scale": 10}
    assert space.baseline_values(epochs=6) == {"close_mosaic": None}
    assert space_of(tmp_path, RANGES, weights="yolov8n").base.lr_mult is None
    assert space_of(tmp_path, RANGES).base.lr_mult == 1.0
    with refused("--set lr0=1: .../ranges.yaml searches lr0; remove one"):
        space_of(tmp_path, RANGES, override=["lr0=1"])


@pytest.mark.parametrize("path", sorted((CONFIGS / "search").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_ready_ranges_are_valid(path):
    from tools.search.ranges import read_space

    assert len(read_space(SearchConfig(hyp=path.stem)).ranges) >= 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: [0, 1]", "ranges.yaml: unknown key 'lr' (did you mean 'lr0'?)"),
        ("epochs: [1, 5]", "ranges.yaml: 'epochs': is a flag, not a hyper-parameter; give it as --epochs"),
        (
            "lr0: [0.1]",
            "ranges.yaml: lr0: expected [FROM, TO], [FROM, TO, log], {choice: [...]} or a single value, got [0.1]",
        ),
        (
            "lr0: [0.1, 0.2, 0.3]",
            "ranges.yaml: lr0: expected [FROM, TO], [FROM, TO, log], {choice: [...]} or a single value, got "
            "[0.1, 0.2, 0.3]",
        ),
        ("lr0: [0.1, 0.01]", "ranges.yaml: lr0: `low <= high` must hold, but got (low=0.1, high=0.01)."),
        ("lr0: [0, 0.01, log]", "ranges.yaml: lr0: `low > 0` must hold for `log=True`, but got (low=0.0, high=0.01)."),
        ("mosaic: [0, 2]", "ranges.yaml: mosaic: must be at most 1, got 2.0"),
        ("close_mosaic: [0, 2.5]", "ranges.yaml: close_mosaic: must be a whole number or null, got 2.5"),
        (
            "mosaic: {choices: [0, 1]}",
            "ranges.yaml: mosaic: expected [FROM, TO], [FROM, TO, log], {choice: [...]} or a single value, "
            "got {'choices': [0, 1]}",
        ),
        (
            "mosaic: {choice: [0]}",
            "ranges.yaml: mosaic: expected [FROM, TO], [FROM, TO, log], {choice: [...]} or a single value, "
            "got {'choice': [0]}",
        ),
        ("mosaic: {choice: [0, x]}", "ranges.yaml: mosaic: must be a number, got 'x'"),
        (
            "lr0: [null, 1]",
            "ranges.yaml: lr0: expected [FROM, TO], [FROM, TO, log], {choice: [...]} or a single value, got [None, 1]",
        ),
        ("close_mosaic: [-1, 10]", "ranges.yaml: close_mosaic: must be at least 0, got -1"),
        ("lr0: [.nan, 1]", "ranges.yaml: lr0: must be at least 0, got nan"),
        (
            "mosaic: 1.0",
            "ranges.yaml: has no range to search, only single values; a range is [FROM, TO], [FROM, TO, log], "
            "{choice: [...]} or a single value",
        ),
        (
            "",
            "ranges.yaml: must be 'hyper-parameter: range' lines; a range is [FROM, TO], [FROM, TO, log], "
            "{choice: [...]} or a single value",
        ),
        (
            "- lr0",
            "ranges.yaml: must be 'hyper-parameter: range' lines; a range is [FROM, TO], [FROM, TO, log], "
            "{choice: [...]} or a single value",
        ),
        (
            "albumentations: {choice: [[], [{name: Blur}]]}",
            "ranges.yaml: albumentations: expected [FROM, TO], [FROM, TO, log], {choice: [...]} or a single "
            "value, got {'choice': [[], [{'name': 'Blur'}]]}",
        ),
    ],
)
def test_wrong_ranges_are_one_line(tmp_path, text, message):
    with refused(message):
        space_of(tmp_path, text)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    data = write_dataset(root / "set", train=8, val=4)
    model = write_model(root / "tiny.yaml")
    (root / "ranges.yaml").write_text(RANGES)
    flags = ["--hyp", root / "ranges.yaml", "--data", data, "--model", model, *SMALL, "--fitness", "recall"]
    return root, [str(flag) for flag in (*flags, "--project", root, "--cache-dir", root)]


def table(folder):
    with open(folder / "trials.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def created(folder) -> int:
    """The trials that the journal has created."""
    return sum('"op_code":4' in line for line in (folder / "journal.log").read_text().splitlines())


@pytest.mark.slow
def test_an_interrupted_search_finds_the_same(world, tmp_path, capsys):
    """Ctrl-C in the first trial, kill -9 in the second: the trials have the hyper-parameters and the fitness of an
    uninterrupted search."""
    root, flags = world
    flags = [*flags, "--trials", "2", "--epochs", "6"]
    main([*flags, "--name", "whole"])
    printed = capsys.readouterr().out
    whole = root / "whole"
    broken = root / "broken"
    assert "2 trials: 2 complete" in printed
    assert f"--fitness=recall --hyp {whole / 'best.yaml'}" in printed
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
    assert table(broken) == table(whole)
    assert [row["state"] for row in table(broken)] == ["complete"] * 2
    assert created(broken) == 2
    best = hyperparameters_from(str(whole / "best.yaml"))
    assert best.ema_tau == 2.0
    assert best.lr0 == pytest.approx(float(max(table(whole), key=lambda row: float(row["recall"]))["lr0"]))
    assert best.box == Hyperparameters().box
    assert "(baseline)" in printed
    assert (whole / "trials.png").stat().st_size > 5000
    kept = [path.parent.parent.name for path in whole.rglob("best.pt")]
    assert len(kept) == 1
    for more, line in (
        (["--epochs", "7"], "was started with --epochs 6, not 7"),
        (["--model", "yolov8n"], "was started with --model "),
        (["--seed", "3"], "was started with --seed 0, not 3"),
        (["--set", "box=3"], "was started with hyper-parameter box 7.5, not 3.0"),
    ):
        assert line in error_of(capsys, main, *flags, "--name", "broken", *more)
    (root / "wider.yaml").write_text(RANGES.replace("0.05", "0.5"))
    line = error_of(capsys, main, *flags, "--name", "broken", "--hyp", str(root / "wider.yaml"))
    assert "was started with the range of lr0 [0.001, 0.05, 'log'], not [0.001, 0.5, 'log']" in line
    main([*flags, "--name", "broken", "--trials", "2"])  # nothing is left to do
    assert created(broken) == 2


@pytest.mark.slow
def test_the_first_trial_is_the_default_run_bit_for_bit(world, tmp_path, monkeypatch):
    """From weights, in a run so short that train.py raises the rate of new layers."""
    root, flags = world
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


@pytest.mark.slow
def test_two_processes_share_the_trials(world, tmp_path):
    root, flags = world
    flags = [*flags, "--trials", "4", "--epochs", "1", "--name", "shared"]
    folder = root / "shared"
    with Processes(tmp_path / "log") as processes:
        for _ in range(2):
            processes.start([python(), "-m", "tools.search", *flags])
        assert processes.codes() == [0, 0], processes.output()
    rows = table(folder)
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert len({row["lr0"] for row in rows}) == 4
    output = processes.output()
    for number in range(4):
        assert output.count(f"trial {number}: lr0=") == 1, output
    assert created(folder) == 4


def study_of(folder, trials: int, value: float, steps: int) -> None:
    """A search in ``folder`` that has had ``trials`` trials, whose fitness was ``value`` after each step."""
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
def test_a_hopeless_trial_ends_early(world, pruner):
    root, flags = world
    folder = root / f"pruned by {pruner}"
    study_of(folder, 5, 2.0, 12)  # no fitness can reach it
    more = ["--trials", "6", "--epochs", "12", "--prune-after", "2", "--pruner", pruner, "--name", folder.name]
    main([*flags, *more])
    row = table(folder)[5]
    with open(folder / "trials" / "0005" / "run" / "results.csv", newline="") as file:
        epochs = len(list(csv.DictReader(file)))
    if pruner == "none":
        assert (row["state"], row["epochs"], epochs) == ("complete", "12", 12)
    else:
        assert (row["state"], row["epochs"]) == ("pruned", "2")
        assert 2 <= epochs < 12
    assert not list((folder / "trials" / "0005").rglob("*.pt"))  # it is not the best


@pytest.mark.slow
def test_failed_trials_do_not_end_the_search(world, capsys):
    root, flags = world
    (root / "explosive.yaml").write_text("cls: {choice: [0.5, 1.0e+38]}\nema_tau: 2\n")
    flags = [*flags, "--hyp", str(root / "explosive.yaml"), "--epochs", "3", "--batch-size", "1"]
    main([*flags, "--trials", "4", "--name", "explosive"])
    rows = table(root / "explosive")
    assert rows[0]["cls"] == "0.5"  # the recipe's own value comes first
    for row in rows:
        assert row["state"] == ("complete" if row["cls"] == "0.5" else "failed")
        assert ("not finite" in row["reason"]) == (row["state"] == "failed")
    assert {row["state"] for row in rows} == {"complete", "failed"}


@pytest.mark.slow
def test_a_full_disk_does_not_use_up_the_trials(world, tmp_path, monkeypatch, capsys):
    _, flags = world
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_full.py").write_text("""
import os
def on_epoch(run):
    if "0001" in str(run.folder) and not os.path.exists("has space"):
        open("/dev/full", "wb", 0).write(b"x")
""")
    flags = [*flags, "--project", ".", "--name", "full", "--trials", "3", "--epochs", "2"]
    flags += ["--callbacks", "user_full:on_epoch"]
    assert "No space left on device" in error_of(capsys, main, *flags)
    assert created(tmp_path / "full") == 2
    assert (tmp_path / "full" / "trials" / "0001" / "run" / "last.pt").exists()
    (tmp_path / "has space").touch()
    main(flags)
    assert [row["state"] for row in table(tmp_path / "full")] == ["complete"] * 3


@pytest.mark.slow
def test_a_search_in_which_every_trial_fails_stops(world, capsys):
    root, flags = world
    (root / "hopeless.yaml").write_text("cls: [1.0e+37, 1.0e+38]\n")
    flags = [*flags, "--hyp", str(root / "hopeless.yaml"), "--epochs", "3", "--batch-size", "1"]
    line = error_of(capsys, main, *flags, "--trials", "9", "--name", "hopeless")
    assert "stopped after 3 failed trials in a row" in line
    assert "not finite" in line


def test_wrong_settings_end_the_search_at_once(world, capsys):
    root, flags = world
    line = error_of(capsys, main, *flags, "--name", "wrong", "--model", "yolov9z")
    assert "yolov9z" in line
    assert not (root / "wrong").exists()  # the corrected command may use it
    assert "no class of this name" in error_of(capsys, main, *flags, "--fitness", "AP:x", "--name", "typo")
    assert "no such file" in error_of(capsys, main, *flags, "--data", "nowhere.yaml", "--name", "typo")
    assert "known: all, augment, loss, optimizer" in error_of(capsys, main, *flags, "--hyp", "nothing")
    assert "the same command continues" in error_of(capsys, main, *flags, "--resume")
    assert not (root / "typo").exists()


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Returns a function that sets how the training of each trial ends: its exit code and the result that it writes.

    A program takes the place of train.py; it is started, and its result read, as train.py's.
    """
    program = tmp_path / "ends.py"
    monkeypatch.setattr(training, "command_prefix", lambda command: [python(), str(program)])
    monkeypatch.setattr(training, "RETRY_S", 0)

    def set_end(code: int, **result: object) -> None:
        program.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            "from utils.process.result_file import take_result_file, write_result\n"
            f"take_result_file()\nwrite_result(**{result!r})\nsys.exit({code})\n"
        )

    return set_end


def test_a_refusal_keeps_the_trials_that_were_interrupted(world, child, capsys):
    """`--device` may change when a search continues, to a GPU that this machine does not have."""
    root, flags = world
    flags = [*flags, "--epochs", "3", "--name", "kept"]
    folder = root / "kept"
    child(75, folder="run")
    with pytest.raises(SystemExit, match="75"):
        call(main, *flags)
    run = folder / "trials" / "0000" / "run"
    for name in ("settings.yaml", "last.pt", "best.pt"):
        (run / name).touch()
    for result in (
        {"error": "--device 3: no such GPU"},  # before the run has continued
        {"error": "last.pt: could not be written", "folder": "run"},  # the disk is full
    ):
        child(2, **result, cause="machine")
        assert error_of(capsys, main, *flags) == f"error: {result['error']}"
        assert {path.name for path in run.glob("*.pt")} == {"last.pt", "best.pt"}
        assert states_of(folder) == ["RUNNING"]
    child(2, error="process 1 was killed", cause="lost process")
    assert error_of(capsys, main, *flags) == (
        f"error: {run}: process 1 was killed (finished epochs are kept; the same command continues)"
    )
    assert {path.name for path in run.glob("*.pt")} == {"last.pt", "best.pt"}
    assert states_of(folder) == ["RUNNING"]


@pytest.fixture
def trainings(monkeypatch):
    """Returns a list of how the processes of train.py that a search starts end, one after the other: the fitness of the
    epochs, and the result."""
    endings: list[tuple[dict[int, float], RunResult]] = []

    @contextmanager
    def start(words, **_):
        config = read_settings_file(TrainConfig, Path(words[-1].removeprefix("@")))
        folder = Path(config.project, config.name)
        fitness_by_epoch, result = endings.pop(0)
        if result.has_begun or fitness_by_epoch:
            folder.mkdir(exist_ok=True)
            (folder / "settings.yaml").touch()
            (folder / "last.pt").touch()
        if fitness_by_epoch:
            results = ResultsTable()
            for epoch, fitness in fitness_by_epoch.items():
                results.add(epoch, {RECALL.column: fitness})
            results.write(folder / "results.csv")
        process = SimpleNamespace(poll=lambda: result.code)
        yield SimpleNamespace(process=process, poll=lambda: result, has_begun=result.has_begun)

    monkeypatch.setattr(training, "start", start)
    monkeypatch.setattr(training, "RETRY_S", 0)
    return endings


RECALL = Fitness.parse("recall", ())
SCORED = RunResult.of(0, {})
STOPPED = RunResult.of(75, {})
NOT_FINITE = RunResult.of(2, {"error": "not finite", "begun": True})
LOST = RunResult.of(-signal.SIGKILL, {"begun": True})
NO_MEMORY = RunResult.of(2, {"error": "no memory on cuda:0", "cause": "memory", "begun": True})
LOST_BEFORE = RunResult.of(-signal.SIGKILL, {})
REFUSED_BEFORE = RunResult.of(2, {"error": "the data has no objects left"})
CRASHED_BEFORE = RunResult.of(-signal.SIGSEGV, {})
BUG_BEFORE = RunResult.of(70, {"error": "RuntimeError: CUDA error: uncorrectable ECC error"})
BEGUN = RunResult.of(75, {"begun": True})  # a training with the base recipe, which is stopped
LOST_TWICE = [LOST, LOST]  # a lost training is tried once more


@pytest.mark.parametrize(
    ("starts", "states", "lines", "kept"),
    [
        # On a machine that has broken, not all that is left of the search is used up.
        pytest.param(
            [[SCORED, NOT_FINITE, NOT_FINITE, NOT_FINITE]],
            "CFFF",
            ["stopped after 3 failed trials in a row"],
            4,
            id="three in a row",
        ),
        pytest.param([[SCORED, *[CRASHED_BEFORE] * 2]], "CR", ["killed by SIGSEGV"], 1, id="crash"),
        pytest.param(
            [[SCORED, *[REFUSED_BEFORE] * 2], [REFUSED_BEFORE] * 2],
            "CR",
            ["has no objects left"] * 2,
            1,
            id="refused twice",
        ),
        pytest.param(
            [[SCORED, *[BUG_BEFORE] * 2], [BUG_BEFORE] * 2], "CR", ["uncorrectable ECC error"] * 2, 1, id="bug twice"
        ),
        pytest.param(
            [[NOT_FINITE] * 3, [NOT_FINITE]],
            "FFFF",
            ["stopped after 3 failed trials in a row"] * 2,
            4,
            id="each start continues with one trial",
        ),
        # Others go on: once the search is complete, only the best trial keeps its weights.
        pytest.param(
            [[SCORED, NOT_FINITE, NOT_FINITE, SCORED, SCORED]], "CFFCC", [""], 1, id="two in a row are no reason"
        ),
        pytest.param(
            [[SCORED, SCORED, NOT_FINITE, NOT_FINITE, NOT_FINITE]], "CCFFF", [""], 1, id="the last three of all"
        ),
        pytest.param([[SCORED, *[NO_MEMORY] * 2, SCORED, SCORED, SCORED]], "CFCCC", [""], 1, id="out of memory"),
        pytest.param(
            [[NOT_FINITE] * 3, [NOT_FINITE], [NOT_FINITE], []],
            "FFFFF",
            ["stopped after 3 failed trials in a row"] * 2 + ["no trial is complete"] * 2,
            0,
            id="all fail",
        ),
        # What the kernel kills each time does not block the search for ever.
        pytest.param(
            [LOST_TWICE, [*LOST_TWICE, SCORED, NOT_FINITE, SCORED, SCORED]],
            "FCFCC",
            ["killed by SIGKILL", ""],
            1,
            id="killed in two starts",
        ),
        pytest.param(
            [LOST_TWICE, [SCORED, SCORED, *LOST_TWICE]], "CCR", ["killed by SIGKILL"] * 2, 2, id="killed in one start"
        ),
        pytest.param([[LOST, *[SCORED] * 5]], "CCCCC", [""], 1, id="killed once"),
        pytest.param(
            [[SCORED, *[LOST_BEFORE] * 3], [LOST_BEFORE] * 3, [LOST_BEFORE] * 3],
            "CR",
            ["killed by SIGKILL"] * 3,
            1,
            id="killed before it begins",
        ),
        pytest.param(
            [LOST_TWICE, [REFUSED_BEFORE]], "R", ["killed by SIGKILL", "has no objects left"], 1, id="began before"
        ),
    ],
)
def test_a_broken_machine_does_not_use_up_the_trials(world, tmp_path, trainings, capsys, starts, states, lines, kept):
    _, flags = world
    flags = [*flags, "--project", str(tmp_path), "--name", "broken", "--trials", "5"]
    for start, line in zip(starts, lines, strict=True):
        trainings += [({1: 0.5} if result == SCORED else {}, result) for result in start]
        if line:
            assert line in error_of(capsys, main, *flags)
        else:
            main(flags)
        assert not trainings
    folder = tmp_path / "broken"
    assert "".join(state[0] for state in states_of(folder)) == states
    assert len(list(folder.rglob("last.pt"))) == kept


@pytest.mark.parametrize(
    "results", [[REFUSED_BEFORE], [BUG_BEFORE], [LOST_BEFORE] * 2], ids=["refused", "bug", "killed"]
)
def test_a_trial_that_alone_cannot_begin_fails_alone(world, tmp_path, trainings, results):
    """Its own hyper-parameters are the reason if the recipe's can be trained."""
    _, flags = world
    trainings += [({1: 0.5}, SCORED), *[({}, result) for result in results], ({}, BEGUN), ({1: 0.5}, SCORED)]
    main([*flags, "--project", str(tmp_path), "--name", "alone", "--trials", "3"])
    rows = table(tmp_path / "alone")
    assert [row["state"] for row in rows] == ["complete", "failed", "complete"]
    assert results[0].reason in rows[1]["reason"]
    assert hyperparameters_from(str(tmp_path / "alone" / "base.yaml")) == replace(Hyperparameters(), ema_tau=2.0)


@pytest.mark.slow
def test_a_training_with_the_base_recipe_tells_whose_fault_it_is(tmp_path, monkeypatch, capsys):
    """All in real processes: no tile shows a whole object, so no training with the values of the trial can begin. While
    a callback cannot be imported, none with those of the recipe can, either."""
    monkeypatch.chdir(tmp_path)
    data = write_dataset(tmp_path / "set", train=2, val=1)
    for labels in (tmp_path / "set").rglob("labels/**/*.txt"):
        labels.write_text("0 0.5 0.5 0.9 0.9\n")
    data.write_text(f"{data.read_text()}\ntile: 32\n")
    model = write_model(tmp_path / "tiny.yaml")
    (tmp_path / "ranges.yaml").write_text("tile_visibility: [0.98, 1.0]\n")
    hooks = tmp_path / "user_hooks.py"
    flags = ["--hyp", "ranges.yaml", "--data", str(data), "--model", str(model), *SMALL, "--epochs", "1"]
    flags += ["--trials", "1", "--project", ".", "--name", "alone", "--callbacks", "user_hooks:on_epoch"]
    folder = tmp_path / "alone"
    hooks.write_text("raise RuntimeError('broken')\n")
    assert "broken" in error_of(capsys, main, *flags)
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == []  # a new start is possible
    hooks.write_text("def on_epoch(run): pass\n")
    assert "no trial is complete" in error_of(capsys, main, *flags)
    (row,) = table(folder)
    assert (row["state"], row["epochs"]) == ("failed", "0")
    assert "no tile shows 98% of an object" in row["reason"]
    assert hyperparameters_from(str(folder / "base.yaml")) == Hyperparameters()
    assert [path.name for path in (folder / "trials" / "0000").iterdir() if path.is_dir()] == ["run"]


@pytest.mark.parametrize(
    ("ranges", "result"),
    [
        ("mosaic: [0, 1]\n", REFUSED_BEFORE),  # the values of the first trial are those of the recipe
        (RANGES, RunResult.of(2, {"error": "the disk is full", "cause": "machine"})),
    ],
)
def test_a_trial_that_cannot_begin_is_not_compared_in_vain(world, tmp_path, trainings, capsys, ranges, result):
    """No other training is started."""
    _, flags = world
    (tmp_path / "ranges.yaml").write_text(ranges)
    trainings.append(({}, result))
    flags = [*flags, "--hyp", str(tmp_path / "ranges.yaml"), "--project", str(tmp_path)]
    assert error_of(capsys, main, *flags) == f"error: {result.reason}"


def test_a_training_that_comes_further_each_time_does_not_fail_however_often_it_is_lost(
    world, tmp_path, trainings, capsys
):
    _, flags = world
    flags = [*flags, "--project", str(tmp_path), "--name", "lost", "--trials", "1"]
    for fitness, state in (({1: 0.5}, "RUNNING"), ({2: 0.6}, "RUNNING"), ({3: 0.7}, "RUNNING"), ({}, "FAIL")):
        trainings += [(fitness, LOST), ({}, LOST)]
        with suppress(SystemExit):
            call(main, *flags)
        assert states_of(tmp_path / "lost") == [state]


def test_rows_that_a_power_cut_has_destroyed_still_count(world, tmp_path, trainings):
    """The trial's best epoch is in the journal, and its weights are in best.pt."""
    _, flags = world
    flags = [*flags, "--project", str(tmp_path), "--name", "cut", "--trials", "1", "--epochs", "3"]
    trainings += [({1: 0.9, 2: 0.4}, STOPPED), ({2: 0.6, 3: 0.5}, SCORED)]
    with pytest.raises(SystemExit, match="75"):
        call(main, *flags)
    main(flags)
    (row,) = table(tmp_path / "cut")
    assert (row["recall"], row["epochs"]) == ("0.900000", "3")


def test_weights_that_a_killed_process_did_not_remove_are_removed_by_the_next_start(world, tmp_path, trainings):
    _, flags = world
    flags = [*flags, "--project", str(tmp_path), "--name", "killed", "--trials", "2"]
    trainings += [({1: 0.5}, SCORED), ({1: 0.4}, SCORED)]
    main(flags)
    left_behind = tmp_path / "killed" / "trials" / "0001" / "run" / "best.pt"
    left_behind.touch()
    main(flags)
    assert not left_behind.exists()
    assert (left_behind.parents[2] / "0000" / "run" / "last.pt").is_file()


def test_a_trial_whose_results_are_lost_is_not_taken_for_one_without_a_score(world, child, capsys):
    """After a power cut its training is complete, but results.csv is empty. The weights of a failed trial go."""
    root, flags = world
    flags = [*flags, "--name", "cut"]
    run = root / "cut" / "trials" / "0000" / "run"
    child(75, folder="run")
    with pytest.raises(SystemExit, match="75"):
        call(main, *flags)
    for name in ("results.csv", "best.pt"):
        (run / name).touch()
    child(0, folder="run")
    assert "has lost the results of a complete training" in error_of(capsys, main, *flags)
    assert (run / "best.pt").is_file()
    assert states_of(root / "cut") == ["RUNNING"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_refused_search_is_removed_unless_another_process_takes_part(world, tmp_path, child, capsys, is_shared):
    _, flags = world
    folder = tmp_path / "search"
    trials = folder / "trials"
    child(2, error="--device 3: no such GPU", cause="machine")
    with FileLock(trials / "0001" / ".trial.lock") as other:
        if is_shared:
            (trials / "0001").mkdir(parents=True)
            other.acquire()
        assert "no such GPU" in error_of(capsys, main, *flags, "--project", str(tmp_path), "--name", "search")
    assert (folder / "search.yaml").exists() == is_shared
    assert (trials / "0000").exists() == is_shared


def test_a_refused_search_waits_for_a_process_that_is_claiming_a_trial(world, tmp_path, monkeypatch, capsys):
    """That process would find its trial locked, or its journal gone."""
    _, flags = world
    folder = tmp_path / "search"
    study_lock = FileLock(folder / ".study.lock")
    trial_lock = FileLock(folder / "trials" / "0001" / ".trial.lock")

    def claim() -> None:
        trial_lock.path.parent.mkdir()
        trial_lock.acquire()
        study_lock.release()

    def be_refused(*_: object) -> RunResult:
        study_lock.acquire()
        threading.Timer(0.2, claim).start()
        return RunResult.of(2, {"error": "--device 3: no such GPU", "cause": "machine"})

    monkeypatch.setattr("tools.search.loop.train", be_refused)
    with study_lock, trial_lock:
        assert "no such GPU" in error_of(capsys, main, *flags, "--project", str(tmp_path), "--name", "search")
    assert (folder / "journal.log").exists()


def test_a_journal_without_settings_is_not_removed(world, tmp_path, capsys):
    """Its line says to restore it."""
    _, flags = world
    journal = tmp_path / "search" / "journal.log"
    journal.parent.mkdir()
    journal.write_text("[]\n")
    line = error_of(capsys, main, *flags, "--project", str(tmp_path), "--name", "search")
    assert f"{journal}: damaged (" in line
    assert journal.read_text() == "[]\n"


def test_folds_need_no_validation_split(world, tmp_path, child, capsys):
    """The training images are divided, as for `tools.kfold`."""
    _, flags = world
    data = write_dataset(tmp_path / "set", train=8, val=2)
    data.write_text("".join(line for line in data.read_text().splitlines(True) if not line.startswith("val")))
    flags = [*flags, "--data", str(data), "--project", str(tmp_path)]
    child(2, error="--device 3: no such GPU", cause="machine")
    assert "no such GPU" in error_of(capsys, main, *flags, "--folds", "2")
    assert "'val'" in error_of(capsys, main, *flags)


def states_of(folder: Path) -> list[str]:
    """The states of all trials in the journal."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))
    return [trial.state.name for trial in study.get_trials()]


def test_without_locks_a_single_process_searches(tmp_path, monkeypatch):
    """On such a file system a second one would cut the line of the journal that the first is writing."""
    from tools.search.study import single_process_without_locks

    mark = tmp_path / ".only-process"
    with single_process_without_locks(tmp_path), single_process_without_locks(tmp_path):
        assert not mark.exists()  # the locks of the trials and of the journal are enough

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    second = single_process_without_locks(tmp_path)
    with single_process_without_locks(tmp_path), refused(f"only one process can search here; ...remove {mark}"), second:
        pass
    assert not mark.exists()
    mark.write_text(f"{2**22 + 1} {this_process().split()[1]}")  # was killed: no process of Linux has this id
    with single_process_without_locks(tmp_path):
        assert mark.read_text() == this_process()
    mark.write_text("1 on-another-node")
    with refused("..."), single_process_without_locks(tmp_path):
        pass
    assert mark.exists()


def opened(folder):
    from tools.search.study import SharedStudy

    folder.mkdir(exist_ok=True)
    space = space_of(folder, RANGES)
    return SharedStudy(SearchConfig(hyp=str(folder / "ranges.yaml"), trials=9), space, folder, steps=3)


def test_half_a_line_does_not_end_a_search_but_lost_trials_do(tmp_path):
    """A process is killed, or the disk is full, while it appends to the journal.

    Without the old trials, a new one would continue the training of a lost one.
    """
    from tools.search.study import TrialOutcome

    study = opened(tmp_path)
    study.finish(study.claim(), TrialOutcome.scored(0.5))
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    for rest in (b'{"op_code":4,"worker_id":"b0', b"\0\0\0"):
        journal.write_bytes(whole + rest)
        study = opened(tmp_path)
        claim = study.claim()
        assert claim.number == 1
        study.report(claim, 1, 0.25)
        claim.lock.release()
        assert [trial.last_step for trial in opened(tmp_path).trials()] == [None, 1]
        shutil.rmtree(tmp_path / "trials" / "0001")
    for rest, message in (
        (b"", "journal.log: has lost the trial in .../trials/0000; restore it, or choose another --name"),
        (
            b"[]\n",
            "journal.log: damaged (list indices must be integers or slices, not str); restore it, or choose "
            "another --name",
        ),
        (
            whole[:20] + b"\n" + whole,
            "journal.log: damaged (Invalid control character at: line 1 column 21 (char 20)); restore it, or "
            "choose another --name",
        ),
    ):
        journal.write_bytes(rest)
        with refused(message):
            opened(tmp_path)


def test_a_trial_whose_process_was_killed_while_drawing_it_gets_the_same_values(tmp_path):
    from tools.search.study import TrialOutcome

    study = opened(tmp_path)
    study.finish(study.claim(), TrialOutcome.scored(0.5))
    claim = study.claim()
    claim.lock.release()
    journal = tmp_path / "journal.log"
    lines = journal.read_text().splitlines(True)
    for num_undrawn in range(1, len(claim.values) + 1):
        journal.write_text("".join(lines[:-num_undrawn]))
        again = opened(tmp_path).claim()
        again.lock.release()
        assert (again.number, again.values) == (1, claim.values)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ('"values":[0.5]', '"values":["0.5"]'),
        ('"values":[0.5]', '"values":[null]'),
        ('"values":[0.5]', '"values":[0.5,0.5]'),
        ('"step":1,', '"step":"1",'),
        ('"intermediate_value":0.25', '"intermediate_value":{}'),
        ('"op_code":7', '"op_code":{}'),
        ('"distributions":{}', '"distributions":1.5'),
        ('{"op_code":7', "[" * 100_000),
    ],
)
def test_a_line_of_the_journal_that_is_no_report_is_refused(tmp_path, line, changed):
    """Optuna takes any JSON as steps and fitness."""
    from tools.search.study import TrialOutcome

    study = opened(tmp_path)
    claim = study.claim()
    study.report(claim, 1, 0.25)
    study.finish(claim, TrialOutcome.scored(0.5))
    journal = tmp_path / "journal.log"
    text = journal.read_text()
    assert line in text
    journal.write_text(text.replace(line, changed))
    with pytest.raises(UserError, match=r"journal\.log: damaged \(.*\); restore it, or choose another --name"):
        opened(tmp_path)


def test_a_lock_of_a_killed_process_is_not_waited_for(tmp_path, monkeypatch):
    """Optuna's own lock stays when its holder is killed, and it never expires if the folder's path is relative."""
    monkeypatch.chdir(tmp_path)
    folder = Path("search")
    folder.mkdir()
    (folder / "journal.log.lock").symlink_to(folder / "journal.log")
    assert opened(folder).claim().number == 0


@pytest.mark.slow
def test_trials_are_scored_by_cross_validation(world, capsys):
    root, flags = world
    flags = [*flags, "--trials", "2", "--epochs", "1", "--folds", "2", "--name", "folds"]
    main(flags)
    for number, row in enumerate(table(root / "folds")):
        with open(root / "folds" / "trials" / f"{number:04}" / "results.csv", newline="") as file:
            pooled = list(csv.DictReader(file))[-1]
        assert (pooled["fold"], int(pooled["images"])) == ("pooled", 12)
        assert float(row["recall"]) == pytest.approx(float(pooled["recall"]), abs=1e-6)
        assert row["folds"] == "2"
