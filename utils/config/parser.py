"""Reads command lines, files of settings and keyword arguments into the dataclasses of `utils.config.settings`.

From words to settings:

    parse_command                 a command line, or a file of settings (settings_file.py)
      aliases.our_flags           flags of other programs are replaced by ours
      flags.build_parser          argparse, with a flag for each field
    given_settings                values by name: of a file, or of keywords (lockstep/keywords.py)
      schema.build
    plain_values.checked_setting  every value, by the type and the bounds of its field
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Generic

from utils.config.aliases import is_yolo_line, line_to_type, our_flags
from utils.config.commands import command_of
from utils.config.flags import build_parser, shown_name
from utils.config.plain_values import checked_setting
from utils.config.settings import default_of
from utils.config.settings_file import PREFIX, read_settings_file
from utils.errors import UserError, all_mistakes
from utils.schema import DataclassT, build

_NOT_GIVEN: list[str] = []  # value of a setting that no word sets; a list, because `--set` adds to it


@dataclass(frozen=True)
class ParsedCommand(Generic[DataclassT]):
    """The settings of a command, and which of them its user has given."""

    config: DataclassT
    explicit_flags: frozenset[str]  # names of the settings that are given


def parse_command(cls: type[DataclassT], argv: Sequence[str] | None) -> ParsedCommand[DataclassT]:
    """Parses a command line, which may use YOLOv5's flags, or a single argument ``@FILE`` (see `settings_file`).
    ``argv`` None means this process's own. Raises UserError that lists the mistakes and what to write instead."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].startswith(PREFIX):
        path = Path(argv[0].removeprefix(PREFIX))
        return given_settings(cls, read_settings_file(path), str(path))
    command = command_of(cls).name
    if is_yolo_line(command, argv):
        raise UserError(line_to_type(command, argv))
    num_flag_words = argv.index("--") if "--" in argv else len(argv)  # from ``--`` on, no word is a flag
    words, log_lines = our_flags(command, argv[:num_flag_words])
    words += argv[num_flag_words:]

    fields = {field.name: field for field in dataclasses.fields(cls)}
    parsed = argparse.Namespace(**dict.fromkeys(fields, _NOT_GIVEN))
    parser = build_parser(cls)
    with all_mistakes() as mistakes:
        with mistakes.collecting():
            # Raises UserError at a flag that lacks its value, or has one and takes none.
            _, unknown = parser.parse_known_args(words, parsed)
            if unknown:
                mistakes.add(parser.unknown_message(unknown, words))
            required = [field for field in fields.values() if default_of(field) is MISSING]
            missing = [shown_name(field) for field in required if getattr(parsed, field.name) is _NOT_GIVEN]
            if missing:
                mistakes.add(f"the following arguments are required: {', '.join(missing)}")
        values = {name: value for name, value in vars(parsed).items() if value is not _NOT_GIVEN}
        for name, value in values.items():
            with mistakes.collecting():
                values[name] = checked_setting(cls, name, value, shown_name(fields[name]))
    if log_lines:
        from utils.logger import log_when_configured  # imports logging, which --help does not need

        log_when_configured(*log_lines)
    return ParsedCommand(cls(**values), frozenset(values))


def given_settings(cls: type[DataclassT], values: Mapping[str, Any], location: str = "") -> ParsedCommand[DataclassT]:
    """Checks settings that are given as values by name: a `settings_file`, or keyword arguments. Raises UserError that
    lists the mistakes, each with ``location`` ("": none) and the name."""
    return ParsedCommand(build(cls, values, location), frozenset(values))


def parse_config(cls: type[DataclassT], argv: Sequence[str] | None) -> DataclassT:
    """Returns the settings of `parse_command`."""
    return parse_command(cls, argv).config
