"""Locks in files: held by one process, gone with it, and naming it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from utils.file_lock import FileLock

HOLDER = """
import os, sys, time
from utils.file_lock import FileLock
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
    root = Path(__file__).parents[1]
    holder = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    yield path, holder
    os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()


def test_a_held_lock_names_its_holder(held):
    path, holder = held
    assert FileLock(path).acquire(0.2).startswith(f"process {holder.pid} on {os.uname().nodename}, since 20")


def test_a_lock_ends_with_its_process_and_not_with_that_processs_children(held):
    path, holder = held
    holder.kill()
    holder.wait()
    lock = FileLock(path)
    assert lock.acquire() == ""
    assert f"process {os.getpid()} on" in path.read_text()
    lock.release()
    assert not path.exists()


def test_released_locks_are_free_again(tmp_path):
    for _ in range(2):
        lock = FileLock(tmp_path / "lock")
        assert lock.acquire() == ""
        lock.release()
        lock.release()
    with pytest.raises(OSError, match="none"):
        FileLock(tmp_path / "none" / "lock").acquire()


def test_a_lock_in_a_folder_made_anew_is_not_removed_with_the_former_one(tmp_path):
    """A run that failed removes its folder, and another may make one of the same name before the lock is released."""
    lock = FileLock(tmp_path / "run" / "lock")
    lock.path.parent.mkdir()
    assert lock.acquire() == ""
    shutil.rmtree(lock.path.parent)
    lock.path.parent.mkdir()
    lock.path.write_text("another's")
    lock.release()
    assert lock.path.read_text() == "another's"


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = FileLock(tmp_path / "lock")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            lock.acquire()
    assert not lock.path.exists()
    assert lock.acquire() == ""
    lock.release()


def test_systems_without_locks(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert FileLock(tmp_path / "lock").acquire() == ""
