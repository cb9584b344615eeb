"""Runs entry scripts, which end with one line for a user error, and with a traceback only for a bug.

docs/processes.md ("How a process ends") shows the other parts: signals, several processes, standard output.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from utils.errors import (
    ExplainedError,
    FailedCheck,
    PeerFailure,
    PeerLost,
    Stopped,
    UserError,
    first_line,
    one_line,
    os_reason,
)
from utils.machine.limits import DISK_FULL, cause_of, explain_limit
from utils.machine.malloc import keep_freed_memory
from utils.process.exit_codes import BUG, CHECK_FAILED, INTERRUPTED, PIPE_CLOSED, USER_ERROR
from utils.process.interrupts import raise_on_interrupt, repeat_interrupt
from utils.process.result_file import claim_result_file, report_error
from utils.process.standard_streams import output_error, tolerate_broken_streams
from utils.program_folders import cache_folder

SPIN_COUNT = "20000"
NEW_OBJECTS_PER_COLLECTION = 10_000  # threshold of Python's garbage collector, 700 by default
PEER_GRACE_S = 2.0

# Errors of the file system that the user can resolve.
_REFUSED = frozenset(
    (
        *DISK_FULL,
        errno.EFBIG,  # a limit of the file system, or of ulimit -f
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
    )
)


def run_main(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Runs ``main(argv)``. Returns if it succeeds, else exits according to `_ENDINGS`, with a code from
    `utils.process.exit_codes`.

    A command whose output cannot be written completes its work. It then exits with 141 if the reader of the output is
    gone, else with 2 and an error line.
    """
    _prepare_process()
    try:
        _run(main, argv)
    except (Exception, KeyboardInterrupt, Stopped) as error:
        _end(error)


def _run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None) -> None:
    """Runs ``main(argv)``. Raises an error if its output could not be written."""
    raise_on_interrupt()
    try:
        main(argv)
    except SystemExit:  # --help, or tools.check found issues
        _check_output()
        raise
    _check_output()


def _prepare_process() -> None:
    """Configures the process before torch and Matplotlib are loaded, and installs hooks for errors without a caller."""
    tolerate_broken_streams()
    claim_result_file()
    # Importing torch creates some 500,000 objects, none of them garbage. With the default threshold they are scanned so
    # often that training starts half a second later. After that it hardly matters: a training step leaves no cycles.
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    # By default OpenMP threads (of torch, which is loaded later) spin for milliseconds while they wait, so a busy
    # process beside training on the CPU makes steps ten times slower. The bound costs nothing (benchmarks/LOG.md).
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no page of stack frames when another process ends
    # Plots create their own canvas. Matplotlib cannot be imported if the backend that a notebook sets is missing.
    os.environ.pop("MPLBACKEND", None)
    with contextlib.suppress(UserError):  # there is no home folder
        os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))  # Matplotlib's font list
    keep_freed_memory()
    threading.excepthook = _thread_excepthook
    sys.unraisablehook = _unraisablehook


class _OutputClosed(Exception):
    """The reader of standard output is gone. (Any other BrokenPipeError, such as from a callback's socket, is a
    bug.)"""


class _Ending(NamedTuple):
    """A row of `_ENDINGS`: an error type, and how it ends the process."""

    error_type: type[BaseException]
    exit_code: int | None  # None: the ``code`` of the error
    report: Callable[[BaseException], None]
    exits_orderly: bool  # see `_exit`


def _wait_for_report(_: BaseException) -> None:
    """Gives the failed process time to print why: launchers stop all processes when the first one exits."""
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(PEER_GRACE_S)


def _print_line(error: BaseException) -> None:
    """Prints the error line, or passes it to the process that started this one."""
    sys.unraisablehook = lambda _: None  # partly constructed objects (torch's loader iterator) fail when they are freed
    line = " ".join(one_line(error_line(error) or "").split())
    if not report_error(line, cause_of(error), is_peer_lost=isinstance(error, PeerLost)):
        print(f"error: {line}", file=sys.stderr, flush=True)


def _print_traceback(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)
    report_error(f"{type(error).__name__}: {first_line(error)}", cause_of(error))


def _print_nothing(_: BaseException) -> None:
    pass


# The first matching row applies. Limits of the machine count as UserError.
_ENDINGS = (
    _Ending(PeerFailure, None, _wait_for_report, exits_orderly=False),
    _Ending(FailedCheck, CHECK_FAILED, _print_line, exits_orderly=False),
    _Ending(UserError, USER_ERROR, _print_line, exits_orderly=False),
    _Ending(Stopped, None, _print_nothing, exits_orderly=True),
    _Ending(KeyboardInterrupt, INTERRUPTED, _print_nothing, exits_orderly=True),
    _Ending(_OutputClosed, PIPE_CLOSED, _print_nothing, exits_orderly=True),
    _Ending(Exception, BUG, _print_traceback, exits_orderly=True),
)


def _end(error: BaseException) -> NoReturn:
    """Reports an error and exits, according to its row of `_ENDINGS`."""
    error_type = _listed_type(error)
    ending = next(each for each in _ENDINGS if issubclass(error_type, each.error_type))
    ending.report(error)
    exit_code = error.code if isinstance(error, PeerFailure | Stopped) else ending.exit_code
    assert exit_code is not None, "only errors with a code have a row without one"
    _exit(exit_code, orderly=ending.exits_orderly)


def _listed_type(error: BaseException) -> type[BaseException]:
    """Returns the error type to look up in `_ENDINGS`."""
    # Python < 3.12 wraps a KeyboardInterrupt that arrives while a class is created.
    if isinstance(error.__cause__, KeyboardInterrupt):
        return KeyboardInterrupt
    is_limit = not isinstance(error, ExplainedError) and error_line(error) is not None
    return UserError if is_limit else type(error)


def error_line(error: BaseException) -> str | None:
    """Returns the line that `run_main` prints about an error, or None if it is a bug."""
    if isinstance(error, ExplainedError):
        return str(error)
    return explain_limit(error) or _explain_os_error(error)


def _check_output() -> None:
    """Raises an error if standard output could not be written, so that the exit code shows that output is lost."""
    error = output_error()
    if isinstance(error, BrokenPipeError):
        raise _OutputClosed
    if error is not None:
        raise UserError(f"standard output cannot be written ({os_reason(error)})")


def _explain_os_error(error: BaseException) -> str | None:
    """Explains a full disk, missing write permission and the like in one line. Returns None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return None
    location = f"{error.filename}: " if error.filename else ""
    if error.errno in DISK_FULL:
        disk = "the disk" if location else "the disk or /dev/shm"
        return f"{location}{disk} is full; free some space or choose another folder"
    if error.errno == errno.EEXIST and location and os.path.isfile(error.filename):
        return f"{location}is a file, not a folder; choose another folder"
    return f"{location}{os_reason(error)}; fix that or choose another folder"


def _thread_excepthook(ended: threading.ExceptHookArgs) -> None:
    """Ignores errors of TensorBoard's writer thread, such as a full disk, which the main thread also encounters."""
    if not type(ended.thread).__module__.startswith("tensorboard"):
        threading.__excepthook__(ended)


def _unraisablehook(ignored: sys.UnraisableHookArgs) -> None:
    """Repeats a Ctrl-C that arrived in an import callback, where Python cannot raise it."""
    if ignored.exc_type is KeyboardInterrupt:
        repeat_interrupt()
    else:
        sys.__unraisablehook__(ignored)


def _exit(code: int, *, orderly: bool) -> NoReturn:
    """Exits. Without ``orderly``, and if there is a process group, ends at once instead: after an error that only this
    process may have met, an orderly exit could wait for the others, which wait for this one."""
    distributed = sys.modules.get("torch.distributed")  # not imported just to exit
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if orderly or not has_group:
        sys.exit(code)
    import multiprocessing  # here, because it would slow down --help

    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    os._exit(code)
