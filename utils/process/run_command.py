"""Runs a command of `utils.config.commands` with the settings of its command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from utils.config.commands import COMMANDS
from utils.config.parser import parse_config
from utils.process.launch import forget_copy_count, require_one_process


def run_command(name: str, work: Callable[[Any], None], argv: Sequence[str] | None) -> None:
    """Runs the command ``name``: calls ``work`` with the settings in ``argv`` (None: this process's command line).

    Raises UserError for mistakes in the command line and for a single-process command that a launcher started several
    times.
    """
    command = COMMANDS[name]
    settings = parse_config(command.settings, argv)
    if command.divides_work:
        forget_copy_count()
    if command.is_one_process:
        require_one_process(command.title, command.instead)
    work(settings)
