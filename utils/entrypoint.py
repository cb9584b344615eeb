"""Runs entry scripts, which end with one line for a user error, and with a traceback only for a bug."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from utils.errors import FailedCheck, PeerFailure, Stopped, UserError, first_line, one_line
from utils.files.program_folders import cache_folder
from utils.interrupts import INTERRUPTED, raise_on_interrupt, repeat_interrupt
from utils.machine import decoder_warnings
from utils.machine.limits import DISK_FULL, explanation, is_disk_full
from utils.machine.resources import keep_freed_memory
from utils.machine.standard_streams import keep_standard_streams, output_error
from utils.program import report_error, write_result

SPIN_COUNT = "20000"
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
    keep_standard_streams()
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
    try:
        try:
            raise_on_interrupt()
            main(argv)
        except SystemExit:  # --help, or issues that tools.check has found
            _check_output()
            raise
        _check_output()
    except PeerFailure:
        # The process that failed prints why. Launchers stop all processes when the first exits: let that one finish.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(PEER_GRACE_S)
        _leave(USER_ERROR)
    except UserError as error:
        _fail(error, str(error), CHECK_FAILED if isinstance(error, FailedCheck) else USER_ERROR)
    except Stopped as stop:
        sys.exit(stop.code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(PIPE_CLOSED)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python < 3.12 wraps one that comes while a class is made
            sys.exit(INTERRUPTED)
        line = line_about(error)
        if line is None:
            write_result(error=f"{type(error).__name__}: {first_line(error)}")
            raise
        _fail(error, line)


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


def _fail(error: BaseException, message: str, code: int = USER_ERROR) -> None:
    line = " ".join(one_line(message).split())
    sys.unraisablehook = lambda _: None  # of partly constructed objects (torch's loader iterator)
    report_error(line, is_disk_full=is_disk_full(error))
    _leave(code)


def _leave(code: int) -> NoReturn:
    distributed = sys.modules.get("torch.distributed")  # not imported just to exit
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        sys.exit(code)
    # The process group is broken: an orderly exit could wait for it, and other processes wait for this one.
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    decoder_warnings.pass_on()
    os._exit(code)
