"""The locks of a search, whose processes may be on several machines that share its folder.

    file             held                                what it prevents
    .study.lock      while a process joins the search,   two processes make the folds, or draw the last trial; their
                     claims or ends a trial, appends     lines in the journal mix; a trial is claimed that has just
                     to the journal, or writes the       ended; an old report replaces a newer one; a search is
                     report                              removed while another process joins it
    .trial.lock      while a process runs the trial;     two processes run the same trial: the journal also calls it
                     each trial has one                  running if its process was killed
    .only-process    during the whole search, if the     all of these
                     file system has no locks

A process that holds the study's lock does not wait for the lock of a trial, it only tries it: there are no deadlocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.storages.journal import JournalFileOpenLock

from utils.errors import UserError
from utils.files.locks import FileLock

JOURNAL_LOG = "journal.log"
TRIALS_FOLDER = "trials"  # folder of the trials' folders
_STUDY_LOCK = ".study.lock"
_TRIAL_LOCK = ".trial.lock"
_ONLY_PROCESS = ".only-process"
_SILENT_WAIT_S = 10.0  # wait for the study's lock after which a warning names its holder


class StudyLock(JournalFileOpenLock):
    """The lock of a search, for ``with`` statements, and for Optuna, which takes it to append to the journal.

    It is reentrant, since Optuna also appends within such statements. It ends with its process, whereas Optuna's own
    lock outlives a killed one.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: that of the search."""
        super().__init__(str(folder / _STUDY_LOCK))
        self._journal = folder / JOURNAL_LOG
        self._file_lock = FileLock(folder / _STUDY_LOCK)
        self._depth = 0  # how many times this process has acquired the lock

    def acquire(self) -> bool:
        """Waits for the lock, then repairs the journal for the next line."""
        if self._depth == 0:
            holder = self._file_lock.acquire(_SILENT_WAIT_S)
            if holder:
                self._file_lock.wait("another process of this search")
        self._depth += 1
        _remove_incomplete_line(self._journal)
        return True

    def release(self) -> None:
        """Releases the lock if it was released as often as acquired."""
        self._depth -= 1
        if self._depth == 0:
            self._file_lock.release()

    def __enter__(self) -> StudyLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _remove_incomplete_line(journal: Path) -> None:
    """Removes the incomplete last line that a killed process or a full disk has left. The caller holds the lock: no
    other process is writing that line."""
    if not journal.exists():
        return
    with open(journal, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def lock_trial(folder: Path) -> FileLock | None:
    """Locks the trial in ``folder``, which is created; returns None if another process is running the trial."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _TRIAL_LOCK)
    holder = lock.acquire()
    return None if holder else lock


def has_running_trial(folder: Path) -> bool:
    """Returns whether any process is running a trial of the search in ``folder``. Takes each trial's lock for a moment,
    so the caller holds the `StudyLock`, under which processes claim trials."""
    for path in folder.glob(f"{TRIALS_FOLDER}/*/{_TRIAL_LOCK}"):
        with FileLock(path) as lock:
            holder = lock.acquire()
            if holder:
                return True
    return False


@contextmanager
def single_process_without_locks(folder: Path) -> Iterator[None]:
    """Keeps other processes out of the search in ``folder`` during the block if the file system has no locks.

    Raises UserError if another process is searching there, or was killed.
    """
    with FileLock(folder / _STUDY_LOCK) as lock:
        holder = lock.acquire()
        has_locks = bool(holder) or lock.excludes_others
    if has_locks:
        yield
        return
    path = folder / _ONLY_PROCESS
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise UserError(
            f"{folder}: the file system has no locks, so only one process can search here; if no other does, remove "
            f"{path}"
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
