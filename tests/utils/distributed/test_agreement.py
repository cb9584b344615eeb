"""Processes with different settings end at once, with one line that names the difference and the ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.processes import Processes
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import training, write_inputs
from utils.distributed.agreement import check_agreement
from utils.errors import PeerFailure, UserError

SECONDS = 60  # enough for two processes to start on a busy machine, and far below a collective's timeout


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), train=8, val=3)


def error_of(folder: Path, pair: list[list[str]], machines: list[Path] | None = None) -> str:
    """Returns the error line of two processes of one job, on one machine or in the folders of two.

    Neither waits for the other's message, since no launcher would end it.
    """
    with Processes(folder / "log.txt", faults="set:utils.process.main:PEER_GRACE_S:0") as run:
        run.pair(pair, folders=machines)
        assert run.codes(SECONDS) == [2, 2], run.output()
        assert "Traceback" not in run.output()
        (line,) = [line for line in run.output().splitlines() if line.startswith("error: ")]
        return line


def test_two_processes_with_different_flags_end_with_one_line(inputs, tmp_path):
    flags = training(inputs, tmp_path, "--epochs", 1)
    error = error_of(tmp_path, [flags, [*flags, "--batch-size", "8"]])
    assert error.startswith("error: the processes of this run differ: ")
    assert "--batch-size is 4 on rank 0, but 8 on rank 1" in error
    assert not list(tmp_path.glob("exp*/*.pt"))


def test_machines_compare_their_data_before_they_fill_a_cache_together(inputs, tmp_path):
    """A machine that has other images must not leave the others waiting for its part."""
    machines = [tmp_path / "machine0", tmp_path / "machine1"]
    for machine in machines:
        shutil.copytree(inputs / "set", machine / "set")
    (machines[1] / "set" / "images" / "train" / "000.png").unlink()
    (machines[1] / "set" / "labels" / "train" / "000.txt").unlink()
    flags = training(inputs, tmp_path, "--epochs", 1, "--data", "set/data.yaml", "--cache", "disk", "--cache-dir")
    error = error_of(tmp_path, [[*flags, str(machine / "cache")] for machine in machines], machines)
    assert "the number of train images is 8 on rank 0, but 7 on" in error
    assert "the train labels is " in error
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
