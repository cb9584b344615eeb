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
from typing import Any

from utils.errors import BUG, LOST_PEER, USER_ERROR, PeerFailure, PeerLost, Stopped, UserError
from utils.logger import early_lines, log_when_configured
from utils.machine.limits import require_posix
from utils.machine.resources import available_cores, available_memory
from utils.process.child import STOP_CODES, result_variables
from utils.process.launch import STORE_PREFIX, torchrun_variables
from utils.process.main import run_main
from utils.process.signals import (
    SAME_SIGNAL_S,
    STOP_SIGNALS,
    end_at_once,
    end_with_parent,
    exit_on_interrupt,
    handle_stop_signals,
    killed_by,
    note_signal,
)
from utils.strings import counted

GRACE_S = 30.0  # how long the others may take to end after one has, before they are killed
PROCESS_BYTES = 600 * 10**6  # memory of a training or validating process on a CPU before its first batch
_GPU_FILES = ("nvidia", "nvhost", "kfd", "dxg")  # in /dev: CUDA, Jetson, ROCm, WSL


def spawn(function: Callable[..., object], processes: int, args: Sequence[Any] = ()) -> None:
    """Runs ``function(*args)`` in ``processes`` processes of this machine, with torchrun's variables. Each uses
    `run_main`, which reports its error. Signals to stop are forwarded. When a process fails, the others are ended.

    The processes import the module of ``function``, and not the main module: a user's script needs no
    ``if __name__ == "__main__"``.

    Raises Stopped if a signal stopped a process, PeerFailure if one failed and said why, PeerLost if it was killed.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    of_run = {STORE_PREFIX: secrets.token_hex(16)} | result_variables()
    ranks = []
    for rank in range(processes):
        variables = torchrun_variables(rank, processes, port) | of_run
        ranks.append(context.Process(target=_run_rank, args=(variables, early_lines(), function, tuple(args))))
    signals: list[int] = []
    first_at = 0.0

    def forward(number: int, _: object) -> None:
        nonlocal first_at
        is_second = bool(signals) and time.monotonic() - first_at > SAME_SIGNAL_S
        if is_second:  # a process that waits for another one cannot handle it
            for process in ranks:
                if process.pid is not None:
                    process.kill()
            end_at_once(STOP_CODES[-signals[0]])
        note_signal(number)
        first_at = first_at or time.monotonic()
        signals.append(number)
        for process in ranks:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    previous = handle_stop_signals(forward)
    resource_tracker.ensure_running()  # otherwise the first process would start it, which unblocks signals
    try:
        with _without_main_module() if function.__module__ != "__main__" else contextlib.nullcontext():
            for process in ranks:
                if signals:
                    break
                # A process gets its signals once it can end without a traceback.
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
                process.start()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        failed = None
        running = {rank: process for rank, process in enumerate(ranks) if process.pid is not None}
        while running and failed is None:
            connection.wait([process.sentinel for process in running.values()], timeout=1)
            for rank, process in list(running.items()):
                if process.exitcode is not None:
                    del running[rank]
                    if process.exitcode and failed is None:
                        failed = rank
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        _end(ranks, stop=not signals)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if failed is None:
        if any(process.pid is None for process in ranks):
            raise Stopped(STOP_CODES[-signals[0]])
        return
    code = ranks[failed].exitcode or 0
    name = f"process {failed} of {processes}"
    if code in STOP_CODES:
        raise Stopped(STOP_CODES[code])
    if code < 0:  # it could not print anything itself
        raise PeerLost(f"{name} was {killed_by(-code)}")
    if code == LOST_PEER:  # no other has ended in `PEER_GRACE_S`
        raise PeerLost(f"{name} lost its connection to another one, which has not failed; NCCL_DEBUG=INFO prints more")
    if code in (BUG, USER_ERROR):
        raise PeerFailure(f"{name} failed", code)
    raise UserError(f"{name} ended with status {code}; did a callback or a library exit?")


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hides the main module during the block, in which processes start: multiprocessing would import it in each."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


def _end(ranks: Sequence[multiprocessing.process.BaseProcess], *, stop: bool) -> None:
    """Waits `GRACE_S` for the processes to end, after SIGTERM if ``stop``; kills those that have not."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        if stop and process.is_alive():
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in started:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()


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


def check_processes(spawn: int, device: str, *, threads: int | None = None) -> None:
    """Raises UserError if ``--spawn`` would start more processes than there are cores (unless they may use a GPU) or
    than fit into memory. Called before torch is imported, which alone can fill the memory in too many processes.

    Args:
        device: the value of `--device`.
        threads: the value of `--threads`, with which users accept sharing cores; 0: not given; None: no such flag.
    """
    if spawn < 2:
        return
    require_posix("--spawn")
    if is_daemonic():
        raise UserError(f"--spawn {spawn}: a daemonic process, as of multiprocessing.Pool, may not start others")
    cores = available_cores()
    free = available_memory()
    is_cpu = device.strip().lower() == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    may_have_gpu = not is_cpu and any(name.startswith(_GPU_FILES) for name in os.listdir("/dev"))
    problem = ""
    if spawn > cores and not threads and not may_have_gpu:
        problem = f"on {counted(cores, 'CPU core')}; start at most {cores}"
        if threads is not None:
            problem += ", or add --threads 1 if they are to share cores"
    elif spawn * PROCESS_BYTES > free:
        needed = f"need about {spawn * PROCESS_BYTES / 1e9:.1f} GB before the first batch"
        problem = f"{needed}, and {free / 1e9:.1f} GB are free; start at most {max(free // PROCESS_BYTES, 1)}"
    if problem:
        raise UserError(f"--spawn {spawn}: {spawn} processes {problem}")
