"""The result file, in which a command reports to the process that has started it."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.preloaded import python
from tests.helpers.repository import ROOT
from utils.errors import PeerLost, UserError
from utils.machine.limits import Cause, limits_as_user_errors
from utils.process.child import RunResult, start_child
from utils.process.entrypoint import run_main
from utils.process.outcome import Outcome
from utils.process.result_file import RESULT_VARIABLE, claim_result_file, read_result, report_begun, write_result


@pytest.fixture(autouse=True)
def _no_result_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the process of the tests forget the file of a test."""
    yield
    monkeypatch.delenv(RESULT_VARIABLE, raising=False)
    claim_result_file()


def fill_disk():
    raise OSError(errno.EDQUOT, "Disk quota exceeded", "last.pt")


def explain_full_disk():
    try:
        fill_disk()
    except OSError:
        raise UserError("last.pt: could not be written") from None


def find_mistake():
    raise UserError("lr0: wrong")


def lose_peer():
    raise PeerLost("process 1 was killed")


def use_up_memory():
    with limits_as_user_errors(lambda: "try a smaller --batch-size"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def lose_loader():
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


def remount_read_only():
    raise OSError(errno.EROFS, "Read-only file system", "last.pt")


def be_wrong():
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def be_wrong_about_a_full_disk():
    try:
        fill_disk()
    except OSError as error:
        {}[error.errno]


def translate_full_disk():
    try:
        fill_disk()
    except OSError as error:
        raise RuntimeError("failed finding central directory") from error


@pytest.mark.parametrize(
    ("fail", "before", "after"),
    [
        (find_mistake, Outcome.REFUSED, Outcome.FAILED),
        (be_wrong, Outcome.REFUSED, Outcome.FAILED),
        (fill_disk, Outcome.REFUSED, Outcome.REFUSED),
        (explain_full_disk, Outcome.REFUSED, Outcome.REFUSED),
        (translate_full_disk, Outcome.REFUSED, Outcome.REFUSED),
        (be_wrong_about_a_full_disk, Outcome.REFUSED, Outcome.FAILED),
        (remount_read_only, Outcome.REFUSED, Outcome.REFUSED),
        (use_up_memory, Outcome.LOST, Outcome.LOST),
        (lose_loader, Outcome.LOST, Outcome.LOST),
        (lose_peer, Outcome.LOST, Outcome.LOST),
    ],
)
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_the_outcome_after_an_error(tmp_path, monkeypatch, capsys, has_begun, fail, before, after):
    """Errors before training has begun do not count as failures: on a broken machine a search used up all its
    trials."""
    result_file = tmp_path / "result.jsonl"
    monkeypatch.setenv(RESULT_VARIABLE, str(result_file))

    def main(argv):
        if has_begun:
            report_begun("exp")
        fail()

    with pytest.raises(SystemExit) as ending:
        run_main(main)
    result = RunResult.of(ending.value.code, read_result(result_file))
    assert result.outcome == (after if has_begun else before)
    assert result.reason == read_result(result_file)["error"]


@pytest.mark.parametrize("errors", [[find_mistake, lose_peer], [lose_peer, find_mistake]])
def test_the_line_of_a_process_counts_more_than_that_of_one_that_has_lost_it(tmp_path, monkeypatch, errors):
    for fail in errors:
        monkeypatch.setenv(RESULT_VARIABLE, str(tmp_path / "result.jsonl"))
        with pytest.raises(SystemExit):
            run_main(lambda argv, fail=fail: fail())
    assert read_result(tmp_path / "result.jsonl") == {"error": "lr0: wrong", "cause": Cause.COMMAND}


def test_a_line_that_does_not_fit_into_the_result_file_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(RESULT_VARIABLE, str(tmp_path / "gone/result.jsonl"))
    with pytest.raises(SystemExit):
        run_main(lambda argv: find_mistake())
    assert "error: " in capsys.readouterr().err


def test_results_of_several_processes_are_joined_and_half_a_line_is_left_out(tmp_path, monkeypatch):
    result_file = tmp_path / "result.jsonl"
    monkeypatch.setenv(RESULT_VARIABLE, str(result_file))
    claim_result_file()
    write_result(folder="exp")
    with open(result_file, "a") as file:
        file.write('\n{"error": "the disk')
    write_result(error="lr0: wrong", cause="command")
    assert read_result(result_file) == {"folder": "exp", "error": "lr0: wrong", "cause": "command"}


COMMAND = """
import subprocess, sys
from utils.process.entrypoint import run_main
from utils.process.result_file import write_result
from utils.process.spawn import spawn

def start_another():
    subprocess.run([sys.executable, __file__, "another"])

def main(argv):
    if argv == ["another"]:
        write_result(folder="another")
        raise LookupError("no such key")
    write_result(folder="exp")
    spawn(start_another, 2) if argv == ["spawn"] else start_another()

if __name__ == "__main__":
    run_main(main, sys.argv[1:])
"""


@pytest.mark.parametrize("words", [[], ["spawn"]])
@pytest.mark.usefixtures("preloaded")
def test_a_command_that_a_callback_starts_has_a_result_of_its_own(tmp_path: Path, words):
    """Its folder does not become that of the training, and its error is printed."""
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{COMMAND}")
    with start_child([python(), str(program), *words], stderr=subprocess.PIPE) as child:
        _, errors = child.process.communicate()
        result = child.wait()
    assert result.values == {"folder": "exp"}
    assert errors.count(b"LookupError: no such key") == max(2 * len(words), 1)
