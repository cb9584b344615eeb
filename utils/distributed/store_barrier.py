"""A barrier on the run's key-value store, at which processes wait for each other for as long as it takes.

A collective fails after the process group's timeout. If work between collectives may take long (scanning a data set),
processes wait here before they enter the next one. Heartbeats distinguish a slow process from a dead one.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from utils.errors import PeerFailure, Stopped, UserError, first_line
from utils.machine.resources import boot_id, process_stat

HEARTBEAT_S = 1.0
LOST_AFTER_S = 60.0  # a process may hold the interpreter lock for long, e.g. while parsing a large file
_CHECK_EVERY_S = 0.5
_LINGER_S = 2.0


class StoreBarrier:
    """A context that ``len(names)`` processes enter, inside which they can wait for each other.

    If one process raises inside the context, waiting raises PeerFailure with its message in the others (or `Stopped`,
    if that is what it raised). If one dies or stops sending heartbeats, waiting raises UserError.

    Args:
        store: of the run; None if there is a single process, which never waits.
        title: the same in all processes, and used once in a run.
        rank: the index of this process in ``names``.
        names: of the processes, for messages.
    """

    def __init__(self, store: dist.Store | None, title: str, *, rank: int, names: Sequence[str]) -> None:
        self._rank, self._names, self._rounds = rank, names, 0
        self._store = dist.PrefixStore(f"barrier/{title}", store) if len(names) > 1 else None
        self._checked_at = 0.0
        self._beats: dict[int, tuple[bytes, float]] = {}  # of other processes: the last heartbeat, and its time
        self._exited = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> StoreBarrier:
        if self._store is not None:
            self._store.set(f"{self._rank}/process", this_process())
            self._heartbeat.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._store is None:
            return
        self._exited.set()
        self._heartbeat.join()
        if error is not None:
            with suppress(dist.DistError):  # the store is gone, and with it the processes that would read this
                self._fail(error)

    def _beat(self) -> None:
        """Changes the value of a key every second until the context is exited."""
        with suppress(dist.DistError):
            for count in itertools.count():
                self._store.set(f"{self._rank}/beat", str(count))
                if self._exited.wait(HEARTBEAT_S):
                    return

    def _fail(self, error: BaseException) -> None:
        """Makes the other processes raise where they wait."""
        if isinstance(error, PeerFailure) and self._store.check(["failed"]):
            return
        text = f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if isinstance(error, Stopped):
            self._store.set("stopped", str(error.code))
        self._store.set("failed", f"{self._names[self._rank]} failed: {text}")
        if isinstance(error, PeerFailure):
            return
        readers = self._store.add("read", 1)  # processes that fail themselves count, too
        deadline = time.monotonic() + _LINGER_S  # this process may host the store that the others read from
        while readers < len(self._names) and time.monotonic() < deadline:
            time.sleep(0.05)
            readers = self._store.add("read", 0)

    def wait_all(self) -> None:
        """Returns when every process has called this as often as this one. Raises `PeerFailure` or `Stopped` if another
        process has, and UserError if one has died or the store cannot be reached."""
        if self._store is None:
            return
        self._rounds += 1
        key = f"arrived/{self._rounds}"
        world_size = len(self._names)
        # Each process watches one other, so exactly one notices a death, and it fails.
        self._poll(lambda store: store.add(key, 0) >= world_size, (self._rank + 1) % world_size, start=key)

    def set(self, key: str) -> None:
        """Ends the `wait` of other processes for ``key``."""
        if self._store is not None:
            self._store.set(f"key/{key}", "")

    def wait(self, key: str, rank: int) -> None:
        """Returns when a process has `set` ``key``. Watches process ``rank`` meanwhile. Raises as `wait_all` does."""
        self._poll(lambda store: store.check([f"key/{key}"]), rank)

    def check(self) -> None:
        """Raises as `wait_all` does if another process has failed."""
        if self._store is not None and self._store.check(["failed"]):
            text = self._store.get("failed").decode()
            self._store.add("read", 1)
            if self._store.check(["stopped"]):
                raise Stopped(int(self._store.get("stopped")))
            raise PeerFailure(text)

    def _poll(self, is_done: Callable[[dist.Store], bool], rank: int, *, start: str = "") -> None:
        store, pause = self._store, 0.001
        longest = 0.05 * max(1.0, len(self._names) / 32)  # bounds the store's load when there are many processes
        try:
            if start:
                store.add(start, 1)
            while not is_done(store):
                self.check()
                self._check_alive(rank)
                time.sleep(pause)
                pause = min(2 * pause, longest)
        except dist.DistError as error:
            raise UserError(f"lost contact while waiting for {self._names[rank]}: {first_line(error)}") from None

    def _check_alive(self, rank: int) -> None:
        now, name = time.monotonic(), self._names[rank]
        if now - self._checked_at < _CHECK_EVERY_S:
            return
        self._checked_at = now
        beat = self._store.get(f"{rank}/beat") if self._store.check([f"{rank}/beat"]) else b""
        last, since = self._beats.setdefault(rank, (beat, now))
        text = ""
        if beat != last:
            self._beats[rank] = beat, now
        elif beat and now - since > LOST_AFTER_S:
            text = f"{name} has sent no heartbeat for {LOST_AFTER_S:.0f} s"
        if self._store.check([f"{rank}/process"]):
            process = self._store.get(f"{rank}/process").decode()
            if has_died(process):
                self.check()
                text = f"{name} (process {process.split()[0]}) died while the others waited for it; enough memory?"
        if text:
            raise UserError(text)


def this_process() -> str:
    """Identifies this process for `has_died`."""
    return f"{os.getpid()} {_process_space()}"


def process_identity(pid: int) -> str:
    """Identifies a running process of this machine among all processes anywhere (as far as /proc allows)."""
    try:
        started = process_stat(pid)[19]
    except (OSError, IndexError):
        started = "?"
    return f"{os.uname().nodename} {_process_space()} {pid} {started}"


def has_died(process: str) -> bool:
    """Whether the process that `this_process` has identified has ended; False if it cannot be observed from here."""
    pid, space = process.split()
    return space == _process_space() and not _is_running(int(pid))


def _process_space() -> str:
    """Equal in two processes that see each other's process ids (ranks may run in separate containers or machines)."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    boot = boot_id()
    return f"{boot}/{space}" if boot and space else os.uname().nodename


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return process_stat(pid)[0] != "Z"
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # of another user, or not to be seen
        return True
