"""``--spawn N``: starts several processes on this machine, as torch.multiprocessing.spawn does. The parent does not
import torch, which takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from utils.errors import BUG, LOST_PEER, USER_ERROR, PeerFailure, PeerLost, Stopped, UserError
from utils.logger import early_lines, log_when_configured
from utils.machine.limits import require_posix
from utils.process.child import result_variables
from utils.process.launch import STORE_PREFIX, torchrun_variables
from utils.process.main import run_main
from utils.process.signals import STOP_SIGNALS, StopSignals, end_with_parent, exit_on_interrupt, killed_by, stop_code

GRACE_S = 30.0  # how long the others may take to end after one has, before they are killed
POLL_S = 0.2


def spawn(function: Callable[..., object], processes: int, args: Sequence[Any] = ()) -> None:
    """Runs ``function(*args)`` in ``processes`` processes of this machine, with torchrun's variables. Each uses
    `run_main`, which reports its error. Signals to stop are forwarded. When a process fails, the others are ended.

    The processes import the module of ``function``, and not the main module: a user's script needs no
    ``if __name__ == "__main__"``.

    Raises Stopped if a signal stopped a process, PeerFailure if one failed and said why, PeerLost if it was killed, and
    UserError in a process that may not start others.
    """
    require_posix("--spawn")
    if is_daemonic():
        raise UserError(f"--spawn {processes}: a daemonic process, as of multiprocessing.Pool, may not start others")
    context = multiprocessing.get_context("spawn")
    port = free_port()
    run_variables = {STORE_PREFIX: secrets.token_hex(16)} | result_variables()
    ranks: list[BaseProcess] = []
    for rank in range(processes):
        variables = torchrun_variables(rank, processes, port) | run_variables
        ranks.append(context.Process(target=_run_rank, args=(variables, early_lines(), function, tuple(args))))

    def kill() -> None:  # a process that waits for another one cannot handle a second signal
        for process in _started(ranks):
            process.kill()

    resource_tracker.ensure_running()  # otherwise the first process would start it, which unblocks signals
    with StopSignals(before_end=kill) as signals, signals.deferred():
        try:
            with contextlib.nullcontext() if function.__module__ == "__main__" else _without_main_module():
                # Inherited: a process gets its signals once it can end without a traceback.
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
                for process in ranks:
                    process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            failed = _first_failure(ranks, signals)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            _end(_started(ranks), stop=not signals.received)
    if failed is not None:
        raise _failure(f"process {failed} of {processes}", ranks[failed].exitcode or 0)


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hides the main module during the block, in which processes start: multiprocessing would import it in each."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


def _first_failure(ranks: Sequence[BaseProcess], signals: StopSignals) -> int | None:
    """Waits for the processes, and forwards a signal to them. Returns the rank of the first one that fails, or None."""
    running = dict(enumerate(ranks))
    is_forwarded = False
    while running:
        connection.wait([process.sentinel for process in running.values()], timeout=POLL_S)
        if signals.received and not is_forwarded:
            is_forwarded = True
            for process in running.values():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signals.number)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode:
                    return rank
    return None


def _started(ranks: Sequence[BaseProcess]) -> list[BaseProcess]:
    return [process for process in ranks if process.pid is not None]


def _end(ranks: Sequence[BaseProcess], *, stop: bool) -> None:
    """Waits `GRACE_S` for the processes to end, after SIGTERM if ``stop``; kills those that have not."""
    for process in ranks:
        if stop and process.is_alive():
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()


def _failure(name: str, code: int) -> BaseException:
    """Returns the error to raise for the process ``name``, which has ended with exit status ``code``, not 0."""
    if stop_code(code):
        return Stopped(stop_code(code))
    if code < 0:  # it could not print anything itself
        return PeerLost(f"{name} was {killed_by(-code)}")
    if code == LOST_PEER:  # no other has ended in `PEER_GRACE_S`
        return PeerLost(f"{name} lost its connection to another one, which has not failed; NCCL_DEBUG=INFO prints more")
    if code in (BUG, USER_ERROR):
        return PeerFailure(f"{name} failed", code)
    return UserError(f"{name} ended with status {code}; did a callback or a library exit?")


def _run_rank(variables: Mapping[str, str], lines: Sequence[str], function: Callable[..., object], args: tuple) -> None:
    """Runs ``function(*args)`` with these environment variables, and exits as `run_main` does. ``lines``: see
    `log_when_configured`."""
    exit_on_interrupt()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent()()
    os.environ |= variables
    log_when_configured(*lines)
    # Otherwise a spawned process would also spawn its loader workers, each of which would import torch again.
    multiprocessing.set_start_method(None, force=True)

    def main(_: object) -> None:
        function(*args)

    run_main(main)
    sys.exit(0)


def free_port() -> int:
    """Finds a free TCP port, preferably below Linux's ephemeral ports, which another connection could take first."""
    generator = random.SystemRandom()  # not seeded: runs that start at the same time need different ports
    candidates = [generator.randrange(20_000, 32_000) for _ in range(20)]
    for port in [*candidates, 0]:  # 0: any
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise UserError("no TCP port of this machine is free")


def is_daemonic() -> bool:
    """Returns whether this process, such as one of multiprocessing.Pool, may not start others."""
    return multiprocessing.current_process().daemon
