"""Processes that wait for each other on the store for as long as it takes, in no collective.

A collective gives up after the process group's timeout, however good the reason why one process is late. Where work
between collectives may take long (reading a slow file system), the processes meet here first and enter the collective
once all are ready for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from utils.distributed import LOST_KEY, DistributedContext
from utils.errors import PeerFailure, UserError
from utils.liveness import LOST_AFTER_S, has_died, signs_of_life

_LOOK_EVERY_S = 0.5
_LINGER_S = 5.0


class Meeting:
    """A context that ``len(names)`` processes enter; inside, `arrive` waits for all of them.

    One that raises inside makes the others' `arrive` raise PeerFailure with its message; one that dies or falls silent,
    UserError. A meeting of one waits for nobody and needs no store.
    """

    def __init__(self, ctx: DistributedContext, title: str, *, own: int, names: Sequence[str]) -> None:
        """
        Args:
            ctx: of the run.
            title: of this meeting, the same in all processes and used once in a run.
            own: this process's place in ``names``.
            names: of the processes, for messages.
        """
        self._own = own
        self._names = names
        self._rounds = 0
        self._run_store = ctx.store
        self._store = None
        if len(names) > 1:
            assert ctx.store is not None
            self._store = dist.PrefixStore(f"meeting/{title}", ctx.store)
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
        if error is None or isinstance(error, PeerFailure):
            return
        text = f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        try:
            self._store.set("failed", f"{self._own} {text}")
            deadline = time.monotonic() + _LINGER_S  # this process may host the store that the others read from
            known = self._store.add("heard", 1)  # by those who fail themselves, too
            while known < len(self._names) and time.monotonic() < deadline:
                time.sleep(0.05)
                known = self._store.add("heard", 0)
        except dist.DistError:
            pass

    def arrive(self) -> None:
        """Returns once every process has called this as often as this one.

        Raises:
            PeerFailure: another process has failed; the message is its own.
            UserError: another process is gone.
        """
        if self._store is None:
            return
        self._rounds += 1
        key, pause = f"arrived/{self._rounds}", 0.001
        try:
            there = self._store.add(key, 1)
            while there < len(self._names):
                self._look_around()
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                there = self._store.add(key, 0)
        except dist.DistError as error:
            raise UserError(f"lost contact with the other nodes: {str(error).splitlines()[0]}") from None

    def check(self) -> None:
        """Raises as `arrive` does if another process has failed."""
        if self._store is not None and self._store.check(["failed"]):
            place, _, text = self._store.get("failed").decode().partition(" ")
            self._store.add("heard", 1)
            raise PeerFailure(f"{self._names[int(place)]} failed: {text}")

    def _look_around(self) -> None:
        assert self._store is not None
        assert self._run_store is not None
        self.check()
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        if self._run_store.check([LOST_KEY]):
            raise UserError(self._run_store.get(LOST_KEY).decode())
        for place, name in enumerate(self._names):
            if place == self._own:
                continue
            beat = self._store.get(f"{place}/beat") if self._store.check([f"{place}/beat"]) else b""
            last, since = self._beats.setdefault(place, (beat, now))
            if beat != last:
                self._beats[place] = beat, now
            elif beat and now - since > LOST_AFTER_S:
                raise UserError(f"{name} has given no sign for {LOST_AFTER_S:.0f} s")
            process = f"{place}/process"
            if self._store.check([process]) and has_died(self._store.get(process).decode()):
                self.check()
                raise UserError(f"{name} died while the others waited for it; enough memory?")
