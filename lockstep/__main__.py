"""The command ``lockstep``, also ``python -m lockstep`` or ``torchrun -m lockstep``: all commands of the program."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command named by the first argument with the remaining arguments. Exits as the command does."""
    from utils.process.signals import exit_on_interrupt

    exit_on_interrupt()  # while the following import runs
    from utils.process.main import run_main

    run_main(_dispatch, sys.argv[1:] if argv is None else argv)


def _dispatch(arguments: Sequence[str] | None) -> None:
    from utils.config.commands import COMMANDS
    from utils.errors import UserError
    from utils.program import VERSION
    from utils.schema import suggestion

    name, *flags = arguments or ("--help",)
    if name in ("-h", "--help"):
        lines = [f"  {command.name:10}{command.summary}" for command in COMMANDS.values()]
        print("\n".join(["usage: lockstep COMMAND ...", "", *lines, "", "lockstep COMMAND --help lists the flags."]))
    elif name == "--version" or (name in COMMANDS and flags[:1] == ["--version"]):
        print(f"lockstep {VERSION}")
    elif name in COMMANDS:
        sys.argv = [name, *flags]  # as if the command had been started directly
        importlib.import_module(COMMANDS[name].module).main(flags)
    else:
        from utils.config.words import MODES

        hint = f" (lockstep {MODES[name]} does this)" if name in MODES else suggestion(name, COMMANDS)
        raise UserError(f"{name}: no such command{hint}; commands are {', '.join(COMMANDS)}")


if __name__ == "__main__":
    if not __package__:  # started as a file (`utils.program.command_prefix`), whose folder must not be imported from
        package_folder = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [folder for folder in sys.path if folder != package_folder]
        if os.path.dirname(package_folder) not in sys.path:
            sys.path.insert(0, os.path.dirname(package_folder))
    main()
