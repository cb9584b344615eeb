"""File locks: held by one process, released when it ends, and naming it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.hostile_files import take_name
from utils.files.locks import FileLock
from utils.files.safe_io import flock, remove_abandoned
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
    root = Path(__file__).parents[3]
    holder = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True)
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
    assert not path.exists()


def test_releasing_an_old_lock_keeps_the_lock_of_a_new_folder(tmp_path):
    """A failed run removes its folder, and another may create one of the same name before the lock is released."""
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


def test_file_systems_without_locks_are_tolerated(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert FileLock(tmp_path / "lock").acquire() == ""


def test_a_lock_outlives_other_descriptors_and_excludes_its_own_process(tmp_path):
    """Record locks (lockf) would do neither."""
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire() == ""
    for _ in range(2):
        assert f"process {os.getpid()} on" in lock.path.read_text()  # opened, and closed
        assert FileLock(lock.path).acquire().startswith(f"process {os.getpid()} on")
    lock.release()
    assert FileLock(lock.path).acquire() == ""


def test_a_child_does_not_release_its_parents_lock(tmp_path):
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert FileLock(lock.path).acquire() != ""
    lock.release()


def test_waiting_for_a_lock_names_its_holder(held, capsys):
    configure_logging(True)
    path, holder = held
    threading.Timer(0.3, holder.kill).start()
    with FileLock(path).wait("another run"):
        assert path.exists()
    assert not path.exists()
    assert f"warning: waiting for another run (process {holder.pid} on " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_only_a_file_is_locked(tmp_path, kind):
    """A lock file is emptied, which must not happen to what a symbolic link leads to."""
    take_name(tmp_path / "lock", kind, 9)
    with pytest.raises(PermissionError, match=r"is a (pipe or device|symbolic link|folder)"):
        FileLock(tmp_path / "lock").acquire()
    if kind == "link":
        assert (tmp_path / "target").stat().st_size == 9


def test_only_abandoned_files_are_removed(tmp_path):
    written, abandoned = tmp_path / "a.tmp", tmp_path / "b.tmp"
    abandoned.touch()
    with open(written, "wb") as file:
        flock(file.fileno())
        remove_abandoned(tmp_path.glob("*.tmp"))
        assert list(tmp_path.iterdir()) == [written]
    os.mkfifo(tmp_path / "pipe.tmp")  # opening it would wait
    (tmp_path / "link.tmp").symlink_to(tmp_path / "none")
    remove_abandoned([written, tmp_path / "none", tmp_path / "pipe.tmp", tmp_path / "link.tmp"])
    assert [path.name for path in tmp_path.iterdir()] == ["link.tmp"]
