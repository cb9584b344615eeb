"""File locks: held by one process, released when it ends, and naming it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.helpers.repository import ROOT
from utils.files.locks import FileLock
from utils.logger import configure_logging

HOLDER = """
import os, sys, time
from utils.files.locks import FileLock
assert FileLock(sys.argv[1]).acquire() == ""
if os.fork():  # a child that outlives the holder, as loader processes may
    print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def held(tmp_path):
    """A lock that another process holds, and that process."""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    yield path, holder
    os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()


def test_a_lock_ends_with_its_process_and_not_with_its_children(held):
    path, holder = held
    holder.kill()
    holder.wait()
    lock = FileLock(path)
    assert lock.acquire(patience_s=10) == ""  # a child that has just been forked releases it in a moment
    assert f"process {os.getpid()} on" in path.read_text()
    lock.release()


def test_a_full_disk_and_file_systems_without_locks_are_tolerated(tmp_path, monkeypatch):
    def fails(number: int, text: str) -> Callable:
        def fail(*_: object) -> None:
            raise OSError(number, text)

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails(errno.ENOSPC, "No space left on device"))
        with FileLock(tmp_path / "lock") as lock:
            assert lock.acquire() == ""
            assert lock.excludes_others
            assert FileLock(tmp_path / "lock").acquire() == "another process"
    monkeypatch.setattr(fcntl, "flock", fails(errno.ENOLCK, "No locks available"))
    with FileLock(tmp_path / "lock") as lock:
        assert lock.acquire() == ""
        assert not lock.excludes_others


def test_a_lock_outlives_other_descriptors_and_children_and_excludes_its_own_process(tmp_path):
    """Record locks (lockf) would do neither."""
    lock = FileLock(tmp_path / "run" / "lock")
    lock.path.parent.mkdir()
    assert lock.acquire() == ""
    if os.fork() == 0:
        lock.release()
        os._exit(0)
    os.wait()
    for _ in range(2):
        assert f"process {os.getpid()} on" in lock.path.read_text()  # opened, and closed
        assert FileLock(lock.path).acquire().startswith(f"process {os.getpid()} on")
    lock.release()
    assert lock.acquire() == ""


def test_a_file_removed_by_its_holder_is_no_lock(tmp_path, monkeypatch):
    """Otherwise a process that was waiting would hold the removed file, and the next one a new file."""
    path = tmp_path / "lock"
    flock = fcntl.flock

    def removed_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with FileLock(path) as lock:
        assert lock.acquire() == ""
        assert FileLock(path).acquire().startswith(f"process {os.getpid()} on")


def test_waiting_for_a_lock_names_its_holder(held, capsys):
    configure_logging(True)
    path, holder = held
    threading.Timer(0.3, holder.kill).start()
    with FileLock(path).wait("another run"):
        assert f"process {os.getpid()} on" in path.read_text()
    assert f"warning: waiting for another run (process {holder.pid} on " in capsys.readouterr().out
