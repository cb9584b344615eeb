"""Runs entry scripts, which end with one line for a user error, and with a traceback only for a bug.

docs/architecture.md ("How a process ends") shows what else takes part: signals, several processes, standard output.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from utils.errors import FailedCheck, PeerFailure, Stopped, UserError, first_line, one_line
from utils.files.program_folders import cache_folder
from utils.interrupts import INTERRUPTED, raise_on_interrupt, repeat_interrupt
from utils.machine import decoder_warnings
from utils.machine.limits import DISK_FULL, explanation, is_disk_full
from utils.machine.resources import keep_freed_memory
from utils.machine.standard_streams import keep_standard_streams, output_error
from utils.program import report_error, write_result

SPIN_COUNT = "20000"
NEW_OBJECTS_PER_COLLECTION = 10_000  # of Python's garbage collector, which by default runs every 700
CHECK_FAILED = 1  # exit codes
USER_ERROR = 2
PIPE_CLOSED = 141
PEER_GRACE_S = 2.0

# Errors of the file system that the user can resolve.
_REFUSED = frozenset(
    (*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
)
_OTHER_FOLDER = "choose another folder (--project, --cache-dir or --stage)"


def run_main(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Runs ``main(argv)``. Returns if it succeeds, else exits.

    Exit codes: 2 with one ``error:`` line for user errors and for limits of the machine (a full disk, memory, open
    files, a missing package); 1 with such a line if a result did not pass its check; 2 without a line if another
    process failed and has printed it; 130 after Ctrl-C; 75 after another stop signal during training (EX_TEMPFAIL of
    sysexits.h, on which a batch system can requeue). Other exceptions are bugs and propagate.

    A command whose output cannot be written completes its work; then it exits with 141 if the reader of the output is
    gone, else with 2 and a line.
    """
    _prepare_process()
    try:
        try:
            raise_on_interrupt()
            main(argv)
        except SystemExit:  # --help, or issues that tools.check has found
            _check_output()
            raise
        _check_output()
    except (Exception, KeyboardInterrupt, Stopped) as error:
        ending = _ending_of(error)
        if ending is None:  # a bug
            write_result(error=f"{type(error).__name__}: {first_line(error)}")
            raise
        if isinstance(error, PeerFailure):
            # The process that failed prints why. Launchers stop all when the first exits: let that one finish.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(PEER_GRACE_S)
        if ending.line:
            _report(error, ending.line)
        if ending.at_once:
            _leave(ending.code)
        sys.exit(ending.code)


def _prepare_process() -> None:
    """Sets what must be set before torch and Matplotlib are loaded, and hooks for errors that reach no caller."""
    keep_standard_streams()
    # Importing torch makes some 500,000 objects, none of them garbage. By default they would be searched so often that
    # the start of a training takes half a second longer. Later little changes: a training step leaves no cycles.
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
    # By default OpenMP's threads (of torch, which is loaded later) spin for milliseconds while they wait, so a busy
    # process next to a training on the CPU makes steps ten times slower. The bound costs nothing (benchmarks/LOG.md).
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no page of stack frames when another process has ended
    # Plots use a canvas of their own. Matplotlib cannot be imported if the backend that a notebook names is missing.
    os.environ.pop("MPLBACKEND", None)
    with contextlib.suppress(UserError):  # there is no home folder
        os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))  # its list of this machine's fonts
    keep_freed_memory()
    threading.excepthook = _thread_excepthook
    sys.unraisablehook = _unraisablehook


class _Ending(NamedTuple):
    """How a process ends after an error."""

    code: int  # exit status
    line: str = ""  # printed after "error: "; "" if there is nothing to say
    at_once: bool = False  # without waiting for the process group, which the error may have broken


def _ending_of(error: BaseException) -> _Ending | None:
    """Returns how the process ends after an error, by the first kind that fits; None for a bug."""
    if isinstance(error, PeerFailure):
        return _Ending(USER_ERROR, at_once=True)
    if isinstance(error, FailedCheck):
        return _Ending(CHECK_FAILED, str(error), at_once=True)
    if isinstance(error, UserError):
        return _Ending(USER_ERROR, str(error), at_once=True)
    if isinstance(error, Stopped):
        return _Ending(error.code)
    # Python < 3.12 wraps a KeyboardInterrupt that comes while a class is made.
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        return _Ending(INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        return _Ending(PIPE_CLOSED)
    line = line_about(error)
    return None if line is None else _Ending(USER_ERROR, line, at_once=True)


def line_about(error: BaseException) -> str | None:
    """Returns the line that `run_main` prints about an error, or None if it is a bug."""
    if isinstance(error, UserError):
        return str(error)
    return explanation(error) or _explain_os_error(error)


def _check_output() -> None:
    """Raises an error if standard output could not be written, so that the exit code says that some of it is lost."""
    error = output_error()
    if isinstance(error, BrokenPipeError):
        raise error
    if error is not None:
        raise UserError(f"standard output cannot be written ({(error.strerror or str(error)).lower()})")


def _explain_os_error(error: BaseException) -> str | None:
    """Explains a full disk, a folder without write permission and the like in one line; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return None
    location = f"{error.filename}: " if error.filename else ""
    if error.errno in DISK_FULL:
        disk = "the disk" if location else "the disk or /dev/shm"
        return f"{location}{disk} is full; free some space or {_OTHER_FOLDER}"
    return f"{location}{(error.strerror or str(error)).lower()}; fix that or {_OTHER_FOLDER}"


def _thread_excepthook(ended: threading.ExceptHookArgs) -> None:
    """Leaves a full disk and the like to the main thread, which meets it, too: TensorBoard writes in a thread."""
    if not type(ended.thread).__module__.startswith("tensorboard"):
        threading.__excepthook__(ended)


def _unraisablehook(ignored: sys.UnraisableHookArgs) -> None:
    """Repeats a Ctrl-C that came in a callback of an import, where Python cannot raise it."""
    if ignored.exc_type is KeyboardInterrupt:
        repeat_interrupt()
    else:
        sys.__unraisablehook__(ignored)


def _report(error: BaseException, line: str) -> None:
    sys.unraisablehook = lambda _: None  # partly constructed objects (torch's loader iterator) fail when they are freed
    report_error(" ".join(one_line(line).split()), is_disk_full=is_disk_full(error))


def _leave(code: int) -> NoReturn:
    """Exits; if this process is in a process group, without the clean-up that could wait for other processes."""
    distributed = sys.modules.get("torch.distributed")  # not imported just to exit
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        sys.exit(code)
    # An orderly exit could wait for the broken group, and other processes wait for this one.
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    decoder_warnings.pass_on()
    os._exit(code)
