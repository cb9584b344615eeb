"""The study that processes share, also after a kill: its journal."""

from __future__ import annotations

import shutil

import pytest

from tests.helpers.messages import refused
from tests.helpers.searches import open_study
from utils.errors import UserError

pytest.importorskip("optuna")
from tools.search.study import TrialOutcome


def test_half_a_line_does_not_end_a_search_but_lost_trials_do(tmp_path):
    """A process is killed, or the disk is full, while it appends to the journal.

    Without the old trials, a new one would continue the training of a lost one.
    """
    study = open_study(tmp_path)
    study.finish(study.claim(), TrialOutcome.scored(0.5))
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    for rest in (b'{"op_code":4,"worker_id":"b0', b"\0\0\0"):
        journal.write_bytes(whole + rest)
        study = open_study(tmp_path)
        claim = study.claim()
        assert claim.number == 1
        study.report(claim, 1, 0.25)
        claim.lock.release()
        assert [trial.last_step for trial in open_study(tmp_path).trials()] == [None, 1]
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
            open_study(tmp_path)


def test_a_trial_whose_process_was_killed_while_drawing_it_gets_the_same_values(tmp_path):
    study = open_study(tmp_path)
    study.finish(study.claim(), TrialOutcome.scored(0.5))
    claim = study.claim()
    claim.lock.release()
    journal = tmp_path / "journal.log"
    lines = journal.read_text().splitlines(True)
    for num_undrawn in range(1, len(claim.values) + 1):
        journal.write_text("".join(lines[:-num_undrawn]))
        again = open_study(tmp_path).claim()
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
    study = open_study(tmp_path)
    claim = study.claim()
    study.report(claim, 1, 0.25)
    study.finish(claim, TrialOutcome.scored(0.5))
    journal = tmp_path / "journal.log"
    text = journal.read_text()
    assert line in text
    journal.write_text(text.replace(line, changed))
    with pytest.raises(UserError, match=r"journal\.log: damaged \(.*\); restore it, or choose another --name"):
        open_study(tmp_path)
