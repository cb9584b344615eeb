"""Processes that wait for each other on the run's store for as long as it takes, in no collective.

A collective gives up after the process group's timeout, however good the reason why one process is late. Where work
between collectives may take long (scanning a data set, reading a slow file system), the processes meet here and enter
the next collective once all are ready for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from utils.distributed.heartbeat import LOST_AFTER_S, has_died, signs_of_life
from utils.errors import PeerFailure, Stopped, UserError

LOST_KEY = "lost"  # in the run's store: which process is known to have died
_LOOK_EVERY_S = 0.5
_LINGER_S, _LINGER_FOR_FEW_S = 5.0, 1.0


class Meeting:
    """A context that ``len(names)`` processes enter, inside which they wait for each other.

    One that raises inside makes the others' waiting raise PeerFailure with its message (or `Stopped`, if that is what
    it was); one that dies or falls silent, UserError. A meeting of one waits for nobody and needs no store.
    """

    def __init__(self, store: dist.Store | None, title: str, *, own: int, names: Sequence[str]) -> None:
        """
        Args:
            store: of the run.
            title: of this meeting, the same in all its processes and used once in a run.
            own: this process's place in ``names``.
            names: of the processes, for messages.
        """
        self._own = own
        self._names = names
        self._rounds = 0
        self._run_store = store
        self._store = None
        if len(names) > 1:
            assert store is not None
            self._store = dist.PrefixStore(f"meeting/{title}", store)
        self._looked_at = 0.0
        self._beats: dict[int, tuple[bytes, float]] = {}

    def __enter__(self) -> Meeting:
        if self._store is not None:
            self._signs = signs_of_life(self._store, str(self._own))
            self._signs.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._store is None:
            return
        self._signs.__exit__(None, None, None)
        if error is not None:
            try:
                self._announce(error)
            except dist.DistError:  # the store is gone, and with it whoever would read this
                pass

    def _announce(self, error: BaseException) -> None:
        assert self._store is not None
        if isinstance(error, PeerFailure) and self._store.check(["failed"]):
            return
        text = f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if isinstance(error, Stopped):
            self._store.set("stopped", str(error.code))
        self._store.set("failed", f"{self._names[self._own]} failed: {text}")
        if isinstance(error, PeerFailure):
            return
        known = self._store.add("heard", 1)  # by those who fail themselves, too
        # This process may host the store that the others read from; one that is dead never will.
        lost = self._run_store is not None and self._run_store.check([LOST_KEY])
        deadline = time.monotonic() + (_LINGER_FOR_FEW_S if lost else _LINGER_S)
        while known < len(self._names) and time.monotonic() < deadline:
            time.sleep(0.05)
            known = self._store.add("heard", 0)

    def arrive(self) -> None:
        """Returns once every process has called this as often as this one.

        Raises:
            PeerFailure: another process has failed; the message is its own.
            Stopped: another process was asked to stop.
            UserError: another process is gone.
        """
        if self._store is None:
            return
        self._rounds += 1
        key = f"arrived/{self._rounds}"
        with_all = len(self._names)
        # Each watches one other: a process that dies is noticed by one, who tells all.
        self._wait(lambda store: store.add(key, 0) >= with_all, (self._own + 1) % with_all, start=key)

    def tell(self, word: str) -> None:
        """Ends the `hear` of others."""
        if self._store is not None:
            self._store.set(f"word/{word}", "")

    def hear(self, word: str, place: int) -> None:
        """Returns once somebody has told ``word``, watching the process ``place`` meanwhile; raises as `arrive`."""
        self._wait(lambda store: store.check([f"word/{word}"]), place)

    def check(self) -> None:
        """Raises as `arrive` does if another process has failed."""
        if self._store is not None and self._store.check(["failed"]):
            text = self._store.get("failed").decode()
            self._store.add("heard", 1)
            if self._store.check(["stopped"]):
                raise Stopped(int(self._store.get("stopped")))
            raise PeerFailure(text)

    def _wait(self, is_over, place: int, *, start: str = "") -> None:
        store, pause = self._store, 0.001
        longest = 0.05 * max(1.0, len(self._names) / 32)  # bounds what many processes ask of the store
        assert store is not None
        try:
            if start:
                store.add(start, 1)
            while not is_over(store):
                self.check()
                self._look_at(place)
                time.sleep(pause)
                pause = min(2 * pause, longest)
        except dist.DistError as error:
            raise UserError(
                f"lost contact while waiting for {self._names[place]}: {str(error).splitlines()[0]}"
            ) from None

    def _look_at(self, place: int) -> None:
        assert self._store is not None
        assert self._run_store is not None
        now, name = time.monotonic(), self._names[place]
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        if self._run_store.check([LOST_KEY]):
            raise UserError(self._run_store.get(LOST_KEY).decode())
        beat = self._store.get(f"{place}/beat") if self._store.check([f"{place}/beat"]) else b""
        last, since = self._beats.setdefault(place, (beat, now))
        text = ""
        if beat != last:
            self._beats[place] = beat, now
        elif beat and now - since > LOST_AFTER_S:
            text = f"{name} has given no sign for {LOST_AFTER_S:.0f} s"
        if self._store.check([f"{place}/process"]):
            process = self._store.get(f"{place}/process").decode()
            if has_died(process):
                self.check()
                text = f"{name} (process {process.split()[0]}) died while the others waited for it; enough memory?"
        if text:
            self._run_store.set(LOST_KEY, text)
            raise UserError(text)
