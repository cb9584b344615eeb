"""Runs a command of this program in a process of its own.

A crash of the child does not end this process, and its memory is free afterwards. The child ends with this process,
even if that is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from utils.entrypoint import USER_ERROR
from utils.machine.processes import end_with_parent, killed_by
from utils.program import RESULT_VARIABLE, read_result


@dataclass(frozen=True)
class Child:
    """A running or finished command."""

    process: subprocess.Popen
    result_file: Path

    @property
    def result(self) -> dict[str, Any]:
        """The result that the command has written with `utils.program.write_result`."""
        return read_result(self.result_file)

    @property
    def reason(self) -> str:
        """Why the finished command has failed: the line that it would print."""
        code = self.process.returncode
        if code < 0:
            return killed_by(-code)
        return self.result.get("error") or f"exit status {code}"

    @property
    def has_refused(self) -> bool:
        """Whether the finished command, a training, has refused its settings, its data or this machine before it began
        or continued its run. The same command would be refused again, and the run is as it was."""
        return self.process.returncode == USER_ERROR and "folder" not in self.result

    @property
    def has_full_disk(self) -> bool:
        """Whether the finished command has failed because a disk is full."""
        return bool(self.result.get("disk_full"))


@contextmanager
def start(
    words: Sequence[str],
    *,
    stop: signal.Signals = signal.SIGTERM,
    environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    start_new_session: bool = False,
) -> Iterator[Child]:
    """Runs a command line of `utils.program.command_prefix` during the block.

    Args:
        stop: signal that ends the command at the end of the block, or when this process is killed.
        environment: environment variables; None for those of this process.
        cwd, stdout, stderr, start_new_session: see `subprocess.Popen`.
    """
    inherited = os.environ if environment is None else environment
    with TemporaryDirectory() as folder:
        result_file = Path(folder, "result.json")
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            env={**inherited, RESULT_VARIABLE: str(result_file)},
            preexec_fn=end_with_parent(stop),
            cwd=cwd,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
        )
        try:
            yield Child(process, result_file)
        finally:
            if process.poll() is None:
                process.send_signal(stop)
                process.wait()
