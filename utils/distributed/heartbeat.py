"""Heartbeats of processes that wait for each other on the run's store."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

HEARTBEAT_S = 1.0
LOST_AFTER_S = 60.0  # a process may hold the interpreter lock for long, e.g. while parsing a large file


@contextmanager
def heartbeat(store: dist.Store, name: str) -> Iterator[None]:
    """While active, ``name/process`` identifies this process and ``name/beat`` changes every second."""
    finished = threading.Event()
    beat = threading.Thread(target=_beat, args=(store, f"{name}/beat", finished), daemon=True)
    store.set(f"{name}/process", this_process())
    beat.start()
    try:
        yield
    finally:
        finished.set()
        beat.join()


def _beat(store: dist.Store, key: str, finished: threading.Event) -> None:
    for count in itertools.count():
        try:
            store.set(key, str(count))
        except dist.DistError:  # the store is gone, and with it whoever would read this
            return
        if finished.wait(HEARTBEAT_S):
            return


def this_process() -> str:
    """Identifies this process for `has_died`."""
    return f"{os.getpid()} {_process_space()}"


def process_identity(pid: int) -> str:
    """Identifies a running process of this machine among all processes anywhere (as far as /proc allows)."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        started = "?"
    return f"{os.uname().nodename} {_process_space()} {pid} {started}"


def has_died(process: str) -> bool:
    """Whether a process (its `this_process`) is known to have ended; False if it cannot be observed from here."""
    pid, space = process.split()
    return space == _process_space() and not _is_running(int(pid))


def _process_space() -> str:
    """Equal in two processes that see each other's process ids (ranks may run in separate containers or machines)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return True
