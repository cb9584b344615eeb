"""Processes with different settings end at once, with one line that names the difference and the ranks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.helpers.processes import Processes
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model
from utils.distributed.agreement import check_agreement
from utils.errors import PeerFailure, UserError

SECONDS = 60  # enough for two processes to start on a busy machine, and far below a collective's timeout


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_dataset(root / "set", train=8, val=3)
    write_model(root / "tiny.yaml")
    return root


def flags(inputs: Path, project: Path) -> list[str]:
    return ["--data", str(inputs / "set" / "data.yaml"), "--model", str(inputs / "tiny.yaml"), *SMALL, "--epochs", "1",
            "--project", str(project), "--cache-dir", str(project / "cache")]  # fmt: skip


def errors_of(
    folder: Path, pair: list[list[str]], *, apart: bool = False, script: str = "tests/robustness/faulty_train.py"
) -> list[str]:
    """Returns the error lines of two processes of one job with different flags, or in different working folders.

    Neither waits for the other's message, since no launcher would end it.
    """
    folders = [folder / "machine0", folder / "machine1"] if apart else None
    with Processes(folder / "log.txt", faults="set:utils.process.main:PEER_GRACE_S:0") as run:
        run.pair(pair, script=script, folders=folders)
        started = time.monotonic()
        assert run.codes(timeout=SECONDS) == [2, 2], run.output()
        assert time.monotonic() - started < SECONDS
        assert "Traceback" not in run.output()
        return [line for line in run.output().splitlines() if line.startswith("error: ")]


def copies(inputs: Path, folder: Path) -> list[Path]:
    """Returns the data set on two machines, under the same name."""
    machines = [folder / "machine0", folder / "machine1"]
    for machine in machines:
        shutil.copytree(inputs / "set", machine / "set", copy_function=shutil.copyfile)
        time.sleep(0.02)  # so that the times of the files differ
    return machines


def test_two_processes_with_different_flags_end_with_one_line(inputs, tmp_path):
    given = flags(inputs, tmp_path)
    (error,) = errors_of(tmp_path, [given, [*given, "--batch-size", "8"]])
    assert error.startswith("error: the processes of this run differ: ")
    assert "--batch-size is 4 on rank 0, but 8 on rank 1" in error
    assert not list(tmp_path.glob("exp*/*.pt"))


def test_two_machines_with_different_labels_end_with_one_line(inputs, tmp_path):
    _, other = copies(inputs, tmp_path)
    (other / "set" / "labels" / "train" / "000.txt").write_text("1 0.5 0.5 0.25 0.25\n")
    (error,) = errors_of(tmp_path, [[*flags(inputs, tmp_path), "--data", "set/data.yaml"]] * 2, apart=True)
    assert "the train labels is " in error


def test_machines_compare_their_data_before_they_fill_a_cache_together(inputs, tmp_path):
    """A machine that has other images must not leave the others waiting for its part."""
    machines = copies(inputs, tmp_path)
    first = min((machines[1] / "set" / "images" / "train").iterdir())
    first.unlink()
    (machines[1] / "set" / "labels" / "train" / f"{first.stem}.txt").unlink()
    given = [*flags(inputs, tmp_path), "--data", "set/data.yaml", "--cache", "disk", "--cache-dir"]
    (error,) = errors_of(tmp_path, [[*given, str(machine / "cache")] for machine in machines], apart=True)
    assert "the number of train images is 8 on rank 0, but 7 on" in error
    assert not list(tmp_path.glob("machine?/cache/*.lmdb"))


def _compare(ctx, facts):
    try:
        check_agreement(ctx, facts[ctx.rank])
    except (UserError, PeerFailure) as error:
        return type(error), str(error)
    return None


def test_equal_values_pass_and_all_ranks_report_different_ones():
    same = {"a": 1, "weights": "", "lr0": None, "long": list(range(100))}
    other = {**same, "a": 2, "weights": "empty", "lr0": "null"}  # texts that may be taken for values
    assert run_ranks(3, _compare, [same] * 3) == [None] * 3
    results = run_ranks(4, _compare, [same, other, same, other])
    assert [kind for kind, _ in results] == [UserError, PeerFailure, PeerFailure, PeerFailure]
    (text,) = {text for _, text in results}
    assert "a is 1 on ranks 0, 2, but 2 on ranks 1, 3; " in text
    assert 'weights is "" on ranks 0, 2, but "empty" on ranks 1, 3; lr0 is null on ranks 0, 2, but "null" on' in text
    assert "\n" not in text
    assert len(text) < 400
