"""How all ranks save or stop after the same step; what the host reads of a step, one step late, so that it never waits
for the device; and a thread that writes the stacks of a hanging run, and ends a process that cannot end itself."""

from __future__ import annotations

import datetime
import enum
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from utils.distributed.context import DistributedContext, all_objects, max_over_ranks
from utils.distributed.store_barrier import has_died, this_process
from utils.errors import INTERRUPTED, REQUEUE, PeerFailure, Stopped, UserError
from utils.files.safe_io import open_direct
from utils.machine import decoder_warnings
from utils.machine.stop_signals import StopSignals
from utils.program import resume_flag

log = logging.getLogger("lockstep")

STOP_KEY = "stop"  # in the run's store: a rank got a signal to stop while validating
POLL_EVERY_S = 1.0
CHECK_EVERY_S = 0.5
PEER_DEAD_S = 3.0  # without a step after another process of this machine has ended; gloo itself notices sooner
STALL_S = 600.0  # without a step, after which stacks are written
STOP_TIMEOUT_S = 25.0  # without a step after a signal: batch systems give 30 s before they kill
STOP_TIMEOUT_BEFORE_TRAINING_S = 4.0  # the same before training starts, when there is nothing to save
PEER_LOST = 2


class Action(enum.IntEnum):
    """What all ranks do next. Of several, the greatest counts."""

    CONTINUE = 0
    SAVE = 1
    END = 2  # take no more steps: the run is done
    STOP = 3  # save and take no more steps: a resumed run continues


class StepFlags(NamedTuple):
    """Requests of any rank to all ranks. They are reduced together with the sums of a step, so they cost nothing and
    all ranks read them after the same step."""

    save: bool = False
    stop: bool = False  # SIGTERM or SIGUSR1
    interrupt: bool = False  # SIGINT

    def __or__(self, other: StepFlags) -> StepFlags:
        return StepFlags(*(a or b for a, b in zip(self, other)))

    def counted(self, like: Tensor) -> Tensor:
        """A 1 for each flag that is set and a 0 for the others (F,), made on the device without a host sync."""
        values = like.new_zeros(len(self))
        for number, is_set in enumerate(self):
            if is_set:
                values[number].fill_(1)
        return values


@dataclass(frozen=True, slots=True)
class StepValues:
    """The results of one step, on the host."""

    finite: bool  # gradients of the global batch; False: the step was skipped
    local_finite: bool  # this rank's own loss
    grad_norm: float  # before clipping
    losses: tuple[float, ...]  # the criterion's parts over the global batch, normalized
    paths: tuple[str, ...]  # images of this rank's shard
    flags: StepFlags  # of all ranks, when the step began


NO_FLAGS = StepFlags()


class DelayedReader:
    """Reads device values one step late: the copy to the host runs while the next step is queued."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._pending: deque = deque()

    def push(self, scalars: Sequence[Tensor], losses: Tensor, paths: tuple[str, ...], flags: Tensor) -> None:
        """On the device: finite, local_finite and grad_norm, losses (P,) and flags (F,) of `StepValues`."""
        first = torch.stack(tuple(scalars))
        values = torch.cat([first, flags.to(first), losses.to(first)])
        if self._asynchronous:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning
            event.record()
        else:
            host, event = values, None
        self._pending.append((host, event, paths))

    def pop(self, *, leave: int = 1) -> list[StepValues]:
        """All but the newest ``leave`` steps, oldest first."""
        ready = []
        while len(self._pending) > leave:
            host, event, paths = self._pending.popleft()
            if event is not None:
                event.synchronize()
            finite, local_finite, norm, save, stop, interrupt, *losses = host.tolist()
            flags = StepFlags(save > 0, stop > 0, interrupt > 0)
            ready.append(StepValues(finite > 0, local_finite > 0, norm, tuple(losses), paths, flags))
        return ready


class Watchdog:
    """Watches this process from `__enter__` until training is over or an exception leaves the block.

    - If another process of this machine has died and no step has ended since (nor an error begun), the main thread may
      be stuck in a collective that will never end, so this process is ended.
    - If a signal has arrived and no step has ended since, likewise; before training starts, after a shorter time.
    - If torchrun itself has died, nobody would stop this process, so it sends itself SIGTERM.
    - While `training`, if there is no step or validation batch (`beat`) for some time, every rank writes the stacks of
      all threads to ``stall_rankN.txt``, once per stall.
    """

    def __init__(self, signals: StopSignals) -> None:
        self.signals = signals
        self._ctx: DistributedContext | None = None
        self._stall_s, self._folder, self._beat_at = 0.0, Path(), time.monotonic()
        self._stop_timeout_s = STOP_TIMEOUT_BEFORE_TRAINING_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._peers: dict[int, str] = {}  # by rank
        self._parent = os.getppid()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def watch_peers(self, ctx: DistributedContext) -> None:
        """Collects the process ids of the other ranks; every rank must call it."""
        local = this_process()
        self._peers = {rank: process for rank, process in enumerate(all_objects(ctx, local)) if process != local}
        self._ctx = ctx

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def beat(self) -> None:
        """Records that a step has ended."""
        self._beat_at = time.monotonic()

    @contextmanager
    def training(self, folder: Path) -> Iterator[None]:
        """Around the training: a beat is expected every `STALL_S` seconds; stacks go to ``folder``. Watching stops
        after it, as processes may end one by one."""
        self.beat()
        self._folder, self._stall_s, self._stop_timeout_s = folder, STALL_S, STOP_TIMEOUT_S
        try:
            yield
        except Stopped:
            self._closed.set()
            raise
        except BaseException:
            self.beat()  # cleaning up, such as removing the run's folder, may take as long as a step
            raise
        self._closed.set()

    def stop_agreed(self) -> None:
        """The ranks have agreed to stop and now write the checkpoint, which may take as long as it needs."""
        self._stop_timeout_s = math.inf

    def _watch(self) -> None:
        written_for = -1.0  # the beat after which a stall was written
        signal_at: float | None = None
        peer_died_at: float | None = None
        while not self._closed.wait(CHECK_EVERY_S):
            now, beat = time.monotonic(), self._beat_at
            if self._stall_s and now - beat > self._stall_s and beat != written_for:
                written_for = beat
                self._write_stacks(now - beat)
            if self.signals.has_come() and signal_at is None:
                signal_at = now
            if peer_died_at is None:
                dead = next((rank for rank, process in self._peers.items() if has_died(process)), None)
                peer_died_at = None if dead is None else now
            if signal_at is None and self._ctx is not None and self._ctx.launcher and os.getppid() != self._parent:
                os.kill(os.getpid(), signal.SIGTERM)
            if signal_at is not None and now - max(signal_at, beat) > self._stop_timeout_s:
                line = "a stop was requested, but no step ends; no new checkpoint"
                self._end(line if self._stop_timeout_s == STOP_TIMEOUT_S else "", self.signals.code)
            if peer_died_at is not None and now - max(peer_died_at, beat) > PEER_DEAD_S:
                self._end(f"process {dead} of {len(self._peers) + 1} has ended", PEER_LOST)

    def _write_stacks(self, silent_s: float) -> None:
        rank = self._ctx.rank if self._ctx is not None else 0
        title = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} rank {rank}: no step for {silent_s:.1f} s\n"
        path = self._folder / f"stall_rank{rank}.txt"
        with suppress(OSError), open(path, "a", encoding="utf-8", opener=open_direct) as file:
            file.write(title)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        log.warning("rank %d: no step for %.1f s; its stacks are in %s", rank, silent_s, path)

    def _end(self, reason: str, code: int) -> None:
        if reason:
            print(f"error: {reason}; ended", file=sys.stderr, flush=True)
        decoder_warnings.pass_on()
        os._exit(code)


class RunControl:
    """Turns signals and requests of single ranks into actions that all ranks take alike. Every rank has one and makes
    the same calls. ``watchdog`` is entered.

    Requests travel with the sums of a step (`StepFlags`); during validation, when ranks do not communicate, by a key in
    the run's store.
    """

    def __init__(self, ctx: DistributedContext, watchdog: Watchdog) -> None:
        self.is_stopped = False  # whether the ranks have agreed to stop
        self.exit_code = 0  # of the signal that stopped them; 0: none did
        self._ctx, self._watchdog, self._signals = ctx, watchdog, watchdog.signals
        self._wants_save = self._wants_stop = False  # requests of this rank
        self._failure = ""
        self._polled_at, self._validation_stopped = 0.0, False

    @contextmanager
    def training(self, folder: Path) -> Iterator[None]:
        """Around the training: signals are only noted, and the watchdog expects steps."""
        with self._signals.deferred(), self._watchdog.training(folder):
            yield

    def request(self, action: Action) -> None:
        """Makes all ranks save once, or stop, after the same step."""
        self._wants_save |= action is Action.SAVE
        self._wants_stop |= action is Action.STOP

    def fail(self, line: str) -> None:
        """Stops the run, which then ends with this error (`finish`)."""
        self._failure, self._wants_stop = line, True

    def flags(self) -> StepFlags:
        """What this rank requests with the step that begins."""
        save, self._wants_save = self._wants_save, False
        return StepFlags(save, self._signals.stop or self._wants_stop, self._signals.interrupt)

    def after_step(self, flags: StepFlags, action: Action, read_newest: Callable[[], StepFlags]) -> Action:
        """What to do after a step, with the flags and the action of all ranks. ``read_newest``: reads the flags of the
        steps that have not been read yet, before a save."""
        self._watchdog.beat()
        if not any(flags) and action is Action.CONTINUE:
            return action
        flags |= read_newest()
        if flags.interrupt:
            return self._stop(INTERRUPTED)
        if flags.stop:  # by a signal to any rank, or else by a request
            return self._stop(max_over_ranks(self._ctx, REQUEUE if self._signals.stop else 0))
        return max(action, Action.SAVE)

    def agree(self) -> Action:
        """At the start and after an epoch: `Action.STOP` if any rank has requested it."""
        return self._stop(0) if max_over_ranks(self._ctx, int(self._wants_stop)) else Action.CONTINUE

    def stops_validation(self) -> bool:
        """Whether a signal has reached this rank or, as of the last poll, another; before each batch of validation."""
        self._watchdog.beat()
        local, store, now = self._signals.stop or self._signals.interrupt, self._ctx.store, time.monotonic()
        if store is not None and local:
            store.set(STOP_KEY, "")
        elif store is not None and now - self._polled_at >= POLL_EVERY_S:
            self._polled_at = now
            local = store.check([STOP_KEY])
        self._validation_stopped = local
        return local

    def after_validation(self) -> Action:
        code = max_over_ranks(self._ctx, self._signals.code if self._validation_stopped else 0)
        return self._stop(code) if code else Action.CONTINUE

    def finish(self, where: str, last: Path) -> None:
        """After the last step, with how far the run has come, in words, and the checkpoint to resume from. Returns if
        all epochs are done, or if a request has stopped the run.

        Raises Stopped if a signal to any rank has stopped it, and UserError if a hook has failed; on the other ranks
        `PeerFailure`.
        """
        has_failed = max_over_ranks(self._ctx, int(bool(self._failure)))
        if self.exit_code:
            log.info("stopped by a signal after %s; continue with: %s", where, resume_flag(last))
            raise Stopped(self.exit_code)
        if has_failed:
            raise UserError(self._failure) if self._failure else PeerFailure("a callback failed on another rank")
        if self.is_stopped:
            log.info("ended by a callback after %s; continue with: %s", where, resume_flag(last))

    def _stop(self, exit_code: int) -> Action:
        self.exit_code, self.is_stopped = exit_code, True
        self._watchdog.stop_agreed()
        return Action.STOP
