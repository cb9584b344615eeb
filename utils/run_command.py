"""Runs a command of `utils.config.commands`: parses its command line, and reports its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from utils.config.commands import COMMANDS
from utils.config.parser import parse_config
from utils.process.launch import forget_copy_count, require_one_process
from utils.process.result_file import write_result


class CommandResult(NamedTuple):
    """The result of a command, for the process that started it."""

    values: Mapping[str, Any]  # for `utils.process.result_file.write_result`
    exit_status: int = 0


def run_command(name: str, work: Callable[[Any], CommandResult | None], argv: Sequence[str] | None) -> None:
    """Runs the command ``name``: calls ``work`` with the settings in ``argv`` (None: this process's command line), and
    reports its result.

    Raises UserError for mistakes in the command line and for a single-process command that a launcher started several
    times, and SystemExit if the result has a non-zero exit status.
    """
    command = COMMANDS[name]
    settings = parse_config(command.settings, argv)
    if command.divides_work:
        forget_copy_count()
    if command.is_one_process:
        require_one_process(command.title, command.instead)
    result = work(settings)
    if result is None:
        return
    write_result(**result.values)
    if result.exit_status:
        raise SystemExit(result.exit_status)
