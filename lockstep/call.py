"""Calls a command within the user's program, and leaves the program as it was.

A command that is started as a script owns its process. Here it owns nothing: it gets the settings that torch has in a
new process, and afterwards the program's are back: torch's, those of the logger, the environment, and the handlers of
signals. The number of threads and TF32 remain the program's, so a run has the bits of the script only if they are the
defaults. A GPU's context and imported modules stay in memory, and torch.compile's caches are empty afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from utils.errors import PeerFailure, Stopped, UserError
from utils.logger import programs_logging
from utils.machine.malloc import keep_freed_memory, return_freed_memory
from utils.process.child import collected_results
from utils.process.launch import environment_of_child
from utils.process.main import error_line, limit_spinning
from utils.process.signals import in_users_program
from utils.program import restart_clock

_ONE_AT_A_TIME = threading.RLock()  # torch's settings are the process's; a callback may call a command within one


def call(
    work: Callable[[], object], *, explain_stop: Callable[[dict[str, Any]], str] = lambda values: ""
) -> dict[str, Any]:
    """Calls ``work``, and returns what it has written with `write_result`, such as the folder of a run. Calls in
    several threads wait for each other.

    Raises UserError with the line that the command would print, and anything else if it is a bug. Raises
    KeyboardInterrupt if it was stopped by Ctrl-C, or by a signal to one of its processes, with the text of
    ``explain_stop``, which gets what it has written. Another signal that asks the program to end does so when the
    command has saved and stopped.
    """
    message = ""
    is_stopped = False
    with _ONE_AT_A_TIME, _program_restored(), in_users_program() as received, collected_results() as results:
        # Errors leave this block without their tracebacks, which would keep the tensors of a run alive.
        try:
            work()
        except (Stopped, KeyboardInterrupt):
            is_stopped = True
        except Exception as error:
            line = error_line(error)
            if line is None:
                raise
            message = line
            if isinstance(error, PeerFailure):  # another process of the run has said why
                message = results().get("error", line)
        values = results()
    if received and received[0] != signal.SIGINT:
        signal.raise_signal(received[0])
    if message:
        raise UserError(message, whole=True)
    if is_stopped:
        raise KeyboardInterrupt(explain_stop(values))
    return values


@contextlib.contextmanager
def _program_restored() -> Iterator[None]:
    """Gives a command the settings of a new process during the block, and restores the program's."""
    restart_clock()
    with _environment_restored():
        limit_spinning()
        import torch  # noqa: F401  before any handler of signals: an exception during its import would be lost

        with programs_logging(), _torch_restored():
            keep_freed_memory()
            try:
                yield
            finally:
                _release_memory()


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    """Restores the environment, and during the block hides the variables of a launcher of one process: a second command
    would join its store as the same rank."""
    before = dict(os.environ)
    visible = environment_of_child()
    for name in before.keys() - visible.keys():
        del os.environ[name]
    os.environ.update(visible)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _torch_restored() -> Iterator[None]:
    """Gives torch the settings of a new process during the block, but for the number of threads and TF32, which are the
    program's, and restores all that a command changes."""
    import torch

    cudnn = torch.backends.cudnn
    deterministic: Any = torch.utils.deterministic  # its attribute has no type stub
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    fills_memory = deterministic.fill_uninitialized_memory
    searches = cudnn.benchmark
    is_cudnn_deterministic = cudnn.deterministic
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    if is_deterministic:  # the function imports torch's compiler, which takes seconds
        torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = True
    cudnn.benchmark = False
    cudnn.deterministic = False
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device.type == "cpu" else device)  # not CPU, whose mode slows every call
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != is_deterministic:
            torch.use_deterministic_algorithms(is_deterministic)
        deterministic.fill_uninitialized_memory = fills_memory
        cudnn.benchmark = searches
        cudnn.deterministic = is_cudnn_deterministic
        if gpu is not None:
            torch.cuda.set_device(gpu)


def _release_memory() -> None:
    """Returns the memory of a command that has ended to the system and the GPU."""
    import torch

    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # compiled models; torch stops compiling after a few of the same code
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_freed_memory()
