"""``--eval-ranks`` on the user's road: the files are those of a run that validates itself, whatever ends the run in
between, and training waits for no validation."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

import train
from engine.evaluation.evaluator import Evaluator
from engine.run import eval_process
from engine.train.step import TrainStep
from tests.helpers.processes import Processes
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.same_content import assert_same_run
from tests.helpers.scripts import SMALL, call
from tests.helpers.tiny import write_dataset, write_model
from tests.robustness.faulty_train import inject_step_fault
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint

EVALUATED = ("--eval-ranks", "1")
SLOW = "slowval:0.3"  # two batches, so a validation takes longer than all epochs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=12)
    write_model(root / "tiny.yaml")
    return root


def flags(inputs: Path, project: Path, *more: str) -> list[str]:
    return ["--data", str(inputs / "set" / "data.yaml"), "--model", str(inputs / "tiny.yaml"),
            "--project", str(project), "--cache-dir", str(inputs / "cache"), *SMALL, "--epochs", "4",
            "--save-minutes", "0", "--cls-pw", "1", *more]  # fmt: skip


@pytest.fixture
def rated(monkeypatch) -> list[None]:
    """Gives each epoch another AP in this process. Returns a list that gets an item for each validation."""
    monkeypatch.setattr(TrainStep, "__call__", TrainStep.__call__)
    monkeypatch.setattr(Evaluator, "run", Evaluator.run)
    inject_step_fault("rated")
    run = Evaluator.run
    validations: list[None] = []

    def counted(*args, **options):
        validations.append(None)
        return run(*args, **options)

    monkeypatch.setattr(Evaluator, "run", counted)
    return validations


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory) -> Path:
    """The run of one process, which validates itself."""
    folder = tmp_path_factory.mktemp("alone")
    with Processes(folder / "log.txt", faults="rated") as run:
        run.ranks(1, *flags(inputs, folder))
        assert run.codes() == [0], run.output()
    return folder / "exp"


@pytest.fixture(scope="module")
def evaluated(inputs, tmp_path_factory) -> Path:
    """The same run with ``--eval-ranks 1``, and in the folder "kept" what a kill would have left at each moment."""
    folder = tmp_path_factory.mktemp("evaluated")
    with Processes(folder / "log.txt", faults=f"rated;{SLOW};snapshot:{folder / 'exp'}:{folder / 'kept'}") as run:
        run.ranks(2, *flags(inputs, folder, *EVALUATED))
        assert run.codes() == [0, 0], run.output()
        assert "2 processes on cpu" in run.output()
    return folder / "exp"


def test_the_files_are_those_of_a_run_that_validates_itself(alone, evaluated):
    assert_same_run(alone, evaluated)
    assert not [*evaluated.glob("unscored*")]


@pytest.mark.slow
def test_two_evaluating_processes_share_each_validation(inputs, alone, tmp_path):
    with Processes(tmp_path / "log.txt", faults=f"rated;scored:{tmp_path / 'scored'}") as run:
        run.ranks(3, *flags(inputs, tmp_path, "--eval-ranks", "2"))
        assert run.codes() == [0, 0, 0], run.output()
    assert_same_run(alone, tmp_path / "exp")
    validations = (tmp_path / "scored").read_text().split()
    assert sorted(map(validations.count, set(validations))) == [4, 4]


# What a kill leaves of epoch 1: the names of its files that are there, and whether last.pt lists it as unscored.
MOMENTS = {
    "before its weights": ([], False),
    "before last.pt lists it": (["unscored1.pt"], False),
    "before its scores": (["unscored1.pt"], True),
    "with its scores": (["unscored1.pt", "unscored1.scores"], True),
    "after best.pt": (["best.pt", "unscored1.pt", "unscored1.scores"], True),
}


def copy_moment(evaluated: Path, moment: str, folder: Path) -> dict:
    """Copies what a kill would have left to ``folder``. Returns the content of last.pt."""
    files, is_listed = MOMENTS[moment]
    for kept in sorted(evaluated.with_name("kept").glob("*/last.pt")):
        last = read_checkpoint(kept)
        listed = [epoch["number"] for epoch in last["unscored"]]
        has_files = all(kept.with_name(name).exists() for name in files)
        if has_files and not last["rows"] and (1 in listed) == is_listed:
            shutil.copytree(kept.parent, folder)
            if "unscored1.scores" not in files:  # the evaluating process may have been fast
                (folder / "unscored1.scores").unlink(missing_ok=True)
            return last
    raise AssertionError(moment)


LONG = ("before its weights", "after best.pt")


@pytest.mark.parametrize("moment", [pytest.param(m, marks=[pytest.mark.slow] * (m in LONG)) for m in MOMENTS])
def test_a_kill_at_any_moment_resumes_to_the_same_bits(alone, evaluated, tmp_path, rated, moment):
    """Here without --eval-ranks."""
    folder = tmp_path / "exp"
    last = copy_moment(evaluated, moment, folder)
    kept_scores = [one for one in last["unscored"] if (folder / f"unscored{one['number']}.scores").exists()]
    call(train.main, "--resume", folder)
    assert_same_run(alone, folder)
    assert len(rated) == 4 - len(kept_scores)  # scores that are there are not computed again
    assert not [*folder.glob("unscored*")]


@pytest.mark.parametrize(
    ("to", "more"), [("the evaluating process", EVALUATED), pytest.param("all", (), marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_validation_between_batches_and_the_run_resumes_with_that_epoch(
    inputs, alone, tmp_path, to, more
):
    with Processes(tmp_path / "log.txt", faults="rated;slowval:9") as run:
        run.ranks(2, *flags(inputs, tmp_path, *EVALUATED))
        run.until((tmp_path / "exp" / "unscored2.pt").exists)
        for process in run.started if to == "all" else run.started[1:]:
            process.send_signal(signal.SIGTERM)
        assert run.codes() == [75, 75], run.output()
    last = read_checkpoint(tmp_path / "exp" / "last.pt")
    assert [epoch["number"] for epoch in last["unscored"]] == [1, 2]
    with Processes(tmp_path / "resumed.txt", faults="rated") as run:
        run.ranks(2 if more else 1, "--resume", str(tmp_path / "exp"), *more)
        assert set(run.codes()) == {0}, run.output()
    assert_same_run(alone, tmp_path / "exp")


def test_other_validation_labels_reset_the_best_epoch_and_old_scores(inputs, tmp_path, evaluated, rated):
    shutil.copytree(inputs / "set", tmp_path / "set")
    (tmp_path / "set" / "labels" / "val" / "000.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    folder = tmp_path / "exp"
    copy_moment(evaluated, "with its scores", folder)
    call(train.main, "--resume", folder, "--data", tmp_path / "set" / "data.yaml")
    assert len(rated) == 4


def test_an_evaluating_process_with_other_labels_ends_the_run(inputs, tmp_path):
    write_dataset(tmp_path / "set", train=12, val=4)
    with Processes(tmp_path / "log.txt") as run:
        given = flags(inputs, tmp_path, *EVALUATED)
        run.pair([given, [*given, "--data", str(tmp_path / "set" / "data.yaml")]])
        assert run.codes() == [2, 2], run.output()
        assert "rank 1" in run.output()


@pytest.mark.slow
def test_a_killed_evaluating_process_ends_the_job_and_nothing_is_lost(inputs, tmp_path):
    with Processes(tmp_path / "log.txt", real=True) as run:
        process = run.start(
            [run.python, "train.py", *flags(inputs, tmp_path, *EVALUATED, "--spawn", "2", "--epochs", "50")]
        )
        run.until(lambda: "epoch 2/" in run.output())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [pid for pid in map(int, children) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(max(ranks), signal.SIGKILL)  # the last rank was started last
        assert run.codes() != [0], run.output()
        run.wait_gone()
    assert read_checkpoint(tmp_path / "exp" / "last.pt")["progress"]["epoch"] >= 1


@pytest.mark.parametrize("run_id", ["another", None])
def test_a_machine_without_the_folder_of_the_run_is_told_to_share_it(tmp_path, monkeypatch, run_id):
    monkeypatch.setattr(eval_process, "FOLDER_PATIENCE_S", 0)
    if run_id:
        write_checkpoint(checkpoint_of(run_id=run_id).content(), tmp_path / "last.pt")
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        eval_process.read_record(tmp_path, "run")
