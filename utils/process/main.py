"""Runs a script's `main`, and ends the process: one line for a user's error, a traceback only for a bug.

docs/distributed.md has the table of exit codes.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from utils.config.commands import COMMANDS
from utils.config.parser import parse_config
from utils.errors import (
    BUG,
    CHECK_FAILED,
    INTERRUPTED,
    USER_ERROR,
    ExplainedError,
    FailedCheck,
    PeerFailure,
    Stopped,
    UserError,
    first_line,
    one_line,
    os_reason,
)
from utils.machine.limits import DISK_FULL, explain_limit
from utils.machine.malloc import keep_freed_memory
from utils.process.child import claim_result_file, write_result
from utils.process.launch import forget_copy_count, require_one_process, safe_path_variables
from utils.process.signals import StopSignals
from utils.program_folders import cache_folder

SPIN_COUNT = "20000"
NEW_OBJECTS_PER_COLLECTION = 10_000  # threshold of Python's garbage collector, 700 by default
PEER_GRACE_S = 2.0
# Errors of the file system that the user can resolve. EFBIG: a limit of the file system, or of ulimit -f.
_REFUSED = frozenset(
    (
        *DISK_FULL,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ELOOP,  # a symbolic link in place of a file of ours
    )
)


def run_main(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Runs ``main(argv)``. Returns if it succeeds, else exits with a code of utils/errors.py."""
    _prepare_process()
    try:
        with StopSignals([signal.SIGINT]):
            main(argv)
    except PeerFailure as error:
        # The failed process needs time to print why: launchers end all processes when the first one exits.
        time.sleep(PEER_GRACE_S)
        _exit(error.code)
    except Stopped as stop:
        _exit(stop.code)
    except KeyboardInterrupt:  # of a library with a handler of its own, such as Ray
        _exit(INTERRUPTED)
    except Exception as error:
        line = error_line(error)
        if line is None:
            sys.excepthook(type(error), error, error.__traceback__)
            with contextlib.suppress(OSError):
                write_result(error=f"{type(error).__name__}: {first_line(error)}")
            _exit(BUG)
        line = " ".join(one_line(line).split())
        is_passed_on = False
        with contextlib.suppress(OSError):
            is_passed_on = write_result(error=line)  # the process that started this one prints it
        if not is_passed_on:
            print(f"error: {line}", file=sys.stderr, flush=True)
        _exit(CHECK_FAILED if isinstance(error, FailedCheck) else USER_ERROR)


def run_command(name: str, work: Callable[[Any], None], argv: Sequence[str] | None) -> None:
    """Runs the command ``name``: calls ``work`` with the settings in ``argv`` (None: this process's command line).

    Raises UserError for mistakes in the command line and for a single-process command that a launcher started several
    times.
    """
    command = COMMANDS[name]
    settings = parse_config(command.settings, argv)
    if command.divides_work:
        forget_copy_count()
    if command.is_one_process:
        require_one_process(command.title, command.instead)
    work(settings)


def error_line(error: BaseException) -> str | None:
    """Returns the line that `run_main` prints about an error, or None if it is a bug."""
    if isinstance(error, ExplainedError):
        return str(error)
    limit = explain_limit(error)
    if limit or not isinstance(error, OSError) or error.errno not in _REFUSED:
        return limit
    location = f"{error.filename}: " if error.filename else ""
    if error.errno in DISK_FULL:
        disk = "the disk" if location else "the disk or /dev/shm"
        return f"{location}{disk} is full; free some space or choose another folder"
    return f"{location}{os_reason(error)}; fix that or choose another folder"


def _exit(code: int) -> NoReturn:
    """Exits. If there is a process group, ends at once: an orderly exit could wait for the others, which wait for this
    process."""
    distributed = sys.modules.get("torch.distributed")  # not imported just to exit
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        sys.exit(code)
    import multiprocessing  # here, because it would slow down --help

    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    os._exit(code)


def _prepare_process() -> None:
    """Configures the process before torch and Matplotlib are loaded."""
    _open_missing_streams()
    claim_result_file()
    # Importing torch creates some 500,000 objects, none of them garbage. With the default threshold they are scanned so
    # often that training starts half a second later. After that it hardly matters: a training step leaves no cycles.
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    limit_spinning()
    os.environ |= safe_path_variables()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no page of stack frames when another process ends
    # Plots create their own canvas. Matplotlib cannot be imported if the backend that a notebook sets is missing.
    os.environ.pop("MPLBACKEND", None)
    with contextlib.suppress(UserError):  # there is no home folder
        os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))  # Matplotlib's font list
    keep_freed_memory()
    threading.excepthook = _thread_excepthook


def limit_spinning() -> None:
    """Limits how long threads of OpenMP spin while they wait; torch reads the variable when it is imported. By default
    it is milliseconds, and a busy process beside training on the CPU makes steps ten times slower. The bound costs
    nothing (benchmarks/LOG.md)."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def _thread_excepthook(ended: threading.ExceptHookArgs) -> None:
    """Ignores errors of TensorBoard's writer thread, which the main thread also encounters."""
    if not type(ended.thread).__module__.startswith("tensorboard"):
        threading.__excepthook__(ended)


def _open_missing_streams() -> None:
    """Opens closed standard streams as /dev/null. Otherwise the next opened file, such as a checkpoint, would get the
    descriptor of one, and with it the output of libraries."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
