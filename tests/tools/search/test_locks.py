"""The locks of a search, also after a kill and on file systems without locks."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from tests.helpers.messages import refused
from tests.helpers.searches import open_study
from utils.files.locks import FileLock

pytest.importorskip("optuna")
from tools.search.locks import StudyLock, single_process_without_locks


def test_the_lock_is_held_until_the_last_release(tmp_path):
    """Optuna acquires and releases it for each line that it appends, also within a statement that holds it."""
    lock = StudyLock(tmp_path)
    other_process = FileLock(tmp_path / ".study.lock")
    with lock:
        with lock:
            pass
        holder = other_process.acquire()
        assert holder != ""
    holder = other_process.acquire()
    assert holder == ""
    other_process.release()


def test_a_claim_keeps_its_lock_while_optuna_appends_to_the_journal(tmp_path, monkeypatch):
    """Else another process could claim the trial that is being drawn, or draw one more than ``--trials``."""
    study = open_study(tmp_path)
    released: list[Path] = []
    release = FileLock.release

    def record(lock: FileLock) -> None:
        released.append(lock.path)
        release(lock)

    monkeypatch.setattr(FileLock, "release", record)
    claim = study.claim()
    assert released == [tmp_path / ".study.lock"]
    claim.lock.release()


def test_a_lock_of_a_killed_process_is_not_waited_for(tmp_path, monkeypatch):
    """Optuna's own lock stays when its holder is killed, and it never expires if the folder's path is relative."""
    monkeypatch.chdir(tmp_path)
    folder = Path("search")
    folder.mkdir()
    (folder / "journal.log.lock").symlink_to(folder / "journal.log")
    assert open_study(folder).claim().number == 0


def test_without_locks_a_single_process_searches(tmp_path, monkeypatch):
    """On such a file system, a second process would cut off the journal line that the first one is writing."""
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
    mark.touch()  # of a process that was killed
    with refused(f"remove {mark}"), single_process_without_locks(tmp_path):
        pass
    assert mark.exists()
