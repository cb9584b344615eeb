"""Runs a command of this program in its own process. The result is its exit code, and a JSON of values.

A crash of the child does not end this process, and the child's memory is free afterwards. The child ends with this
process, even if this process is killed.

Each line of the result file is a JSON mapping; all processes of a run append to it, and the newest value of a key
counts: ``folder`` of a training or validation, ``begun`` once the folder exists, ``files`` of export.py, and ``error``,
the line of a command that failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import Stopped, UserError
from utils.files.temporary_folder import program_temporary_folder
from utils.process.launch import environment_of_child
from utils.process.signals import end_with_parent, killed_by, stop_code

RESULT_VARIABLE = "LOCKSTEP_RESULT"  # path of the result file of the process that is started with it
_path = ""  # the result file of this process, or "" if its result is not read


@dataclass(frozen=True)
class RunResult:
    """How a command ended."""

    code: int  # exit code; negative: the signal that killed it
    values: Mapping[str, Any]  # what it wrote with `write_result`
    reason: str = ""  # why it failed; "" also if a signal stopped it

    @property
    def has_begun(self) -> bool:
        """True if the work of the command had begun (`report_started`)."""
        return bool(self.values.get("begun"))

    def check(self) -> None:
        """Raises `Stopped` if a signal stopped the command, and `RunFailed` if it failed."""
        if self.reason:
            raise RunFailed(self)
        if self.code:
            raise Stopped(self.code)


class RunFailed(UserError):
    """Raised when a command that this process started failed."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(result.reason)
        self.result = result


@dataclass(frozen=True)
class Child:
    """A running or finished command."""

    process: subprocess.Popen
    result_file: Path

    def poll(self) -> RunResult | None:
        """Returns the result of the command, or None while it runs."""
        return None if self.process.poll() is None else self.wait()

    def wait(self) -> RunResult:
        """Waits for the command to end, and returns its result."""
        status = self.process.wait()
        code = stop_code(status) or status
        values = read_result(self.result_file)
        reason = ""
        if code < 0:
            reason = killed_by(-code)
        elif code and not stop_code(status):
            reason = values.get("error", f"exit status {code}")
        return RunResult(code, values, reason)


@contextmanager
def start_child(
    words: Sequence[str],
    *,
    stop: signal.Signals = signal.SIGTERM,
    environment: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Child]:
    """Runs a command line that begins with `utils.program.command_prefix` during the block.

    Args:
        stop: signal sent to the command at the end of the block, or when this process is killed.
        environment: environment variables; None for `environment_of_child`.
        variables: more of them.
        options: of `subprocess.Popen`.
    """
    inherited = environment_of_child() if environment is None else environment
    with program_temporary_folder("result") as folder:
        result_file = folder / "result.jsonl"
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            env={**inherited, **(variables or {}), RESULT_VARIABLE: str(result_file)},
            preexec_fn=end_with_parent(stop) if os.name == "posix" else None,
            **options,
        )
        try:
            yield Child(process, result_file)
        finally:
            if process.poll() is None:
                process.send_signal(stop if os.name == "posix" else signal.SIGTERM)  # Windows knows only the latter
                process.wait()


def claim_result_file() -> None:
    """Reads `RESULT_VARIABLE` and removes it from the environment, so that commands started by a callback do not
    inherit it."""
    global _path
    _path = os.environ.pop(RESULT_VARIABLE, "")


@contextmanager
def collected_results() -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields a function that returns what this process, and those of `spawn`, have written with `write_result` during
    the block."""
    global _path
    previous = _path
    with program_temporary_folder("result") as folder:
        path = folder / "result.jsonl"
        _path = str(path)
        try:
            yield lambda: read_result(path)
        finally:
            _path = previous


def result_variables() -> dict[str, str]:
    """Returns the environment variables for a process that does part of this one's work and shares its result file."""
    return {RESULT_VARIABLE: _path} if _path else {}


def write_result(**values: Any) -> bool:
    """Appends ``values`` to the result file. Returns False if there is none. Raises OSError if they cannot be
    written."""
    if not _path:
        return False
    with open(_path, "ab", buffering=0) as file:
        file.write(f"\n{json.dumps(values)}".encode())  # in one write, because all processes of a run share the file
    return True


def report_started(folder: str | os.PathLike[str]) -> None:
    """Records that the work of a command has begun in ``folder``: its settings and data have been accepted."""
    write_result(folder=os.fspath(folder), begun=True)


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the values that processes wrote with `write_result`. Skips incomplete lines."""
    values: dict[str, Any] = {}
    with suppress(OSError):
        for line in Path(path).read_bytes().splitlines():
            with suppress(ValueError):
                values |= json.loads(line)
    return values
