"""Runs a command of this program in its own process, and reports how it ended.

A crash of the child does not end this process, and the child's memory is free afterwards. The child ends with this
process, even if this process is killed.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from utils.errors import Stopped, UserError
from utils.files.temporary_folder import program_temporary_folder
from utils.machine.limits import Cause
from utils.process.child_signals import cause_of_signal, end_with_parent, killed_by
from utils.process.exit_codes import INTERRUPTED, REQUEUE, USER_ERROR
from utils.process.launch import environment_of_child
from utils.process.outcome import Outcome, outcome_of
from utils.process.result_file import RESULT_VARIABLE, read_result

# Exit statuses of processes ended by a stop signal, and the exit codes that they stand for. A negative status means
# that the process was not handling the signal yet.
_STOPPED_CODES = {
    REQUEUE: REQUEUE,
    INTERRUPTED: INTERRUPTED,
    -signal.SIGINT: INTERRUPTED,
    -signal.SIGTERM: REQUEUE,
    -signal.SIGUSR1: REQUEUE,
}


@dataclass(frozen=True)
class RunResult:
    """The outcome of a command, and the values that it wrote with `utils.process.result_file.write_result`."""

    outcome: Outcome
    reason: str = ""  # the error line of a command that was refused or lost, or that failed
    code: int = 0  # exit code; negative: the signal that killed it
    cause: Cause | None = None  # None if it is done or was stopped
    has_begun: bool = False  # whether the work of the command had begun (`report_begun`)
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, code: int, values: Mapping[str, Any]) -> RunResult:
        """Returns the result of a process that ended with exit status ``code``."""
        has_begun = bool(values.get("begun"))
        if code == 0:
            return cls(Outcome.DONE, has_begun=has_begun, values=values)
        if code in _STOPPED_CODES:
            return cls(Outcome.STOPPED, code=_STOPPED_CODES[code], has_begun=has_begun, values=values)
        if code < 0:  # the process could not write why
            cause = cause_of_signal(-code)
            reason = killed_by(-code)
        else:
            cause = Cause(values.get("cause", Cause.COMMAND))
            reason = values.get("error", f"exit status {code}")
        outcome = outcome_of(cause, has_begun=has_begun)
        return cls(outcome, reason=reason, code=code, cause=cause, has_begun=has_begun, values=values)

    @property
    def failed_because_of_peer(self) -> bool:
        """True if the process failed only because another process of its run did, which reports the reason."""
        return self.code == USER_ERROR and "error" not in self.values

    def check(self) -> None:
        """Raises `Stopped` if a signal ended the command, and `RunFailed` unless it is done or pruned."""
        if self.outcome == Outcome.STOPPED:
            raise Stopped(self.code)
        if self.outcome not in (Outcome.DONE, Outcome.PRUNED):
            raise RunFailed(self)


class RunFailed(UserError):
    """Raised when a command that this process started was refused or lost, or failed."""

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

    @property
    def has_begun(self) -> bool:
        """True once the work of the command has begun (`report_begun`)."""
        return bool(read_result(self.result_file).get("begun"))

    def wait(self) -> RunResult:
        """Waits for the command to end, and returns its result."""
        code = self.process.wait()
        return RunResult.of(code, read_result(self.result_file))


@contextmanager
def start_child(
    words: Sequence[str],
    *,
    stop: signal.Signals = signal.SIGTERM,
    environment: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    start_new_session: bool = False,
) -> Iterator[Child]:
    """Runs a command line that begins with `utils.program.command_prefix` during the block.

    Args:
        stop: signal sent to the command at the end of the block, or when this process is killed.
        environment: environment variables; None for `environment_of_child`.
        cwd, stdout, stderr, start_new_session: see `subprocess.Popen`.

    Raises UserError if there is no folder for temporary files.
    """
    inherited = environment_of_child() if environment is None else environment
    with program_temporary_folder("result") as folder:
        result_file = folder / "result.jsonl"
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
