"""Calls a command: runs it in a process of its own, and prints its output here."""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from utils.errors import CHECK_FAILED, UserError
from utils.logger import TERMINAL_VARIABLE
from utils.process.child import RunFailed, start_child
from utils.process.launch import environment_of_child
from utils.program import command_prefix

_READ_BYTES = 1 << 16  # capacity of a pipe
_POLL_S = 0.1


def call_command(command: str, words: list[str], *, required_key: str) -> Mapping[str, Any]:
    """Runs a command with the arguments ``words``, and returns the result that it wrote with `write_result`.

    The command's output is printed here, with progress bars on terminals and in notebooks, otherwise as lines. Raises
    UserError if the command fails, or its result lacks ``required_key``, and KeyboardInterrupt if it is interrupted
    before saving.
    """
    # In a session of its own: a terminal's Ctrl-C reaches only this process, which forwards it.
    started = start_child(
        [*command_prefix(command), *words],
        stop=signal.SIGINT,
        environment=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with started as child, _interrupts_for(child.process):
        _print_output(child.process)
        result = child.wait()
    if result.is_stopped and not _has_saved(result.values):
        raise KeyboardInterrupt
    has_issues = result.code == CHECK_FAILED and bool(result.values.get("issues"))  # found by tools.check
    if result.code and not result.is_stopped and not has_issues:
        raise RunFailed(result)
    if required_key not in result.values:
        folder = gettempdir()
        raise UserError(f"{command} ended without reporting its result ({folder} may be full; see TMPDIR)")
    return result.values


def _environment() -> dict[str, str]:
    """Returns the environment of a command, with the width of the terminal that shows its output."""
    environment = environment_of_child() | {"PYTHONUNBUFFERED": "1"}
    if _is_terminal() or "ipykernel" in sys.modules:
        columns, lines = shutil.get_terminal_size((120, 24))
        environment |= {TERMINAL_VARIABLE: "1", "COLUMNS": str(columns), "LINES": str(lines)}
    return environment


def _is_terminal() -> bool:
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def _print_output(process: subprocess.Popen) -> None:
    """Prints the output of the process as it arrives, until the process has ended (other programs may still hold its
    output open) or the output is closed. If nothing reads ours any more, the command still completes its work."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert process.stdout is not None, "stdout=PIPE was given"
    with process.stdout as pipe:
        has_ended = False
        while not has_ended:
            has_ended = process.poll() is not None  # before the last read, so that it finds all output
            if connection.wait([pipe.fileno()], timeout=0 if has_ended else _POLL_S):
                data = os.read(pipe.fileno(), _READ_BYTES)
                _print(decoder.decode(data))
                has_ended = has_ended or not data
    _print(decoder.decode(b"", final=True))


def _print(text: str) -> None:
    """Prints ``text``, escaping characters that the output cannot encode, unless the output is closed."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # no reader; ValueError: closed
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)


def _has_saved(values: Mapping[str, Any]) -> bool:
    """Returns whether a stopped training run can be resumed."""
    return "folder" in values and Path(values["folder"], "last.pt").exists()


@contextlib.contextmanager
def _interrupts_for(process: subprocess.Popen) -> Iterator[None]:
    """Forwards interrupts to ``process`` during the block instead of raising KeyboardInterrupt, which could lose
    output."""
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main thread
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
