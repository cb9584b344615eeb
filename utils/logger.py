"""Configures the project's logger, and shows progress over an iterable.

A record is one plain line on standard output, without control codes, so that no file or class name can look like a
separate message.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from utils.address import with_short_addresses
from utils.errors import one_line, os_reason
from utils.strings import counted

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

ONE_RANK = logging.WARNING + 1  # level of a warning that only this rank can give
LINE_EVERY_S = 15.0
LINE_EVERY_FRACTION = 0.1
MIN_LOGGED_S = 1.0  # shorter work has no line
_early_lines: dict[str, None] = {}  # lines that were logged before `configure_logging`, in order
_program_handlers: list[logging.Handler] = []  # those of the user's program that calls a command
_program_level = logging.NOTSET  # that of the user's program


def get_logger() -> logging.Logger:
    """Returns the project's logger, which logs only warnings and errors until `configure_logging` is called."""
    return logging.getLogger("lockstep")


def get_summary_logger() -> logging.LoggerAdapter[logging.Logger]:
    """Returns the project's logger for results, which ``quiet`` does not hide."""
    return logging.LoggerAdapter(get_logger(), {"is_summary": True})


class _Terminal(logging.Handler):
    """Writes to the current standard output (which may be replaced after configuration), above any tqdm bar. ``quiet``:
    only results, warnings and errors."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.quiet or record.levelno >= logging.WARNING or hasattr(record, "is_summary")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Characters that the terminal's encoding lacks (old locales, foreign file names) are escaped.
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            text = self.format(record).encode(encoding, "backslashreplace").decode(encoding)
            bars = terminal_bars(sys.stdout)
            if bars is not None:
                bars.write(text, file=sys.stdout)
            else:
                sys.stdout.write(text + "\n")
                sys.stdout.flush()
        except BrokenPipeError:  # the reader (head, less) is gone, and Python would fail at exit
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
        except Exception:
            self.handleError(record)


class _Waiting(logging.handlers.MemoryHandler):
    """Keeps records for a log file that does not exist yet."""


class _LogFile(logging.FileHandler):
    """A log file. If it cannot be written, one warning is logged, and later records are still tried."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            get_logger().warning("%s: cannot be written (%s)", self.baseFilename, os_reason(error))


def terminal_bars(stream: TextIO) -> type[tqdm] | None:
    """Returns the class ``tqdm`` if lines are printed, ``stream`` is a terminal or a notebook's, and the package is
    installed, else None. In a terminal of 0 columns, as in some containers, tqdm would show nothing."""
    if not any(isinstance(handler, _Terminal) and not handler.quiet for handler in get_logger().handlers):
        return None
    if not (stream.isatty() and _stated_columns(stream)) and "ipykernel" not in sys.modules:
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


def terminal_columns(stream: TextIO) -> int:
    """Returns the width of the terminal that shows ``stream``."""
    return _stated_columns(stream) or shutil.get_terminal_size().columns


def _stated_columns(stream: TextIO) -> int:
    """Returns the width that the terminal of ``stream`` states; 0 if there is no terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a notebook's
        return 0


def _make_plain(record: logging.LogRecord) -> bool:
    """Makes the message one line, without what may be secret in URLs, for all handlers."""
    record.msg = one_line(with_short_addresses(record.getMessage()))
    record.args = ()
    return True


class _WithLevel(logging.Formatter):
    """Begins messages with their level from WARNING upwards."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno < logging.WARNING:
            return record.message
        return f"{'warning' if record.levelno < logging.ERROR else 'error'}: {record.message}"


def configure_logging(is_main: bool, *, quiet: bool = False, file_follows: bool = False) -> None:
    """Configures the project's logger for this process, replacing an earlier configuration. In a user's program whose
    logger ``lockstep`` has handlers, they get all records, and nothing is printed; a level of the program counts.

    Args:
        is_main: rank 0 logs INFO and above. Other ranks do the same and would repeat its warnings: they log only those
            of the level `ONE_RANK`, and errors.
        quiet: print only results, warnings and errors.
        file_follows: whether rank 0 keeps its records for a later `continue_in_file`.
    """
    logger = get_logger()
    logger.filters = [_make_plain]
    _remove_own_handlers()
    handlers: list[logging.Handler] = []
    if not _program_handlers:
        handlers.append(_Terminal(quiet))
        logger.propagate = False
    if file_follows and is_main:
        handlers.append(_Waiting(sys.maxsize, flushLevel=logging.CRITICAL + 1, flushOnClose=False))
    for handler in handlers:
        handler.setFormatter(_WithLevel())
        logger.addHandler(handler)
    level = _program_level or logging.INFO
    logger.setLevel(level if is_main else max(level, ONE_RANK))
    for line in _early_lines:
        logger.info("%s", line)
    _early_lines.clear()


def _remove_own_handlers() -> None:
    logger = get_logger()
    for handler in [handler for handler in logger.handlers if handler not in _program_handlers]:
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


@contextlib.contextmanager
def programs_logging() -> Iterator[None]:
    """Marks the handlers and the level of the logger as those of the user's program during the block, and undoes at its
    end what has been configured in it."""
    global _program_handlers, _program_level
    logger = get_logger()
    previous = (logger.handlers, logger.filters, logger.level, logger.propagate)
    previous_program = (_program_handlers, _program_level)
    own = (_Terminal, _Waiting, _LogFile)  # of a command whose callback calls another one
    _program_handlers = [handler for handler in logger.handlers if not isinstance(handler, own)]
    _program_level = logger.level
    logger.handlers = [*_program_handlers]
    try:
        yield
    finally:
        _remove_own_handlers()
        _program_handlers, _program_level = previous_program
        logger.handlers, logger.filters, logger.level, logger.propagate = previous
        _early_lines.clear()


def early_lines() -> tuple[str, ...]:
    """Returns the lines of `log_when_configured` that wait."""
    return tuple(_early_lines)


def log_when_configured(*lines: str) -> None:
    """Logs each of ``lines`` at INFO, after `configure_logging` if that has not been called yet."""
    if get_logger().handlers:
        for line in lines:
            get_logger().info("%s", line)
    else:
        _early_lines.update(dict.fromkeys(lines))


def continue_in_file(file: Path) -> None:
    """Appends to ``file`` all records since `configure_logging` with ``file_follows``, and all later ones. Does nothing
    without ``file_follows``. If the file cannot be opened, a warning is logged."""
    logger = get_logger()
    for kept in [h for h in logger.handlers if isinstance(h, _Waiting)]:
        logger.removeHandler(kept)
        try:
            handler = _LogFile(file, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            logger.warning("%s: cannot be written (%s); no log file is written", file, os_reason(error))
        else:
            handler.setFormatter(kept.formatter)
            logger.addHandler(handler)
            kept.setTarget(handler)
            kept.flush()
        kept.close()


def progress(
    iterable: Iterable[T], *, desc: str, total: int | None = None, unit: str = "image", enabled: bool = True
) -> Iterator[T]:
    """Yields from ``iterable`` and shows progress with a tqdm bar on a terminal, else with a line every 10 % or 15 s.

    Args:
        total: number of items; default: ``len(iterable)`` if it has one.
        unit: noun for an item, singular.
    """
    if not enabled:
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    bars = terminal_bars(sys.stderr)
    if bars is not None:
        yield from bars(iterable, desc=desc, total=total, dynamic_ncols=True, leave=False)
        return
    yield from _with_lines(iterable, desc=desc, total=total, unit=unit)


def _with_lines(iterable: Iterable[T], *, desc: str, total: int | None, unit: str) -> Iterator[T]:
    """Yields from ``iterable``, and logs the progress. Arguments: see `progress`."""
    logger = get_logger()
    started = time.monotonic()
    last_time = started
    last_count = 0
    done = 0
    for item in iterable:
        yield item
        done += 1
        now = time.monotonic()
        is_due = total is not None and done - last_count >= max(LINE_EVERY_FRACTION * total, 1) and now - last_time >= 1
        if is_due or now - last_time >= LINE_EVERY_S:
            count = f"{done}/{total} ({done / total:.0%})" if total else str(done)
            logger.info("%s: %s, %.0f/s", desc, count, done / max(now - started, 1e-9))
            last_time = now
            last_count = done
    elapsed_s = time.monotonic() - started
    if elapsed_s >= MIN_LOGGED_S:
        logger.info("%s: %s in %.1f s", desc, counted(done, unit), elapsed_s)
