"""Which trials of a search fail, which continue, and what ends it. Stand-ins take the place of train.py."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.evaluation.fitness import Fitness
from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from tests.helpers.scripts import call, error_of
from tests.helpers.searches import read_trials
from tests.helpers.tiny import write_dataset
from tools.experiment import training
from tools.search.__main__ import main
from utils.config.parser import parse_config
from utils.config.settings import TrainConfig
from utils.files.locks import FileLock
from utils.files.results_csv import ResultsTable
from utils.process.child import RunResult

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("preloaded")
RECALL = Fitness.parse("recall", ())
SCORED = RunResult.of(0, {})
STOPPED = RunResult.of(75, {})
NOT_FINITE = RunResult.of(2, {"error": "not finite", "begun": True})
KILLED = RunResult.of(-signal.SIGKILL, {"begun": True})
NO_MEMORY = RunResult.of(2, {"error": "no memory on cuda:0", "begun": True})
REFUSED_BEFORE = RunResult.of(2, {"error": "the data has no objects left"})
CRASHED_BEFORE = RunResult.of(-signal.SIGSEGV, {})
BUG_BEFORE = RunResult.of(1, {"error": "RuntimeError: CUDA error: uncorrectable ECC error"})


def states_of(folder: Path) -> list[str]:
    """Returns the states of all trials in the journal."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))
    return [trial.state.name for trial in study.get_trials()]


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Returns a function that sets how the training of each trial ends: its exit code and the result that it writes.

    A program takes the place of train.py; it is started, and its result read, as train.py's.
    """
    program = tmp_path / "ends.py"
    monkeypatch.setattr(training, "command_prefix", lambda command: [python(), str(program)])

    def set_end(code: int, **result: object) -> None:
        program.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            "from utils.process.child import claim_result_file, write_result\n"
            f"claim_result_file()\nwrite_result(**{result!r})\nsys.exit({code})\n"
        )

    return set_end


def test_a_refusal_keeps_the_trials_that_were_interrupted(root_and_flags, child, capsys):
    """`--device` may change when a search continues, to a GPU that this machine does not have."""
    root, flags = root_and_flags
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
        child(2, **result)
        assert error_of(capsys, main, *flags) == f"error: {result['error']}"
        assert {path.name for path in run.glob("*.pt")} == {"last.pt", "best.pt"}
        assert states_of(folder) == ["RUNNING"]
    child(2, error="process 1 was killed")
    assert error_of(capsys, main, *flags) == "error: process 1 was killed"
    assert {path.name for path in run.glob("*.pt")} == {"last.pt", "best.pt"}
    assert states_of(folder) == ["RUNNING"]


def test_a_trial_whose_results_are_lost_is_not_taken_for_one_without_a_score(root_and_flags, child, capsys):
    """After a power cut its training is complete, but results.csv is empty. The weights of a failed trial go."""
    root, flags = root_and_flags
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
def test_a_refused_search_is_removed_unless_another_process_takes_part(
    root_and_flags, tmp_path, child, capsys, is_shared
):
    _, flags = root_and_flags
    folder = tmp_path / "search"
    trials = folder / "trials"
    child(2, error="--device 3: no such GPU")
    with FileLock(trials / "0001" / ".trial.lock") as other:
        if is_shared:
            (trials / "0001").mkdir(parents=True)
            other.acquire()
        assert "no such GPU" in error_of(capsys, main, *flags, "--project", str(tmp_path), "--name", "search")
    assert (folder / "search.yaml").exists() == is_shared
    assert (trials / "0000").exists() == is_shared


def test_folds_need_no_validation_split(root_and_flags, tmp_path, child, capsys):
    """The training images are divided, as for `tools.kfold`."""
    _, flags = root_and_flags
    data = write_dataset(tmp_path / "set", train=8, val=2)
    data.write_text("".join(line for line in data.read_text().splitlines(True) if not line.startswith("val")))
    flags = [*flags, "--data", str(data), "--project", str(tmp_path)]
    child(2, error="--device 3: no such GPU")
    assert "no such GPU" in error_of(capsys, main, *flags, "--folds", "2")
    assert not [path for path in (tmp_path / "exp").iterdir() if not path.name.startswith(".")]
    assert "'val'" in error_of(capsys, main, *flags)


@pytest.fixture
def trainings(monkeypatch):
    """Returns a list of how the processes of train.py that a search starts end, one after the other: the fitness of the
    epochs, and the result."""
    endings: list[tuple[dict[int, float], RunResult]] = []

    @contextmanager
    def start(words, **_):
        config = parse_config(TrainConfig, words[-1:])
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

    monkeypatch.setattr(training, "start_child", start)
    return endings


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
        pytest.param([[SCORED, CRASHED_BEFORE]], "CR", ["killed by SIGSEGV"], 1, id="crash"),
        pytest.param(
            [[SCORED, REFUSED_BEFORE], [REFUSED_BEFORE]], "CR", ["has no objects left"] * 2, 1, id="refused twice"
        ),
        pytest.param([[SCORED, BUG_BEFORE], [BUG_BEFORE]], "CR", ["uncorrectable ECC error"] * 2, 1, id="bug twice"),
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
        pytest.param([[SCORED, NO_MEMORY, SCORED, SCORED, SCORED]], "CFCCC", [""], 1, id="out of memory"),
        pytest.param(
            [[NOT_FINITE] * 3, [NOT_FINITE], [NOT_FINITE], []],
            "FFFFF",
            ["stopped after 3 failed trials in a row"] * 2 + ["no trial is complete"] * 2,
            0,
            id="all fail",
        ),
        pytest.param([[SCORED, KILLED, SCORED, SCORED, SCORED]], "CFCCC", [""], 1, id="killed"),
    ],
)
def test_a_broken_machine_does_not_use_up_the_trials(
    root_and_flags, tmp_path, trainings, capsys, starts, states, lines, kept
):
    _, flags = root_and_flags
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


def test_rows_that_a_power_cut_has_destroyed_still_count(root_and_flags, tmp_path, trainings):
    """The trial's best epoch is in the journal, and its weights are in best.pt."""
    _, flags = root_and_flags
    flags = [*flags, "--project", str(tmp_path), "--name", "cut", "--trials", "1", "--epochs", "3"]
    trainings += [({1: 0.9, 2: 0.4}, STOPPED), ({2: 0.6, 3: 0.5}, SCORED)]
    with pytest.raises(SystemExit, match="75"):
        call(main, *flags)
    main(flags)
    (row,) = read_trials(tmp_path / "cut")
    assert (row["recall"], row["epochs"]) == ("0.900000", "3")


def test_weights_that_a_killed_process_did_not_remove_are_removed_by_the_next_start(
    root_and_flags, tmp_path, trainings
):
    _, flags = root_and_flags
    flags = [*flags, "--project", str(tmp_path), "--name", "killed", "--trials", "2"]
    trainings += [({1: 0.5}, SCORED), ({1: 0.4}, SCORED)]
    main(flags)
    left_behind = tmp_path / "killed" / "trials" / "0001" / "run" / "best.pt"
    left_behind.touch()
    main(flags)
    assert not left_behind.exists()
    assert (left_behind.parents[2] / "0000" / "run" / "last.pt").is_file()


def test_a_refused_search_waits_for_a_process_that_is_claiming_a_trial(root_and_flags, tmp_path, monkeypatch, capsys):
    """That process would find its trial locked, or its journal gone."""
    _, flags = root_and_flags
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
        return RunResult.of(2, {"error": "--device 3: no such GPU"})

    monkeypatch.setattr("tools.search.loop.train", be_refused)
    with study_lock, trial_lock:
        assert "no such GPU" in error_of(capsys, main, *flags, "--project", str(tmp_path), "--name", "search")
    assert (folder / "journal.log").exists()


def test_a_journal_without_settings_is_not_removed(root_and_flags, tmp_path, capsys):
    """The message says to restore it."""
    _, flags = root_and_flags
    journal = tmp_path / "search" / "journal.log"
    journal.parent.mkdir()
    journal.write_text("[]\n")
    line = error_of(capsys, main, *flags, "--project", str(tmp_path), "--name", "search")
    assert f"{journal}: damaged (" in line
    assert journal.read_text() == "[]\n"
