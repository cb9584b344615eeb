"""--eval-ranks through real processes: the same files as without it, whatever ends the run in between."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.parallel.eval_ranks import EvalRanks, serve
from tests.helpers.processes import Processes
from tests.helpers.same_content import assert_same_content, assert_same_run
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model
from utils.distributed.context import DistributedContext
from utils.distributed.join import evaluation_store
from utils.errors import UserError
from utils.files.torch_file import read_checkpoint, write_checkpoint

EPOCHS = 4
LATE = ("--eval-ranks", "1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=12)
    write_model(root / "tiny.yaml")
    return root


def flags(inputs: Path, project: Path, *more: str) -> list[str]:
    return ["--data", str(inputs / "set" / "data.yaml"), "--model", str(inputs / "tiny.yaml"),
            "--project", str(project), "--cache-dir", str(inputs / "cache"), *SMALL, "--epochs", str(EPOCHS),
            "--save-minutes", "0", "--cls-pw", "1", *more]  # fmt: skip


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory) -> Path:
    """The run of one process, which validates itself."""
    folder = tmp_path_factory.mktemp("alone")
    with Processes(folder / "log.txt", faults="rated") as run:
        run.ranks(1, *flags(inputs, folder))
        assert run.codes() == [0], run.output()
    return folder / "exp"


@pytest.mark.parametrize("evaluating", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_files_are_those_of_a_run_that_validates_itself(inputs, alone, tmp_path, evaluating):
    scored = tmp_path / "scored"
    with Processes(tmp_path / "log.txt", faults=f"rated;scored:{scored}") as run:
        run.ranks(1 + evaluating, *flags(inputs, tmp_path, "--eval-ranks", str(evaluating)))
        assert run.codes() == [0] * (1 + evaluating), run.output()
        run.wait_gone()
    assert_same_run(alone, tmp_path / "exp")
    assert len(set(scored.read_text().split())) == evaluating


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", [(), LATE])
def test_a_stopped_run_resumes_with_the_epoch_that_had_no_scores_yet(inputs, alone, tmp_path, number, more):
    """Within epoch 3, on as many processes or on one."""
    go_on = tmp_path / "go on"
    with Processes(tmp_path / "log.txt", faults=f"rated;save:1;hold:0:8:{go_on};slowval:2") as run:
        run.ranks(2, *flags(inputs, tmp_path, *LATE))
        last = tmp_path / "exp" / "last.pt"

        def is_within_epoch_3() -> bool:
            progress = read_checkpoint(last)["progress"] if last.exists() else {}
            return (progress.get("epoch"), progress.get("batch")) == (2, 1)

        run.until(is_within_epoch_3)
        assert read_checkpoint(last)["unscored"][-1]["number"] == 2
        for process in run.started:
            process.send_signal(number)
        go_on.touch()
        assert run.codes()[0] in (75, -signal.SIGKILL), run.output()
        run.kill_all()
    with Processes(tmp_path / "resumed.txt", faults="rated") as run:
        run.ranks(2 if more else 1, "--resume", str(tmp_path / "exp"), *more)
        assert set(run.codes()) == {0}, run.output()
    assert_same_run(alone, tmp_path / "exp")


def test_a_dead_evaluating_process_ends_the_job_and_nothing_is_lost(inputs, tmp_path):
    with Processes(tmp_path / "log.txt", real=True) as run:
        process = run.start([run.python, "train.py", *flags(inputs, tmp_path, *LATE, "--spawn", "2", "--epochs", "50")])
        run.until(lambda: "epoch 2/" in run.output())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [pid for pid in map(int, children) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(max(ranks), signal.SIGKILL)  # the last rank was started last
        assert run.codes() != [0], run.output()
        run.wait_gone()
    epoch = read_checkpoint(tmp_path / "exp" / "last.pt")["progress"]["epoch"]
    assert epoch >= 1


def test_messages_of_any_size_arrive_and_an_error_reaches_the_training_processes(tmp_path):
    ctx = replace(DistributedContext.single(), store=dist.HashStore(), eval_ranks=1)
    weights = {"a": torch.arange(3_000_000.0)}
    setup: Any = b"x" * 9_000_000
    training = EvalRanks(ctx, setup)
    file = tmp_path / "unscored7.pt"
    training.send(7, file, is_closing=True)
    assert not training.has_scores(7)
    training.close()
    threading.Timer(0.2, write_checkpoint, [{"ema": weights}, file]).start()  # the evaluating processes wait for it
    seen = []

    def score(ema, is_closing):
        seen.append((ema, is_closing))
        return "evaluation"

    def build_scorer(message):
        assert message == setup
        return score

    evaluating = replace(ctx, store=evaluation_store(ctx.store))
    serve(evaluating, build_scorer)
    ((ema, is_closing),) = seen
    assert_same_content(ema, weights)
    assert is_closing
    assert training.wait(7, lambda: False) == "evaluation"
    failing = EvalRanks(ctx, setup)

    def refuse(_):
        raise UserError("no such data")

    with pytest.raises(UserError):
        serve(evaluating, refuse)
    failing.send(8, file, is_closing=False)
    with pytest.raises(UserError, match="no such data"):
        failing.wait(8, lambda: False)
