"""A command of this program in a process of its own: a crash does not end this process, and its memory is free
afterwards. It ends with this process, also if that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from utils.distributed.spawn import end_with_parent, killed_by
from utils.program import RESULT_VARIABLE, read_result


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen
    file: Path

    @property
    def result(self) -> dict[str, Any]:
        """Written by `utils.program.write_result`."""
        return read_result(self.file)

    @property
    def reason(self) -> str:
        """Why the command, which has ended, has failed: the line that it would print."""
        code = self.process.returncode
        if code < 0:
            return killed_by(-code)
        return self.result.get("error") or f"exit status {code}"


@contextmanager
def start(
    words: Sequence[str],
    *,
    stop: signal.Signals = signal.SIGTERM,
    environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    process_group: int | None = None,
    start_new_session: bool = False,
) -> Iterator[Child]:
    """Runs a command line of `utils.program.start_of` during the block.

    Args:
        stop: the signal that ends it with the block, or if this process is killed.
        environment: its variables; None: those of this process.
        cwd, stdout, stderr, process_group, start_new_session: as of `subprocess.Popen`.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            env={**(os.environ if environment is None else environment), RESULT_VARIABLE: str(file)},
            preexec_fn=partial(end_with_parent, stop),
            cwd=cwd,
            stdout=stdout,
            stderr=stderr,
            process_group=process_group,
            start_new_session=start_new_session,
        )
        try:
            yield Child(process, file)
        finally:
            if process.poll() is None:
                process.send_signal(stop)
                process.wait()
