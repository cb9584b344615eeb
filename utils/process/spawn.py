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
from utils.process.child_signals import cause_of_signal, end_with_parent, killed_by
from utils.process.entrypoint import run_main
from utils.process.exit_codes import BUG, CHECK_FAILED, INTERRUPTED, PIPE_CLOSED, REQUEUE, USER_ERROR
from utils.process.interrupts import exit_on_interrupt
from utils.process.launch import torchrun_variables
from utils.process.outcome import Cause
from utils.process.ports import free_port
from utils.process.result_file import result_variables
from utils.process.stop_signals import stop_signals

SIGNAL_GRACE_S = 60.0  # how long `spawn` waits for the other processes after a stop signal
FAILURE_GRACE_S = 4.0  # how long it waits for them after one has failed
_RETURNED = 99  # exit status of a process whose function has returned; 0: a library or a callback has exited
_STOPPED = (REQUEUE, INTERRUPTED)  # exit codes of processes that a signal has stopped
_WITH_MESSAGE = (CHECK_FAILED, USER_ERROR, BUG, PIPE_CLOSED)  # exit codes of processes that have printed why


def spawn(
    function: Callable[..., object],
    processes: int,
    args: Sequence[Any] = (),
    *,
    optional: int = 0,
    stop_code: int | None = None,
) -> None:
    """Runs ``function(*args)`` in ``processes`` processes of this machine, with the variables of torchrun if they are
    several, by `run_main`, which reports its errors.

    Stop signals are forwarded. If a process fails, the others are stopped.

    Args:
        optional: the others go on if one of the last ``optional`` processes is killed, or exits by itself.
        stop_code: of `Stopped` if SIGTERM or SIGUSR1 ends a process that does not handle it; None: as in a shell.

    Raises PeerFailure if a process failed and has printed why, Stopped if a signal stopped one, PeerLost if one was
    killed, and UserError if one has crashed or exited by itself.
    """
    with _Group(function, processes, args) as group:
        group.start()
        failed = group.wait(optional)
        signals = list(group.signals)  # without those that come while the others are stopped
    if failed is not None:
        raise _error_of(failed, group.exit_codes(), signals, stop_code)


class _Group:
    """The processes that `spawn` starts. While entered, stop signals are forwarded to them; at the end of the block,
    those that still run are stopped."""

    def __init__(self, function: Callable[..., object], processes: int, args: Sequence[Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = [
            context.Process(target=_run_process, args=(variables, function, tuple(args)))
            for variables in _variables_by_rank(processes)
        ]
        self._previous_handlers: dict[int, Any] = {}
        self.signals: list[int] = []  # that were forwarded, in order

    def __enter__(self) -> _Group:
        for number in stop_signals():
            self._previous_handlers[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(SIGNAL_GRACE_S if self.signals else FAILURE_GRACE_S)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def start(self) -> None:
        resource_tracker.ensure_running()  # it would start with the first process, and unblocks signals then
        with _blocked(stop_signals()):  # a signal waits until all processes exist, and reaches each of them
            for process in self._processes:
                process.start()

    def wait(self, optional: int) -> int | None:
        """Waits until all processes have succeeded, and returns None, or until one has failed, and returns its rank.
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
        """Returns the exit status of each process, by rank, once all have been stopped."""
        return [process.exitcode or 0 for process in self._processes]

    def _forward(self, number: int, _: object) -> None:
        self.signals.append(number)
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _stop(self, timeout_s: float) -> None:
        """Stops the processes that run. Each has ``timeout_s`` to exit by itself, and as long again after SIGTERM."""
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
    """Lets signals wait until the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _join(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Waits until the processes have exited, together at most ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


def _error_of(rank: int, codes: Sequence[int], signals: Sequence[int], stop_code: int | None) -> BaseException:
    """Returns what `spawn` raises after the process ``rank`` has failed.

    | signals came before | the processes | error |
    | --- | --- | --- |
    | yes | one has stopped, as signals make it | `Stopped` with its code |
    | yes | one was ended by the signal, or killed for not ending | `Stopped` with `_code_of_unhandled` |
    | yes | all that failed have printed why | as without a signal: it is not the reason |
    | no | ``rank`` has failed | `_failure_of` |

    Args:
        codes: exit statuses of all processes, by rank.
        signals: those that came before the failure, in order.
        stop_code: see `spawn`.
    """
    stopped = [code for code in codes if code in _STOPPED]
    has_unhandled = any(code not in (_RETURNED, *_STOPPED, *_WITH_MESSAGE) for code in codes)
    if signals and stopped:
        return Stopped(stopped[0])
    if signals and has_unhandled:
        return Stopped(_code_of_unhandled(signals, stop_code))
    return _failure_of(codes[rank], f"process {rank} of {len(codes)}")


def _code_of_unhandled(signals: Sequence[int], stop_code: int | None) -> int:
    """Returns the exit code after ``signals`` that a process did not handle: ``stop_code`` unless Ctrl-C is
    one of them, else as in a shell."""
    if stop_code and signal.SIGINT not in signals:
        return stop_code
    return 128 + signals[0]


def _failure_of(code: int, name: str) -> BaseException:
    """Returns the error for a process that has ended with the exit status ``code``. ``name``: how messages name it."""
    if code in _STOPPED:
        return Stopped(code)
    if code in _WITH_MESSAGE:
        return PeerFailure(f"{name} failed", code)
    if code >= 0:
        return UserError(f"{name} ended with status {code} and without a message; does a callback or a library exit?")
    message = f"{name} was {killed_by(-code)}"  # it could not print anything itself
    return UserError(message) if cause_of_signal(-code) == Cause.COMMAND else PeerLost(message)


def _variables_by_rank(processes: int) -> list[dict[str, str]]:
    """Returns the environment variables of each process: those of torchrun, unless there is only one."""
    if processes == 1:
        return [result_variables()]
    port = free_port()
    return [torchrun_variables(rank, processes, port) | result_variables() for rank in range(processes)]


def _run_process(variables: Mapping[str, str], function: Callable[..., object], args: tuple) -> None:
    """Runs ``function(*args)`` with these environment variables. Ends with `_RETURNED`, or as `run_main` says."""
    exit_on_interrupt()
    end_with_parent()()
    os.environ |= variables
    # A spawned process would spawn its loader workers too, each of which would then import torch again.
    multiprocessing.set_start_method(None, force=True)

    def work(_: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
        function(*args)

    run_main(work)
    sys.exit(_RETURNED)
