"""Starts several processes on this machine (``--spawn N``). The parent does not import torch, which takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from utils.errors import PeerFailure, PeerLost, Stopped, UserError
from utils.machine.limits import Cause
from utils.process.child_signals import cause_of_signal, end_with_parent, killed_by
from utils.process.entrypoint import run_main
from utils.process.exit_codes import BUG, CHECK_FAILED, INTERRUPTED, PIPE_CLOSED, REQUEUE, USER_ERROR
from utils.process.interrupts import exit_on_interrupt
from utils.process.launch import torchrun_variables
from utils.process.ports import free_port
from utils.process.result_file import result_variables
from utils.process.stop_signals import stop_signals

SIGNAL_GRACE_S = 60.0  # how long `spawn` waits for the other processes after a stop signal
FAILURE_GRACE_S = 4.0  # how long it waits for them after one has failed
_RETURNED = 99  # exit status of a process whose function returned; 0 means that a library or a callback exited
_STOPPED = (REQUEUE, INTERRUPTED)  # exit codes of processes stopped by a signal
_WITH_MESSAGE = (CHECK_FAILED, USER_ERROR, BUG, PIPE_CLOSED)  # exit codes of processes that have reported why


def spawn(
    function: Callable[..., object],
    processes: int,
    args: Sequence[Any] = (),
    *,
    optional: int = 0,
    stop_code: int | None = None,
) -> None:
    """Runs ``function(*args)`` in ``processes`` processes of this machine, with torchrun's variables if there are
    several. Each process uses `run_main`, which reports errors.

    Stop signals are forwarded. If a process fails, the others are stopped.

    Args:
        optional: the others go on if one of the last ``optional`` processes is killed, or exits with status 0.
        stop_code: code of `Stopped` if SIGTERM or SIGUSR1 ends a process that does not handle it; None: as in a shell.

    Raises PeerFailure if a process failed and reported why, Stopped if a signal stopped one, PeerLost if one was
    killed, and UserError if one crashed or exited on its own.
    """
    with _Group(function, processes, args) as group:
        group.start()
        failed = group.wait(optional)
        signals = list(group.signals)  # without those that come while the others are stopped
    if failed is not None:
        raise _error_of(failed, group.exit_codes(), signals, stop_code)


class _Group:
    """The processes that `spawn` starts. Stop signals are forwarded to them during the block. At its end, processes
    that are still running are stopped."""

    def __init__(self, function: Callable[..., object], processes: int, args: Sequence[Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = [
            context.Process(target=_run_process, args=(variables, function, tuple(args)))
            for variables in _variables_by_rank(processes)
        ]
        self._previous_handlers: dict[int, Any] = {}
        self.signals: list[int] = []  # forwarded signals, in order

    def __enter__(self) -> _Group:
        for number in stop_signals():
            self._previous_handlers[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(SIGNAL_GRACE_S if self.signals else FAILURE_GRACE_S)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def start(self) -> None:
        resource_tracker.ensure_running()  # otherwise the first process would start it, which unblocks signals
        with _blocked(stop_signals()):  # a signal waits until all processes exist, and then reaches each of them
            for process in self._processes:
                process.start()

    def wait(self, optional: int) -> int | None:
        """Waits until all processes have succeeded or one has failed. Returns the rank of the failed process, or None.
        ``optional``: see `spawn`."""
        running = dict(enumerate(self._processes))
        while running:
            connection.wait([process.sentinel for process in running.values()], timeout=1)
            for rank, process in list(running.items()):
                if process.is_alive():
                    continue
                is_optional = rank >= len(self._processes) - optional
                is_excused = is_optional and (process.exitcode or 0) <= 0
                if process.exitcode != _RETURNED and not is_excused:
                    return rank
                del running[rank]
        return None

    def exit_codes(self) -> list[int]:
        """Returns the exit status of each process, by rank, after all have been stopped."""
        return [process.exitcode or 0 for process in self._processes]

    def _forward(self, number: int, _: object) -> None:
        self.signals.append(number)
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _stop(self, timeout_s: float) -> None:
        """Stops running processes. They have ``timeout_s`` to exit on their own, and as long again after SIGTERM."""
        started = [process for process in self._processes if process.pid is not None]
        _join(started, timeout_s)
        for process in started:
            if process.is_alive():
                process.terminate()
        _join(started, timeout_s)
        for process in started:
            if process.is_alive():
                process.kill()
            process.join()


@contextlib.contextmanager
def _blocked(signals: Sequence[int]) -> Iterator[None]:
    """Blocks signals until the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _join(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Waits until the processes have exited, for at most ``timeout_s`` in total."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


def _error_of(rank: int, codes: Sequence[int], signals: Sequence[int], stop_code: int | None) -> BaseException:
    """Returns the error that `spawn` raises after process ``rank`` failed.

    | signals before the failure | processes | error |
    | --- | --- | --- |
    | yes | one stopped because of a signal | `Stopped` with its code |
    | yes | one was ended by the signal, or killed for not ending | `Stopped` with `_code_of_unhandled` |
    | yes | all that failed reported why | as without a signal, which is not the reason |
    | no | ``rank`` failed | `failure_of` |

    Args:
        codes: exit statuses of all processes, by rank.
        signals: signals received before the failure, in order.
        stop_code: see `spawn`.
    """
    stopped = [code for code in codes if code in _STOPPED]
    has_unhandled = any(code not in (_RETURNED, *_STOPPED, *_WITH_MESSAGE) for code in codes)
    if signals and stopped:
        return Stopped(stopped[0])
    if signals and has_unhandled:
        return Stopped(_code_of_unhandled(signals, stop_code))
    return failure_of(codes[rank], f"process {rank} of {len(codes)}")


def _code_of_unhandled(signals: Sequence[int], stop_code: int | None) -> int:
    """Returns the exit code after ``signals`` that a process did not handle: ``stop_code`` unless Ctrl-C is among them,
    else as in a shell."""
    if stop_code and signal.SIGINT not in signals:
        return stop_code
    return 128 + signals[0]


def failure_of(code: int, name: str) -> BaseException:
    """Returns the error for a process that ended with exit status ``code``. ``name`` is its name in messages."""
    if code in _STOPPED:
        return Stopped(code)
    if code in _WITH_MESSAGE:
        return PeerFailure(f"{name} failed", code)
    if code >= 0:
        return UserError(f"{name} ended with status {code} without a message; did a callback or a library exit?")
    message = f"{name} was {killed_by(-code)}"  # it could not print anything itself
    return UserError(message) if cause_of_signal(-code) == Cause.COMMAND else PeerLost(message)


def _variables_by_rank(processes: int) -> list[dict[str, str]]:
    """Returns the environment variables of each process, including torchrun's if there are several processes."""
    if processes == 1:
        return [result_variables()]
    port = free_port()
    return [torchrun_variables(rank, processes, port) | result_variables() for rank in range(processes)]


def _run_process(variables: Mapping[str, str], function: Callable[..., object], args: tuple) -> None:
    """Runs ``function(*args)`` with these environment variables. Exits with `_RETURNED`, or as `run_main` does."""
    exit_on_interrupt()
    end_with_parent()()
    os.environ |= variables
    # Otherwise a spawned process would also spawn its loader workers, each of which would import torch again.
    multiprocessing.set_start_method(None, force=True)

    def work(_: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
        function(*args)

    run_main(work)
    sys.exit(_RETURNED)
