"""A thread that ends a process which cannot end itself, and writes the stacks of one that no longer takes steps."""

from __future__ import annotations

import datetime
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from utils.distributed.context import DistributedContext, all_objects
from utils.errors import Stopped
from utils.files.safe_io import open_direct
from utils.logger import get_logger
from utils.process.exit_codes import USER_ERROR
from utils.process.identity import has_died, this_process
from utils.process.stop_signals import StopSignals
from utils.program import resume_flag

CHECK_EVERY_S = 0.5
PEER_DEAD_S = 3.0  # time without a step after another process of this machine has ended; gloo itself notices sooner
STALL_S = 600.0  # time without a step after which stacks are written
STOP_TIMEOUT_S = 25.0  # time without a step after a signal: batch systems give 30 s before they kill
STOP_TIMEOUT_BEFORE_TRAINING_S = 4.0  # shorter before training starts, when there is nothing to save


class Watchdog:
    """Watches this process from `__enter__` until `training` is done or stopped by a signal; after an error in it,
    until `__exit__`, because cleaning up may hang as well.

    - If another process of this machine has died and no step has ended since, the main thread may be stuck in a
      collective that will never end. This process is ended, once a checkpoint that is being written is complete.
    - If a signal has arrived and no step has ended since, this process is ended likewise; sooner before training
      starts.
    - If torchrun itself has died, nobody would stop this process, so it sends itself SIGTERM.
    - While `training`, if there is no step or validation batch (`beat`) for some time, every rank writes the stacks of
      all threads to ``stall_rankN.txt``, once per stall.
    """

    def __init__(self, signals: StopSignals) -> None:
        self.signals = signals
        self._ctx: DistributedContext | None = None
        self._stall_s = 0.0  # seconds without a step, after which stacks are written; 0: never
        self._folder = Path()
        self._beat_at = time.monotonic()
        self._stop_timeout_s = STOP_TIMEOUT_BEFORE_TRAINING_S
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._peers: dict[int, str] = {}  # processes by rank, as `has_died` takes them
        self._parent = os.getppid()
        self._reported_beat = -1.0  # the beat after which a stall was reported
        self._signal_at: float | None = None
        self._dead_peer: int | None = None
        self._peer_died_at = 0.0
        self._is_writing: Callable[[], bool] = lambda: False

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
    def training(self, folder: Path, is_writing: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Expects a beat every `STALL_S` seconds within the block; stacks go to ``folder``. Watching stops after it, as
        processes may end one by one. The process is not ended while ``is_writing``: a checkpoint would be lost."""
        self.beat()
        self._is_writing = is_writing
        self._folder = folder
        self._stall_s = STALL_S
        self._stop_timeout_s = STOP_TIMEOUT_S
        try:
            yield
        except Stopped:
            self._closed.set()
            raise
        except BaseException:
            self.beat()  # cleaning up, such as removing the run's folder, may take as long as a step
            raise
        self._closed.set()

    def remove_stop_limit(self) -> None:
        """Removes the time limit after a signal: the ranks have agreed to stop, and are writing the checkpoint, or the
        last step is done."""
        self._stop_timeout_s = math.inf

    def _watch(self) -> None:
        """Runs the checks that the class lists, in the thread, until closed."""
        while not self._closed.wait(CHECK_EVERY_S):
            now = time.monotonic()
            self._report_stall(now)
            self._record_signal(now)
            self._follow_launcher()
            if not self._is_writing():
                self._end_after_signal(now)
                self._end_after_peer(now)

    def _report_stall(self, now: float) -> None:
        """Writes the stacks if no step has ended for `STALL_S`, once per stall."""
        beat = self._beat_at
        if self._stall_s and now - beat > self._stall_s and beat != self._reported_beat:
            self._reported_beat = beat
            self._write_stacks(now - beat)

    def _record_signal(self, now: float) -> None:
        """Records when the first signal arrived."""
        if self.signals.drain() and self._signal_at is None:
            self._signal_at = now

    def _follow_launcher(self) -> None:
        """Sends this process SIGTERM if torchrun, which would have sent it, is gone and no signal has arrived yet."""
        has_launcher = self._ctx is not None and bool(self._ctx.launcher_identity)
        if has_launcher and os.getppid() != self._parent and self._signal_at is None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _end_after_signal(self, now: float) -> None:
        """Ends the process if a signal has arrived and no step has ended since."""
        if self._signal_at is None or now - max(self._signal_at, self._beat_at) <= self._stop_timeout_s:
            return
        reason = ""
        if self._stop_timeout_s == STOP_TIMEOUT_S:  # in training
            last = self._folder / "last.pt"
            checkpoint = f"; continue with: {resume_flag(last)}" if last.exists() else ""
            reason = f"stopped by a signal, but the step does not end; no new checkpoint{checkpoint}"
        self._end(reason, self.signals.code)

    def _end_after_peer(self, now: float) -> None:
        """Ends the process if another one of this machine has died and no step has ended since."""
        if self._dead_peer is None:
            dead = [rank for rank, process in self._peers.items() if has_died(process)]
            self._dead_peer = dead[0] if dead else None
            self._peer_died_at = now
        if self._dead_peer is not None and now - max(self._peer_died_at, self._beat_at) > PEER_DEAD_S:
            self._end(f"process {self._dead_peer} of {len(self._peers) + 1} has died; this one ends, too", USER_ERROR)

    def _write_stacks(self, silent_s: float) -> None:
        """Appends the stacks of all threads to this rank's file. ``silent_s``: seconds without a step."""
        rank = self._ctx.rank if self._ctx is not None else 0
        title = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} rank {rank}: no step for {silent_s:.1f} s\n"
        path = self._folder / f"stall_rank{rank}.txt"
        with suppress(OSError), open(path, "a", encoding="utf-8", opener=open_direct) as file:
            file.write(title)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        get_logger().warning("rank %d: no step for %.1f s; its stacks are in %s", rank, silent_s, path)

    def _end(self, reason: str, code: int) -> None:
        """Ends the process at once, without cleaning up.

        ``reason`` is printed and never written to the result file (utils/process/result_file.py): the exit code of a
        signal needs no explanation, and the death of a peer is explained there by the peer or by its launcher, for
        which an exit code of 2 without an error means just that (`RunResult.failed_because_of_peer`).
        """
        if reason:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(code)
