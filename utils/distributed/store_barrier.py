"""A barrier on the run's key-value store, at which processes wait for each other without a timeout.

A collective fails after the process group's timeout. If the work between collectives can take long (scanning a data
set), processes wait here before they enter the next collective.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist

from utils.errors import ExplainedError, PeerFailure, PeerLost, Stopped, first_line
from utils.process.identity import has_died

HEARTBEAT_S = 1.0
LOST_AFTER_S = 60.0  # a process can hold the interpreter lock for long, e.g. while parsing a large file
_CHECK_ALIVE_EVERY_S = 0.5
_LINGER_S = 2.0


def process_key(rank: int) -> str:
    """Returns the key under which a process's identity (`this_process`) is in the store of its group, once it has
    joined the run."""
    return f"process/{rank}"


class StoreBarrier:
    """A context that ``len(names)`` processes enter, inside which they can wait for each other.

    Failures of another process, and the methods that handle them:

    | failure | handled by | raised where others wait |
    | --- | --- | --- |
    | it raises inside the context | `_report`, `_raise_failure` | PeerFailure with its message, or `Stopped` |
    | the same, while it hosts the store, which ends with it | `_wait_for_readers` | the same |
    | it is killed, on this machine (out of memory) | `_check_alive`: its process id | PeerLost, within a second |
    | it hangs, or its machine is lost, inside the context | `_check_alive`: heartbeats | PeerLost, after a minute |
    | it hosts the store, and is killed | `_contact` | PeerLost |

    A process may also be killed before it enters the context. It may be late without limit.

    Args:
        store: the store of the group (`DistributedContext.store`); None if there is a single process, which never
            waits.
        title: the same in all processes, and unique within the run.
        rank: the index of this process in ``names``.
        names: names of the processes in messages.
        group_ranks: ranks of the processes in the group.
    """

    def __init__(
        self, store: dist.Store | None, title: str, *, rank: int, names: Sequence[str], group_ranks: Sequence[int]
    ) -> None:
        self._group_store = store
        self._prefix_store: dist.PrefixStore | None = None
        if len(names) > 1:
            assert store is not None, "several processes need a store"
            self._prefix_store = dist.PrefixStore(f"barrier/{title}", store)
        self._rank = rank
        self._names = names
        self._group_ranks = group_ranks
        self._rounds = 0
        self._alive_checked_at = 0.0
        self._beats: dict[int, tuple[bytes, float]] = {}  # rank -> its last heartbeat, and when it was first seen
        self._exited = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> StoreBarrier:
        if self._prefix_store is not None:
            self._heartbeat.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._prefix_store is None:
            return
        self._exited.set()
        self._heartbeat.join()
        if error is not None:
            with suppress(dist.DistError):  # the store is gone, and with it the processes that would read this
                self._report(error)

    @property
    def _store(self) -> dist.PrefixStore:
        """The store of a barrier for several processes."""
        assert self._prefix_store is not None, "a single process waits for nobody"
        return self._prefix_store

    def wait_all(self) -> None:
        """Waits until every process has called this as often as this one. See the table above for errors."""
        if self._prefix_store is None:
            return
        self._rounds += 1
        key = f"arrived/{self._rounds}"
        world_size = len(self._names)
        watched = (self._rank + 1) % world_size  # each process watches one other: one notices a death, and fails
        with self._contact(watched):
            self._store.add(key, 1)
            self._poll(lambda: self._store.add(key, 0) >= world_size, watched)

    def set(self, key: str) -> None:
        """Ends the `wait` of other processes for ``key``."""
        if self._prefix_store is not None:
            self._store.set(f"key/{key}", "")

    def wait(self, key: str, rank: int) -> None:
        """Waits until a process has `set` ``key``. Watches process ``rank`` meanwhile. Raises as `wait_all` does."""
        with self._contact(rank):
            self._poll(lambda: self._store.check([f"key/{key}"]), rank)

    def check(self) -> None:
        """Raises as `wait_all` does if another process has failed."""
        if self._prefix_store is not None and self._store.check(["failed"]):
            self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        """Reads why another process failed, acknowledges it (`_wait_for_readers`), and raises."""
        message = self._store.get("failed").decode()
        stop_code = self._value("stopped")
        self._store.add("readers", 1)
        if stop_code:
            raise Stopped(int(stop_code))
        raise PeerFailure(message)

    def _beat(self) -> None:
        """Changes the value of a key every second until the context is exited."""
        with suppress(dist.DistError):
            for count in itertools.count():
                self._store.set(f"{self._rank}/beat", str(count))
                if self._exited.wait(HEARTBEAT_S):
                    return

    def _report(self, error: BaseException) -> None:
        """Makes the other processes raise where they wait."""
        is_peer_failure = isinstance(error, PeerFailure)
        if is_peer_failure and self._store.check(["failed"]):
            return  # the failed process has already reported
        reason = str(error) if isinstance(error, ExplainedError) else f"{type(error).__name__}: {error}"
        if isinstance(error, Stopped):
            self._store.set("stopped", str(error.code))
        self._store.set("failed", f"{self._names[self._rank]} failed: {reason}")
        if not is_peer_failure:
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Waits briefly until the others have read why this process failed, or have failed themselves."""
        readers = self._store.add("readers", 1)
        deadline = time.monotonic() + _LINGER_S
        while readers < len(self._names) and time.monotonic() < deadline:
            time.sleep(0.05)
            readers = self._store.add("readers", 0)

    @contextmanager
    def _contact(self, rank: int) -> Iterator[None]:
        """Converts errors of an unreachable store while this process waits for ``rank`` to PeerLost."""
        try:
            yield
        except dist.DistError as error:
            raise PeerLost(f"lost contact while waiting for {self._names[rank]}: {first_line(error)}") from None

    def _poll(self, is_done: Callable[[], bool], watched: int) -> None:
        pause_s = 0.001
        max_pause_s = 0.05 * max(1.0, len(self._names) / 32)  # bounds the store's load when there are many processes
        while not is_done():
            self.check()
            self._check_alive(watched)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max_pause_s)

    def _check_alive(self, rank: int) -> None:
        """Raises PeerLost if the process has died, or has sent no heartbeat for `LOST_AFTER_S`."""
        now = time.monotonic()
        if now - self._alive_checked_at < _CHECK_ALIVE_EVERY_S:
            return
        self._alive_checked_at = now
        name = self._names[rank]
        assert self._group_store is not None, "a single process watches nobody"
        process = self._group_store.get(process_key(self._group_ranks[rank])).decode()
        if has_died(process):
            self.check()  # it may have reported why
            raise PeerLost(
                f"{name} (process {process.split()[0]}) died while the others waited for it; is there enough memory?"
            )
        beat = self._value(f"{rank}/beat")
        last_beat, seen_at = self._beats.setdefault(rank, (beat, now))
        if beat != last_beat:
            self._beats[rank] = (beat, now)
        elif beat and now - seen_at > LOST_AFTER_S:
            raise PeerLost(f"{name} has sent no heartbeat for {LOST_AFTER_S:.0f} s")

    def _value(self, key: str) -> bytes:
        """Returns the value of a key of the store, or b"" if it has not been set."""
        return self._store.get(key) if self._store.check([key]) else b""
