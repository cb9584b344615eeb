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

from utils.decoder_warnings import exit_at_once
from utils.errors import ExplainedError, FailedCheck, PeerFailure, PeerLost, Stopped, UserError, first_line, one_line
from utils.machine.resources import keep_freed_memory
from utils.process.exit_codes import BUG, CHECK_FAILED, INTERRUPTED, PIPE_CLOSED, USER_ERROR
from utils.process.interrupts import raise_on_interrupt, repeat_interrupt
from utils.process.limits import DISK_FULL, cause_of, explain_limit
from utils.process.result_file import report_error, take_result_file
from utils.process.standard_streams import keep_standard_streams, output_error
from utils.program_folders import cache_folder

SPIN_COUNT = "20000"
NEW_OBJECTS_PER_COLLECTION = 10_000  # of Python's garbage collector, which by default runs every 700
PEER_GRACE_S = 2.0

# Errors of the file system that the user can resolve.
_REFUSED = frozenset(
    (*DISK_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
)


def run_main(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> None:
    """Runs ``main(argv)``. Returns if it succeeds, else exits as `_ENDINGS` says, with a code of
    `utils.process.exit_codes`.

    A command whose output cannot be written completes its work; then it exits with 141 if the reader of the output is
    gone, else with 2 and a line.
    """
    _prepare_process()
    try:
        _run(main, argv)
    except (Exception, KeyboardInterrupt, Stopped) as error:
        _end(error)


def _run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None) -> None:
    """Runs ``main(argv)``, and raises an error if its output could not be written."""
    raise_on_interrupt()
    try:
        main(argv)
    except SystemExit:  # --help, or issues that tools.check has found
        _check_output()
        raise
    _check_output()


def _prepare_process() -> None:
    """Sets what must be set before torch and Matplotlib are loaded, and hooks for errors that reach no caller."""
    keep_standard_streams()
    take_result_file()
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


class _OutputClosed(Exception):
    """The reader of standard output is gone. (Any other BrokenPipeError, such as that of a callback's socket, is a
    bug.)"""


class _Ending(NamedTuple):
    """A row of `_ENDINGS`: errors of one type, and the end of the process that they cause."""

    error_type: type[BaseException]
    exit_code: int | None  # None: the ``code`` of the error
    report: Callable[[BaseException], None]
    destroys_group: bool  # the process group, see `_exit`


def _wait_for_report(_: BaseException) -> None:
    """Lets the process that has failed print why: launchers stop all processes when the first one exits."""
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(PEER_GRACE_S)


def _print_line(error: BaseException) -> None:
    """Prints the line about an error, or hands it to the process that has started this one."""
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
    _Ending(PeerFailure, None, _wait_for_report, destroys_group=False),
    _Ending(FailedCheck, CHECK_FAILED, _print_line, destroys_group=False),
    _Ending(UserError, USER_ERROR, _print_line, destroys_group=False),
    _Ending(Stopped, None, _print_nothing, destroys_group=True),
    _Ending(KeyboardInterrupt, INTERRUPTED, _print_nothing, destroys_group=True),
    _Ending(_OutputClosed, PIPE_CLOSED, _print_nothing, destroys_group=True),
    _Ending(Exception, BUG, _print_traceback, destroys_group=True),
)


def _end(error: BaseException) -> NoReturn:
    """Reports an error and exits, by its row of `_ENDINGS`."""
    error_type = _listed_type(error)
    ending = next(each for each in _ENDINGS if issubclass(error_type, each.error_type))
    ending.report(error)
    exit_code = error.code if isinstance(error, PeerFailure | Stopped) else ending.exit_code
    assert exit_code is not None, "only errors with a code have a row without one"
    _exit(exit_code, destroy_group=ending.destroys_group)


def _listed_type(error: BaseException) -> type[BaseException]:
    """Returns the type by which `_ENDINGS` lists an error."""
    # Python < 3.12 wraps a KeyboardInterrupt that comes while a class is made.
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
    """Raises an error if standard output could not be written, so that the exit code says that some of it is lost."""
    error = output_error()
    if isinstance(error, BrokenPipeError):
        raise _OutputClosed
    if error is not None:
        raise UserError(f"standard output cannot be written ({(error.strerror or str(error)).lower()})")


def _explain_os_error(error: BaseException) -> str | None:
    """Explains a full disk, a folder without write permission and the like in one line; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return None
    location = f"{error.filename}: " if error.filename else ""
    if error.errno in DISK_FULL:
        disk = "the disk" if location else "the disk or /dev/shm"
        return f"{location}{disk} is full; free some space or choose another folder"
    return f"{location}{(error.strerror or str(error)).lower()}; fix that or choose another folder"


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


def _exit(code: int, *, destroy_group: bool) -> NoReturn:
    """Exits. Without ``destroy_group`` the process group, which the error may have broken, is left as it is: an orderly
    exit could wait for the other processes, and these wait for this one."""
    distributed = sys.modules.get("torch.distributed")  # not imported just to exit
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if destroy_group or not has_group:
        sys.exit(code)
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    exit_at_once(code)
