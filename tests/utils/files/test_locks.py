"""File locks: held by one process, released when it ends, and naming it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT
from utils.files.locks import FileLock

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


def test_a_lock_opens_no_link_and_needs_no_locks_of_the_file_system(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        FileLock(tmp_path / "link").acquire()
    assert not (tmp_path / "elsewhere").exists()

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire() == ""
    assert not lock.excludes_others
    lock.release()


def test_a_lock_outlives_other_descriptors_and_excludes_its_own_process(tmp_path):
    """Record locks (lockf) would do neither."""
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire() == ""
    for _ in range(2):
        assert f"process {os.getpid()} on" in lock.path.read_text()  # opened, and closed
        assert FileLock(lock.path).acquire().startswith(f"process {os.getpid()} on")
    lock.release()
    assert lock.acquire() == ""
